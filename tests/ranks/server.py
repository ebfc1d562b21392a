"""A Python that has imported torch and dpcore once, and forks copies of itself that go on as
programs of their own. `python.py` starts it and asks it for them.

The server runs no tensor operation and makes no communicator. It has one thread, so no lock is held
when it forks. A copy gets the arguments, environment, folder and descriptors of the request and a
new `__main__`, and ends as every Python does.
"""

import ctypes
import gc
import importlib
import importlib.util
import json
import os
import select
import signal
import socket
import sys
import types

PRELOADED = (
    "numpy",
    "torch",
    "torch.distributed.run",
    "torch._dynamo",  # the first optimizer of a process imports it: two seconds
    "dpcore._C",
    "dpcore.launch.session",
    "dpcore.torch_backend",
    "dpcore.ddp.data_parallel",
)
CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000
MS_REC, MS_SLAVE, MNT_DETACH = 0x4000, 0x80000, 2


def serve(line):
    """Forks a copy for every request and reports how each one ends, until the line is closed.
    Returns the request in a copy, None in the server."""
    running = {}  # by process handle: its number, and where to say how it ended
    while True:
        ready, _, _ = select.select([line, *running], [], [])
        for handle in running.keys() & set(ready):
            process, end = running.pop(handle)
            os.write(end, str(os.waitpid(process, 0)[1]).encode())
            os.close(end)
            os.close(handle)
        if line not in ready:
            continue
        request, descriptors, _, _ = socket.recv_fds(line, 1 << 20, 4)
        if not request:
            return None
        assert len(os.listdir("/proc/self/task")) == 1, "the server has threads"
        process = os.fork()
        if process == 0:
            request = json.loads(request)
            if request["new_session"]:
                os.setsid()
            for target, source in enumerate(descriptors[1:]):
                os.dup2(source, target)
            line.send(str(os.getpid()).encode())
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            return request
        for descriptor in descriptors[1:]:
            os.close(descriptor)
        running[os.pidfd_open(process)] = process, descriptors[0]


def enter(network):
    """As `ip netns exec`: the network namespace of this name, and a /sys that shows it."""
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result):
        if result != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {network}")

    with open(f"/run/netns/{network}") as namespace:
        check(libc.setns(namespace.fileno(), CLONE_NEWNET))
    check(libc.unshare(CLONE_NEWNS))
    check(libc.mount(b"", b"/", b"none", MS_SLAVE | MS_REC, None))
    check(libc.umount2(b"/sys", MNT_DETACH))
    check(libc.mount(network.encode(), b"/sys", b"sysfs", 0, None))


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


def become(request):
    """Runs the program in this process, up to its end or exception."""
    if request["network"]:
        enter(request["network"])
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [*filter(None, own), *INSTALLED]
    code, about = program(request["words"])
    main = types.ModuleType("__main__")
    vars(main).update(about)
    sys.modules["__main__"] = main
    exec(code, vars(main))


if __name__ == "__main__":
    ROOT = os.getcwd()
    INSTALLED = [path for path in sys.path if path and os.path.realpath(path) != ROOT]
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what all copies share need not be looked through by each
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for those who ask
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    if request is not None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        become(request)
