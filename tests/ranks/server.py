"""A Python that has imported torch and dpcore once, and forks copies of itself that go on as
programs of their own. `python.py` starts it, `client.py` asks it for them.

The server runs no tensor operation and makes no communicator. It has one thread, so no lock is held
when it forks. A copy gets the arguments, environment, folder and descriptors of the request and a
new `__main__`, and ends as every Python does, except that neither the libraries nor Python's own
strings and types are taken apart. It is killed when whoever has asked is gone.
"""

import contextlib
import ctypes
import fcntl
import gc
import importlib
import importlib.util
import itertools
import json
import multiprocessing
import os
import select
import shutil
import signal
import socket
import sys
import types
import weakref

LIBRARIES = (
    "numpy",
    "pytest",
    "torch",
    "torch.distributed.run",
    "torch._dynamo",  # the first optimizer of a process imports it: two seconds
    "torch.distributed.fsdp",  # these two take as long
    "torch.distributed.pipelining",
)
OURS = (
    "dpcore._C",
    "dpcore.__main__",
    "dpcore.comm.launch.session",
    "dpcore.comm.launch.spawn",
    "dpcore.comm.launch.torch_backend",
    "dpcore.ddp.data_parallel",
    "dpcore.tools.compare.training.worker",
    "dpcore.tools.show",
)
# Code that a program runs before its own: what a test sets for the programs that it starts.
FIRST = "TESTS_RUN_FIRST"
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
MS_REC, MS_SLAVE, MNT_DETACH = 0x4000, 0x80000, 2
MOST_DESCRIPTORS = 250  # that the kernel passes in one message


def serve(listener, owner):
    """Forks a copy for every request and reports how each one ends, until the owner is gone.
    Returns the request and its descriptors in a copy, None in the server."""
    running = {}  # by process handle: its number, and the line to whoever has asked
    while True:
        lines = {line: handle for handle, (_, line) in running.items()}
        ready, _, _ = select.select([owner, listener, *running, *lines], [], [])
        for handle in running.keys() & set(ready):
            process, line = running.pop(handle)
            with contextlib.suppress(OSError):
                line.send(str(os.waitpid(process, 0)[1]).encode())
            line.close()
            os.close(handle)
        for line in lines.keys() & set(ready):
            if lines[line] in running:  # nobody waits for it any more
                process, _ = running.pop(lines[line])
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
                line.close()
                os.close(lines[line])
        if owner in ready:
            return None
        if listener in ready:
            line, _ = listener.accept()
            request, descriptors, _, _ = socket.recv_fds(line, 1 << 20, MOST_DESCRIPTORS)
            if not request:
                line.close()
                continue
            assert len(os.listdir("/proc/self/task")) == 1, "the server has threads"
            process = os.fork()
            if process == 0:
                request = json.loads(request)
                if request.get("new_session"):
                    os.setsid()
                with contextlib.suppress(OSError):
                    line.send(str(os.getpid()).encode())
                return request, descriptors
            for descriptor in descriptors:
                os.close(descriptor)
            running[os.pidfd_open(process)] = process, line


def take(wanted, descriptors):
    """Makes these descriptors those that are wanted, and closes all others."""
    above = max(wanted) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, above) for descriptor in descriptors]
    for number, descriptor in zip(wanted, moved, strict=True):
        os.dup2(descriptor, number)
    ends = [-1, *sorted(wanted), os.sysconf("SC_OPEN_MAX")]
    for one, following in itertools.pairwise(ends):
        if one + 1 < following:  # Python takes an empty range at 0 for all there are
            os.closerange(one + 1, following)


def enter(network, name_of_host):
    """These namespaces, where they are others; with a network, a /sys that shows it."""
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result):
        if result != 0:
            raise OSError(ctypes.get_errno(), "cannot enter a namespace")

    if is_other(name_of_host, "uts"):
        check(libc.setns(name_of_host, CLONE_NEWUTS))
    if is_other(network, "net"):
        check(libc.setns(network, CLONE_NEWNET))
        check(libc.unshare(CLONE_NEWNS))
        check(libc.mount(b"", b"/", b"none", MS_SLAVE | MS_REC, None))
        check(libc.umount2(b"/sys", MNT_DETACH))
        check(libc.mount(b"namespace", b"/sys", b"sysfs", 0, None))


