"""`start` and `run`: a Python that has imported torch already, with the interface of `subprocess`.

    out = run("-c", code, env=..., capture_output=True, text=True)
    ranks = [start("script.py", str(rank), stdout=subprocess.PIPE) for rank in range(2)]

Importing torch takes a processor two seconds, forking a process that has done so (`server.py`) some
milliseconds. It is the same with the Pythons that a forked program starts, such as the ranks of
torchrun, and with those of a launcher that gets `executable()` in the place of Python. This is for
tests of what a program does once it runs. Tests of its start (imports, or variables that Python,
the loader or a library reads when it is loaded) start a Python of their own, with `subprocess`.
"""

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from tests.ranks import client

ROOT = Path(__file__).resolve().parents[2]
SERVER = "TESTS_SERVER"  # in the environment: the folder of a server that is there already
# For `run_first`: a comparison does not wait for the default to have chosen its schedule.
SETTLES_SOON = (
    "from dpcore.tools.compare.training import ranks; ranks.SETTLING_STEPS = ranks.WARM_STEPS"
)


@cache
def folder():
    """Of the server's socket; for a PATH, since its `python`, `torchrun` and `dpcore` are those of
    this environment with forked processes."""
    if given := os.environ.get(SERVER):
        return Path(given)
    made = Path(tempfile.mkdtemp(prefix="dpcore-tests-"))
    program = made / "python"
    program.write_text(f"#!{sys.executable} -IS\n{Path(client.__file__).read_text()}")
    for path in (Path(sys.executable).with_name(name) for name in ("torchrun", "dpcore")):
        if path.exists():
            _, _, script = path.read_text().partition("\n")
            (made / path.name).write_text(f"#!{program}\n{script}")
    for path in made.iterdir():
        path.chmod(0o755)
    own, owned = socket.socketpair()
    own.detach()  # open as long as this process is there, and then the server ends
    with owned, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(made / "server"))
        listener.listen(128)
        handles = [listener.fileno(), owned.fileno()]
        environment = os.environ | {
            "OPENBLAS_NUM_THREADS": "1",  # its pool starts at the import
            "OMP_WAIT_POLICY": "passive",  # threads that wait leave the processor to other tests
        }
        subprocess.Popen(
            [sys.executable, "-m", "tests.ranks.server", *map(str, handles)],
            cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            pass_fds=handles,
        )  # fmt: skip
    return made


def executable():
    """What a launcher may start in the place of this Python, to have forked ranks."""
    return str(folder() / "python")


class _Forked(subprocess.Popen):
    """A process that the server has forked. The server waits for it and says how it ended. These
    are the methods by which `Popen` starts processes and waits for them."""

    def __init__(self, words, network, **options):
        self._network = network
        super().__init__([str(word) for word in words], **options)

    def _execute_child(
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo,
        creationflags, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *more,
    ):  # fmt: skip
        inherited = zip((p2cread, c2pwrite, errwrite), (0, 1, 2), strict=True)
        self.pid, line = client.ask(
            str(folder() / "server"),
            args,
            {shared: own if own >= 0 else shared for own, shared in inherited},
            dict(os.environ if env is None else env),
            os.path.abspath(cwd or os.getcwd()),
            network=self._network,
            new_session=more[5],
            executable=str(folder() / "python"),
        )
        self._end = line.detach()
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    def _try_wait(self, flags):
        if flags & os.WNOHANG and not select.select([self._end], [], [], 0)[0]:
            return 0, 0
        status = os.read(self._end, 100) or b"%d" % signal.SIGKILL  # the server was killed
        os.close(self._end)
        return self.pid, int(status)

    def _internal_poll(self, _deadstate=None):
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                process, status = self._try_wait(os.WNOHANG)
                if process:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


def start(*words, network="", **options):
    """``subprocess.Popen([sys.executable, *words], **options)``, within a network namespace if one
    is named. The options may be stdin, stdout, stderr, text, cwd, env and start_new_session."""
    return _Forked(words, network, **options)


def run(*words, input=None, timeout=None, capture_output=False, check=False, **options):
    """``subprocess.run([sys.executable, *words], ...)``."""
    if input is not None:
        options["stdin"] = subprocess.PIPE
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start(*words, **options) as process:
        try:
            out, err = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def run_first(monkeypatch, code):
    """In this test, programs that are forked run this code before their own."""
    monkeypatch.setenv("TESTS_RUN_FIRST", code)
