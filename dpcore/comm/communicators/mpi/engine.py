"""Posts operations in order, polls them, and says what went wrong.

**Order.** MPI matches collectives of a communicator by the order in which they are posted. An
operation that is posted in several blocks holds back the operations of its group behind it until
its last block is posted.

**Progress.** MPI moves data while a thread calls it. A thread that waits polls whatever is in
flight; while none waits, a thread of the engine does. That needs ``MPI_THREAD_MULTIPLE``; where
MPI was started with less there is no such thread, and with ``MPI_THREAD_FUNNELED`` or less only the
thread that started MPI may call.

**Failures.** All groups that were split from one communicator share an engine. MPI cannot take back
what was posted, so after a deadline, an error of MPI or an ``abort`` all of them are over: later
calls raise the first error again, and what MPI may still read or write is kept alive.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from dpcore import _C
from dpcore.comm.communicators.mpi.library import library_name
from dpcore.comm.communicators.mpi.operation import MpiWork
from dpcore.comm.communicators.mpi.recorder import Recorder
from dpcore.comm.communicators.mpi.watch import Watch, describe_late
from dpcore.errors import Error, Mismatch, PeerLost, Timeout

_LOST = ("PROC_FAILED", "PROC_FAILED_PENDING", "REVOKED")  # MPI's errors of ranks that died
_SPIN_SECONDS = 100e-6
_NAP_SECONDS = 50e-6
_IDLE_SECONDS = 0.1  # how late a question or an abort of a peer may be read by who has no operation
_GRACE_SECONDS = 0.25  # for what is in flight when another rank gives up
_PATIENCE_SECONDS = 5.0  # for the others, at the end of a program whose communicator is over
_READ_SECONDS = 0.5  # for the launcher to read what was written: MPICH's loses it at an abort


class Engine:
    """Serves a communicator of MPI that is dpcore's alone, and the groups split from it."""

    def __init__(self, mpi: Any, world: Any) -> None:
        """``world``: for short messages; the engine's from now on."""
        self.mpi, self.rank = mpi, world.Get_rank()
        self.lock = threading.RLock()
        self.failure = _C.FirstFailure()
        self.level = mpi.Query_thread()
        self._ends_at = 0.0  # of what is in flight, after a failure
        self._flying: list[MpiWork] = []
        self._kept: list[Any] = []  # MPI may still use it
        self._watch = Watch(mpi, world, self.how_far)
        self._groups: list[Any] = []
        self._waiters = 0
        self._process = os.getpid()
        self._recorder: Recorder | None = None
        self._wake = threading.Event()
        self._stops = False
        self._thread: threading.Thread | None = None
        if self.level >= mpi.THREAD_MULTIPLE:
            self._thread = threading.Thread(target=self._run, name="dpcore-mpi", daemon=True)
            self._thread.start()
        _open.add(self)
        self._end_before_mpi()

    @property
    def library(self) -> str:
        """ "Open MPI v5.0.11", "MPICH 5.0.2" """
        return library_name(self.mpi.Get_library_version())

    @property
    def thread_level(self) -> str:
        """What MPI was started with: "multiple", ..."""
        names = ("single", "funneled", "serialized", "multiple")
        levels = {getattr(self.mpi, f"THREAD_{name.upper()}"): name for name in names}
        return levels[self.level]

    @property
    def recorder(self) -> Recorder:
        """Made when it is asked for."""
        if self._recorder is None:
            self._recorder = Recorder(lambda: self.failure.is_set)
        return self._recorder

    # ---- groups ------------------------------------------------------------------------------

    def enter(self, group: Any) -> None:
        self._groups.append(group)

    def leave(self, group: Any) -> None:
        """After the last group has left, nothing is in flight any more."""
        self._groups.remove(group)
        if not self._groups:
            self._stop()

    def how_far(self, lineage: str) -> int:
        """Collectives that this rank has called of a group; -1: it has none of that name."""
        calls = [group.calls for group in self._groups if group.lineage == lineage]
        return calls[0] if calls else -1

    # ---- operations --------------------------------------------------------------------------

    def check(self) -> None:
        """Raises when nothing can be called any more, or not from here."""
        self._check_place()
        self.failure.check()

    def _check_place(self) -> None:
        if os.getpid() != self._process:
            raise Error(
                f"this process was forked from rank {self.rank}, which has the communicator of "
                "MPI: a forked child must not call it"
            )
        if self.level < self.mpi.THREAD_SERIALIZED and not self.mpi.Is_thread_main():
            raise Error(
                "MPI was started for one thread (MPI_THREAD_FUNNELED or less), not for this "
                "one: import dpcore before mpi4py, or set mpi4py.rc.thread_level = 'multiple'"
            )

    def submit(self, work: MpiWork, line: deque[MpiWork]) -> None:
        """``line``: operations of the group that are not posted yet."""
        with self.lock:
            self.check()
            line.append(work)
            self._flying.append(work)
            with self._failing(work):
                _post(line)

    def wait_for(self, work: MpiWork, seconds: float) -> None:
        self._await_end(work, seconds)
        if work.failed:
            self.failure.check()

    def _await_end(self, work: MpiWork, seconds: float) -> None:
        began_ns = time.monotonic_ns()
        deadline = time.monotonic() + seconds
        if not work.ended:
            self._check_place()
        with self.lock:
            self._waiters += 1
        try:
            for _ in _pauses():
                if not work.ended:
                    self.go_on()
                if work.ended:
                    break
                if time.monotonic() > deadline:
                    self._give_up(work, seconds)
                    break
        finally:
            with self.lock:
                self._waiters -= 1
            if self._flying:
                self.wake()
        if (recorder := self._recorder) is not None:
            recorder.add(work, "exposed", began_ns)

    def go_on(self) -> None:
        """One round of polling."""
        with self.lock:
            for work in list(self._flying):
                with self._failing(work):
                    if work.poll():
                        self._end(work)
                    _post(work.group.line)
            if not self.failure.is_set:
                self._hear()
            elif time.monotonic() > self._ends_at:
                self._drop()

    def _hear(self) -> None:
        """Notices failures of other ranks. A library that detects dead ranks may tell the watch
        first."""
        try:
            if (told := self._watch.look()) is not None:
                self._fail(PeerLost(f"rank {self.rank}: {told}"))
        except self.mpi.Exception as problem:
            first = next(iter(self._flying), None)
            self._fail(self._named(first, problem), work=first)

    def look(self) -> None:
        """One round, where this thread may call MPI."""
        with contextlib.suppress(Error):
            self._check_place()
            self.go_on()

    def wake(self) -> None:
        """There is something that no thread waits for."""
        self._wake.set()

    def _end(self, work: MpiWork) -> None:
        self._flying.remove(work)
        if (recorder := self._recorder) is not None:
            recorder.add(work, "operation", work.began_ns)
        work.end()

    @contextlib.contextmanager
    def _failing(self, work: MpiWork) -> Iterator[None]:
        try:
            with torch.no_grad():
                yield
        except self.mpi.Exception as problem:
            self._fail(self._named(work, problem), work=work)
        except Error as problem:
            self._fail(problem, work=work)
        except Exception as problem:  # there may be no thread to raise it to
            text = f"rank {self.rank}: {work.what} over MPI: {type(problem).__name__}: {problem}"
            self._fail(Error(text), work=work)

    def _named(self, work: MpiWork | None, problem: Any) -> Error:
        kind = problem.Get_error_class()
        what = "messages between ranks" if work is None else work.what
        text = f"rank {self.rank}: {what} over MPI: {problem.Get_error_string()}"
        if kind == self.mpi.ERR_TRUNCATE:
            return Mismatch(f"{text}. Another rank sent more than this one expects")
        if kind in [getattr(self.mpi, f"ERR_{name}", -1) for name in _LOST]:
            return PeerLost(text)
        return Error(text)

    # ---- failures ----------------------------------------------------------------------------

    def _give_up(self, work: MpiWork, seconds: float) -> None:
        """After its deadline: asks the others, and ends."""
        late = self._who_is_late(work)
        with self.lock:
            if work.ended:
                return
            self._fail(
                Timeout(
                    f"rank {self.rank}: {work.what} over MPI was not complete after {seconds:g} s: "
                    f"{late}. The communicator is broken, and MPI may still use the buffer"
                ),
                work=work,
            )

    def _who_is_late(self, work: MpiWork) -> str:
        group = work.group
        others = {group.ranks[r]: r for r in range(group.world_size) if r != group.rank}
        if work.what.peer >= 0:
            others = {group.ranks[work.what.peer]: work.what.peer}
        with self.lock:
            self._watch.ask(list(others), group.lineage)
        deadline = time.monotonic() + 10 * _IDLE_SECONDS
        for _ in _pauses():
            self.go_on()
            answers = {r: n for r, n in self._watch.answers.items() if r in others}
            if work.ended or len(answers) == len(others) or time.monotonic() > deadline:
                break
        return describe_late(
            {others[there]: calls for there, calls in answers.items()}, others, work
        )

    def give_up(self, reason: str) -> None:
        with self.lock:
            self._fail(PeerLost(f"rank {self.rank} gave up: {reason}"), reason)
            self.failure.acknowledge()

    def _fail(self, problem: Error, reason: str = "", work: MpiWork | None = None) -> None:
        """Under the lock. The first failure is the one that everybody hears of. What the others
        have done their part of may still be completed, for a moment; ``work`` ends at once."""
        if self.failure.set(type(problem).__name__, str(problem)):
            self._ends_at = time.monotonic() + _GRACE_SECONDS
            if not self._watch.was_told:
                self._watch.tell(reason or f"{type(problem).__name__}: {problem}")
        if work is not None:
            self._drop(work)

    def _drop(self, only: MpiWork | None = None) -> None:
        """Operations that will not be waited for any longer."""
        for work in [only] if only is not None else list(self._flying):
            if not work.ended:
                self._kept.append((work, work.requests))
                self._flying.remove(work)
                work.end(failed=True)
        if not self._flying:
            for group in self._groups:
                group.line.clear()

    # ---- the thread, and the end -------------------------------------------------------------

    def _run(self) -> None:
        while not self._stops:
            for _ in _pauses():
                if self._waiters or self._stops:
                    break
                self.go_on()
                if not self._flying:
                    break
            self._wake.wait(_IDLE_SECONDS)
            self._wake.clear()

    def drain(self, group: Any, seconds: float) -> None:
        """Waits for what is in flight of a group."""
        for work in [work for work in self._flying if work.group is group]:
            with contextlib.suppress(Error):
                self._await_end(work, seconds)

    def _end_before_mpi(self) -> None:
        """MPI_Finalize first of all drops what is attached to MPI_COMM_SELF."""
        me = weakref.ref(self)

        def dropped(*_: Any) -> None:
            if (engine := me()) is not None and not engine._stops:
                engine._end_thread()
                engine._watch.expect_nothing()
                with engine.lock:
                    engine._watch.was_told = True  # the others will see for themselves
                    text = "MPI_Finalize was called, and communicators end with MPI"
                    engine._fail(Error(f"rank {engine.rank}: {text}"))
                    engine._drop()

        key = self.mpi.Comm.Create_keyval(delete_fn=dropped)
        self.mpi.COMM_SELF.Set_attr(key, None)

    def _end_thread(self) -> None:
        self._stops = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    def _stop(self) -> None:
        self._end_thread()
        if not (self.failure.is_set or self.mpi.Is_finalized()):
            with self.lock:
                self._watch.close()
            _open.discard(self)

    def end_with_the_program(self) -> None:
        for group in list(self._groups):
            with contextlib.suppress(Error):
                group.close()
        if self.failure.is_set and not self.mpi.Is_finalized():
            self._end_broken()

    def _end_broken(self) -> None:
        """MPI_Finalize would wait for ever for a rank that does not come, and so would mpiexec."""
        if self._watch.meet(_PATIENCE_SECONDS):
            return
        print(
            f"rank {self.rank}: ends the job with MPI_Abort, since its communicator is broken and "
            f"not all ranks came to the end in {_PATIENCE_SECONDS:g} s ({self.failure.told()[1]})",
            file=sys.stderr,
            flush=True,
        )
        time.sleep(_READ_SECONDS)
        self.mpi.COMM_WORLD.Abort(1)


def _post(line: deque[MpiWork]) -> None:
    while line and line[0].post():
        line.popleft()


def _pauses() -> Iterator[None]:
    """Between two looks: gives way to others at first, then sleeps."""
    until = time.monotonic() + _SPIN_SECONDS
    while time.monotonic() < until:
        yield
        os.sched_yield()
    while True:
        yield
        time.sleep(_NAP_SECONDS)


_open: weakref.WeakSet[Engine] = weakref.WeakSet()
os.register_at_fork(after_in_child=_open.clear)


@atexit.register
def _end_all() -> None:
    for engine in list(_open):
        engine.end_with_the_program()