def is_other(namespace, kind):
    return os.fstat(namespace).st_ino != os.stat(f"/proc/self/ns/{kind}").st_ino


def program(words):
    """The code that the command line `python WORDS` runs, and what its module knows of itself.
    Sets sys.argv and sys.path as Python does."""
    kind, *rest = words
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        return compile(rest[0], "<string>", "exec"), {}
    if kind == "-m":
        sys.path.insert(0, os.getcwd())
        name = rest[0]
        spec = importlib.util.find_spec(name)
        if spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
        sys.argv = [spec.origin, *rest[1:]]
        about = {"__spec__": spec, "__package__": spec.parent, "__file__": spec.origin}
        return spec.loader.get_code(spec.name), about
    sys.argv = words
    sys.path.insert(0, os.path.dirname(os.path.realpath(kind)))
    with open(kind, "rb") as source:
        return compile(source.read(), kind, "exec"), {"__file__": kind}


def become(request, descriptors):
    """Runs the program in this process, up to its end or exception."""
    network, name_of_host, *own = descriptors
    enter(network, name_of_host)
    take(request["descriptors"], own)
    os.sched_setaffinity(0, request["processors"])
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.executable = request["executable"]
    multiprocessing.set_executable(sys.executable)
    if request.get("unbuffered"):
        sys.stdout.reconfigure(line_buffering=True)
    if threads := os.environ.get("OMP_NUM_THREADS", ""):  # read when the library was loaded
        sys.modules["torch"].set_num_threads(int(threads))
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [*filter(None, own), *INSTALLED]
    exec(os.environ.get(FIRST, ""), {})
    code, about = program(request["words"])
    main = types.ModuleType("__main__")
    vars(main).update(about)
    sys.modules["__main__"] = main
    status = None
    try:
        exec(code, vars(main))
        status = 0
    except SystemExit as end:
        status = 0 if end.code is None else end.code
        raise
    finally:
        end_early(status)


class Last:
    """Ends the process when Python clears `sys`, the last of all modules. All that is left then is
    to take strings and types apart, which takes as long as everything before it."""

    def __init__(self, status):
        self.status, self.end = status, ctypes.PyDLL(None).exit
        self.files = [sys.stdout, sys.stderr]

    def __del__(self):
        for file in self.files:
            if not file.closed:
                file.flush()
        self.end(self.status)


def end_early(status):
    """Unless what follows is seen from outside: another status, or what a library has asked Python
    to call at its very end, as mpi4py does with MPI_Finalize."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
        if isinstance(status, int) and "mpi4py" not in sys.modules:
            sys.last = Last(status)


class Kept:
    """Takes modules out of Python's hands when it ends: it calls `__interactivehook__` no more, and
    deletes it just before it takes all modules apart."""

    def __init__(self, names):
        self.names, self.modules, self.take = names, [], sys.modules.pop
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.modules))  # it lives for ever

    def __del__(self):
        for name in self.names:
            self.modules.append(self.take(name, None))


def leave_libraries():
    """What is loaded by now stays as it is when a copy ends, since every page of it would be copied
    to be taken apart: its modules are kept, and neither its finalizers nor its destructors run.
    Those of a library come after Python's own end, and torch's undo its table of operators."""
    for finalizer in list(weakref.finalize._registry):
        finalizer.atexit = False
    sys.__interactivehook__ = Kept(set(sys.modules) - {"__main__", "builtins", "sys"})
    libc = ctypes.CDLL(None)
    for last in (libc._exit, libc.fcloseall):  # called in the other order, with the exit status
        libc.on_exit(ctypes.cast(last, ctypes.c_void_p), None)


if __name__ == "__main__":
    ROOT = os.getcwd()
    INSTALLED = [path for path in sys.path if path and os.path.realpath(path) != ROOT]
    for name in LIBRARIES:
        importlib.import_module(name)
    leave_libraries()
    for name in OURS:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what all copies share need not be looked through by each
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for those who ask
    listener, owner = (socket.socket(fileno=int(number)) for number in sys.argv[1:])
    asked = serve(listener, owner)
    if asked is not None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        listener.close()
        owner.close()
        become(*asked)
    else:
        shutil.rmtree(os.path.dirname(listener.getsockname()))
