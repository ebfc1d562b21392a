"""``DPCORE_TRACE=run.json``: a trace of a whole run, without a change to the script.

It records the same events as ``dpcore.trace``, for the first communicator that the program makes.
It ends with ``finalize()`` or with the program: a normal exit, an uncaught exception,
``sys.exit``, or the SIGTERM that a launcher sends to the remaining ranks when one has failed.
After ``finalize()`` the next ``init()`` begins the next file (``run.2.json``).

Ranks end at different times, and some end because of an error, so no rank waits for another at the
end. Each adds its events to the file as it ends (joining.py); the last one completes it. A rank
that is killed by SIGKILL is missing from it. If the program itself uses ``dpcore.trace``, that
trace replaces this recording.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import multiprocessing.util
import os
import signal
import stat
import sys
import threading
import warnings
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from dpcore.comm.launch import session
from dpcore.errors import Unsupported
from dpcore.recorder import facts as trace_facts
from dpcore.recorder import file as trace_file
from dpcore.recorder import joining
from dpcore.recorder.recording import Trace, _key_of, _recording

if TYPE_CHECKING:
    from dpcore.comm.communicators.native import Communicator

_VARIABLE = "DPCORE_TRACE"
_CAPACITY = 65536  # as dpcore.trace()

_of_process: dict[str, int] = {}  # "begun": how many recordings
_of_thread = threading.local()  # the same, for a rank that is a thread
_running: list[Automatic] = []
_is_installed = _has_warned = False


class Automatic(Trace):
    """A recording that lasts until the program ends or starts a ``dpcore.trace`` of its own."""

    def __init__(self, comm: Communicator, job: str, began_ns: int, target: Path) -> None:
        super().__init__(None, comm, _CAPACITY)
        self.comm = comm
        self._began_ns = began_ns
        self._run = hashlib.sha256(job.encode()).hexdigest()[:16]
        self._target = target

    def end(self, problem: BaseException | None) -> None:
        """Adds this rank to the file."""
        if self._state != "recording":
            return
        self.__exit__(None, None, None)
        _running.remove(self)
        facts = {"backend": self.comm.backend, "link": self.comm._link, "models": []}
        with contextlib.suppress(Exception):  # of a communicator that has failed or was destroyed
            facts = trace_facts.facts_of(self.comm)
        if problem is not None:
            facts["error"] = f"rank {self.comm.rank}: {type(problem).__name__}: {problem}"
        world_size = self.comm.world_size
        part = trace_file.chrome_trace([self._ended()], world_size, facts)
        try:
            ranks = joining.add(self._target, part, self._run, self._began_ns)
        except joining.FolderLocked as locked:
            print(f"{_VARIABLE}: {locked}", file=sys.stderr)
            return
        except OSError as failure:
            print(f"{_VARIABLE}: the trace could not be written: {failure}", file=sys.stderr)
            return
        if len(ranks) == world_size:
            print(
                f"{_VARIABLE}: {self._target} shows {_number_of_ranks(world_size)}; look at it "
                f"with: dpcore show {self._target}",
                file=sys.stderr,
            )

    def discard(self) -> None:
        self.__exit__(None, None, None)
        _running.remove(self)

    def _gives_way_to(self, other: Trace) -> bool:
        self.discard()
        _warn_once(
            f"{_VARIABLE} is ignored: the program records itself with dpcore.trace"
            + (f", into {other._path}" if other._path else "")
        )
        return True


def begin(comm: Communicator, job: str, began_ns: int) -> None:
    """Records the first communicator. Called for each new one, except those made by ``split``.
    ``job`` is the rendezvous name of its ranks, and ``began_ns`` a time before their rendezvous."""
    _be_called_at_the_end()
    begun = vars(_of_thread) if comm.transport == "inproc" else _of_process
    other = _recording.get(_key_of(comm))
    if isinstance(other, Automatic) and getattr(comm, "_on_host", None) is other.comm:
        other.discard()  # the same ranks, and now their GPUs as well
        begun["begun"] -= 1
    elif other is not None and other._comm.closed and isinstance(other, Automatic):
        other.end(None)  # its group was destroyed
    elif other is not None:
        _warn_once(
            f"{_VARIABLE}: the file shows the first communicator of this program, of "
            f"{_number_of_ranks(other._comm.world_size)}, and not the one of "
            f"{_number_of_ranks(comm.world_size)} that was made now"
        )
        return
    number = begun.get("begun", 0) + 1
    recording = Automatic(comm, job, began_ns, _target(number))
    begun["begun"] = number
    recording.__enter__()
    _running.append(recording)
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end_by_signal)


def _target(number: int) -> Path:
    """The file of the n-th recording. Raises if the variable names no file that can be written."""
    text = os.environ.get(_VARIABLE, "")
    path = Path(text).absolute()
    if not path.parent.is_dir():
        raise Unsupported(
            f"{_VARIABLE}={text}: there is no folder {path.parent}; name the file that the trace "
            "is written to, such as run.json, in a folder that exists"
        )
    if path.exists() and not stat.S_ISREG(path.stat().st_mode):
        kind = "a folder" if path.is_dir() else "not a regular file"
        raise Unsupported(
            f"{_VARIABLE}={text}: {path} is {kind}; name the file that the trace is written to, "
            "such as run.json"
        )
    return path if number == 1 else path.with_name(f"{path.stem}.{number}{path.suffix}")


def _number_of_ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _warn_once(text: str) -> None:
    global _has_warned
    if not _has_warned:
        _has_warned = True
        warnings.warn(text, stacklevel=4)


# ---- the end ---------------------------------------------------------------------------------


def _be_called_at_the_end() -> None:
    """Registers the end of recordings with ``finalize``, with the interpreter, and with
    multiprocessing, since its processes skip ``atexit``. Once per process and forked child."""
    global _is_installed
    multiprocessing.util.Finalize(None, _end_all, exitpriority=0)
    if _is_installed:
        return
    _is_installed = True
    trace_facts.outlive_models()
    session.call_before_finalize(_end_with)
    atexit.register(_end_all)  # before session's own: open communicators are asked for facts
    os.register_at_fork(after_in_child=_forget)


def _end_with(comm: Communicator) -> None:
    """Ends the recording of a communicator before ``finalize`` closes it."""
    recording = _recording.get(_key_of(comm))
    if isinstance(recording, Automatic):
        recording.end(_problem())


def _end_all() -> None:
    for recording in list(_running):
        recording.end(_problem())


def _problem() -> BaseException | None:
    """The error that ends the program, if there is one."""
    problem = sys.exc_info()[1] or getattr(sys, "last_value", None)
    is_success = isinstance(problem, SystemExit) and not problem.code
    return None if is_success else problem


def _end_by_signal(number: int, _frame: FrameType | None) -> None:
    for recording in list(_running):
        recording.end(SystemExit(f"ended by {signal.Signals(number).name}"))
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _forget() -> None:
    """Drops the parent's recordings in a forked child."""
    for recording in _running:
        _recording.pop(recording._key, None)
    _running.clear()
    _of_process.clear()
