"""Where a rank's program is: recorded once a second beside it, for those who look while it hangs.

A rank that calls nothing tells its peers nothing, and is the one that they want to know about. So a
thread of the process looks once a second at the line that the program is in, writes it into the
rank's black box, and sends it to ranks of other hosts if the rank has entered no operation since.
``dpcore inspect --job`` reads it there. A look takes some microseconds; what it records are names
of files and functions, and line numbers. Nothing is recorded while the process is stopped, or while
native code keeps Python's lock: that shows as well, as silence.

The same look notices a wait that takes long, long before its deadline, and lets it be explained in
the log: after 10 seconds, then after 20, 40, ..., and after a wait that was as long as that, only
one that is twice as long is explained.

The thread begins with the first communicator and sleeps while none is open.
"""

from __future__ import annotations

import atexit
import gc
import os
import site
import sys
import sysconfig
import threading
import time
import weakref
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from dpcore.base import plugged_in

if TYPE_CHECKING:
    from dpcore.comm.communicators.native import Communicator

_BEAT_SECONDS = 1.0
_LONG_SECONDS = 10.0
_LONGEST = 230  # bytes; the black box has room for kWhereBytes of csrc/comm/memory/control.h
_LOADERS = ("torch.utils.data", "torchdata", "webdataset", "datasets.")
_LIBRARIES = tuple(
    os.path.join(path, "")
    for path in {
        str(Path(__file__).parents[2]),
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
        *site.getsitepackages(),
        site.getusersitepackages(),
    }
)


def place_of(frame: FrameType | None) -> str:
    """The innermost line of the program itself, and what of a library it is in.

    >>> import sys
    >>> place_of(sys._getframe()).split(" in ")[-1]
    '<module>'
    """
    inner, own, loads = frame, None, False
    while frame is not None and own is None:
        if _is_library(frame):
            loads |= str(frame.f_globals.get("__name__", "")).startswith(_LOADERS)
            frame = frame.f_back
        else:
            own = frame
    if inner is None:
        return ""
    if own is None:
        return _line_of(inner)
    text = _line_of(own)
    if inner is not own:
        module = str(inner.f_globals.get("__name__", "?"))
        text += f", which waits for a data loader ({module}" if loads else f" (within {module}"
        text += f".{inner.f_code.co_name})"
    return text


def _place_of_thread(thread: int) -> str:
    """Without garbage collection: it may run finalizers when an object is made for a frame, and
    they may let the thread leave that frame meanwhile, whose object is then one of freed memory."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return place_of(sys._current_frames().get(thread))
    finally:
        if collects:
            gc.enable()


def _is_library(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith((*_LIBRARIES, "<frozen"))


def _line_of(frame: FrameType) -> str:
    name = "/".join(Path(frame.f_code.co_filename).parts[-2:])
    return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"


class _Watched:
    def __init__(self, communicator: Communicator) -> None:
        self.communicator = weakref.ref(communicator)
        self.thread = threading.get_ident()  # the one that called init()
        self.text = ""
        self.since_ns = 0

    def look(self) -> bool:
        """False when there is nothing to look at any more."""
        communicator = self.communicator()
        if communicator is None or communicator.closed:
            return False
        text = _place_of_thread(self.thread)
        if text != self.text or self.since_ns == 0:
            self.text, self.since_ns = text, time.monotonic_ns()
        communicator._native.show_placement(
            text.encode()[:_LONGEST].decode(errors="ignore"), self.since_ns
        )
        return True


class _Watch:
    def __init__(self) -> None:
        self._lock = threading.Lock()  # of the list
        self._watched: list[_Watched] = []
        self._news = threading.Event()
        self._ends = False
        self._thread: threading.Thread | None = None
        self._explains_after = _LONG_SECONDS

    def add(self, communicator: Communicator) -> None:
        with self._lock:
            self._watched.append(_Watched(communicator))
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="dpcore-where", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # no more threads: ranks work without
                    return
                self._thread = thread
        self._news.set()

    def _run(self) -> None:
        while not self._ends:
            with self._lock:
                watched = list(self._watched)
            over = [each for each in watched if not each.look()]
            self._explain_long_wait()
            with self._lock:
                self._watched = [each for each in self._watched if each not in over]
                idle = not self._watched
            del watched, over
            self._news.wait(None if idle else _BEAT_SECONDS)
            self._news.clear()

    def _explain_long_wait(self) -> None:
        from dpcore import _C

        so_far, timeout = _C.longest_wait()
        if so_far >= self._explains_after:
            while self._explains_after <= so_far:
                self._explains_after *= 2
            plugged_in.waits_for_long(timeout)

    def end(self) -> None:
        self._ends = True
        self._news.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)


_watch = _Watch()


def watch(communicator: Communicator) -> None:
    """Notes from now on where the calling thread is, until the communicator closes."""
    _watch.add(communicator)


@atexit.register
def _end() -> None:
    _watch.end()


def _forget() -> None:
    """In a forked child, which has neither the thread nor the communicators of its parent."""
    global _watch
    _watch = _Watch()


os.register_at_fork(after_in_child=_forget)
