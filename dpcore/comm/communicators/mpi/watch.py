"""Short messages between ranks beside their operations: which give up, and how far each has come.

They travel over a communicator of MPI of their own. A thread that polls reads them, so a rank that
computes answers as well: its engine's thread does. A library that notices dead ranks may raise
that wherever it is asked: sending to one is as good as done, and ``look`` hands the error on.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dpcore.comm.communicators.mpi.operation import MpiWork

_BYTES = 1024  # of the longest message
_GIVES_UP, _QUESTION, _ANSWER = 1, 2, 3
_SEND_SECONDS = 0.5
_LOOK_SECONDS = 0.002


class Watch:
    """One rank's end of ``comm``, which it takes over. All calls are made under the engine's
    lock."""

    def __init__(self, mpi: Any, comm: Any, how_far: Callable[[str], int]) -> None:
        self._mpi, self._comm, self._how_far = mpi, comm, how_far
        self.answers: dict[int, int] = {}
        self.was_told = False  # of a failure, by another rank
        self._sent: list[tuple[Any, bytes]] = []
        self._next_look = 0.0
        self._expect()

    def _expect(self) -> None:
        self._box = bytearray(_BYTES)
        self._receive = self._comm.Irecv(
            [self._box, self._mpi.BYTE], self._mpi.ANY_SOURCE, self._mpi.ANY_TAG
        )

    def look(self) -> str | None:
        """Reads what has come, and answers. What another rank gave up for, if one did."""
        now = time.monotonic()
        if now < self._next_look:
            return None
        self._next_look = now + _LOOK_SECONDS
        self._sent = [(request, text) for request, text in self._sent if not self._is_sent(request)]
        status = self._mpi.Status()
        while self._receive.Test(status):
            source, kind = status.Get_source(), status.Get_tag()
            text = self._box[: status.Get_count(self._mpi.BYTE)].decode(errors="replace")
            self._expect()
            if kind == _GIVES_UP:
                self.was_told = True
                return f"rank {source} gave up: {text}"
            if kind == _QUESTION:
                self._send(source, _ANSWER, str(self._how_far(text)))
            elif kind == _ANSWER:
                self.answers[source] = int(text)
        return None

    def ask(self, ranks: Sequence[int], lineage: str) -> None:
        """How far the others are; see ``answers``."""
        self.answers = {}
        for rank in ranks:
            self._send(rank, _QUESTION, lineage)

    def tell(self, reason: str) -> None:
        """Gives up."""
        for rank in range(self._comm.Get_size()):
            if rank != self._comm.Get_rank():
                self._send(rank, _GIVES_UP, reason)
        deadline = time.monotonic() + _SEND_SECONDS
        while not all(self._is_sent(request) for request, _ in self._sent):
            if time.monotonic() > deadline:
                return
            time.sleep(_LOOK_SECONDS)
        self._sent = []

    def _send(self, rank: int, kind: int, text: str) -> None:
        message = text.encode()[:_BYTES]
        with contextlib.suppress(self._mpi.Exception):
            request = self._comm.Isend([message, self._mpi.BYTE], rank, kind)
            self._sent.append((request, message))

    def _is_sent(self, request: Any) -> bool:
        try:
            return bool(request.Test())
        except self._mpi.Exception:
            return True

    def meet(self, seconds: float) -> bool:
        """At the end of a job that failed: whether all ranks come."""
        deadline = time.monotonic() + seconds
        try:
            request = self._comm.Ibarrier()
            while not request.Test():
                if time.monotonic() > deadline:
                    return False
                time.sleep(_LOOK_SECONDS)
            self.expect_nothing()
        except self._mpi.Exception:  # a library that notices dead ranks
            return False
        return True

    def close(self) -> None:
        self.expect_nothing()
        self._comm.Free()

    def expect_nothing(self) -> None:
        with contextlib.suppress(self._mpi.Exception):
            self._receive.Cancel()
            self._receive.Wait()


def describe_late(answers: Mapping[int, int], asked: Mapping[int, int], work: MpiWork) -> str:
    """The ranks that are late with a collective, as far as those that were asked have answered."""
    number = work.what.number
    silent = [f"rank {rank}" for rank in asked.values() if rank not in answers]
    found = [f"{', '.join(silent)} did not answer (stopped, dead, or at its end)"] if silent else []
    late = []
    for rank, calls in sorted(answers.items()):
        if calls < 0:
            late.append(f"rank {rank} has closed this communicator")
        elif calls < number and not work.what.is_message:
            what = "1 collective" if calls == 1 else f"{calls} collectives"
            late.append(f"rank {rank} has called {what} of this communicator, not {number}")
    return "; ".join(found + late) or "all ranks answered"
