"""An operation over MPI that is in flight, and the handle of it that a program gets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from dpcore.comm.communicators.checks import check_wait
from dpcore.errors import Error, error_of

if TYPE_CHECKING:
    from dpcore import _C

_AT_ONCE = 2  # blocks of one operation: the next one is made ready while MPI has the last


class Progress(Protocol):
    """What an operation needs of the engine that it is given to."""

    mpi: Any
    failure: _C.FirstFailure

    def wait_for(self, work: MpiWork, seconds: float) -> None:
        """Returns when the operation is complete; raises what went wrong."""

    def look(self) -> None:
        """Advances what is in flight, if no other thread does."""


class Stage(NamedTuple):
    """A request of MPI: what posts it, and what is done with its result."""

    post: Callable[[], Any]
    finish: Callable[[], None] | None = None


class What(NamedTuple):
    """An operation in words and numbers, for messages, counters and traces."""

    name: str  # "all_reduce"
    number: int  # of the communicator's collectives, or of its messages, from 1
    nbytes: int
    details: str = ""  # "4 elements of torch.float32, sum"
    root: int = -1
    peer: int = -1

    @property
    def is_message(self) -> bool:
        return self.name in ("send", "recv")

    def __str__(self) -> str:
        return f"{self.name} {self.number}" + (f" ({self.details})" if self.details else "")


class MpiWork:
    """An operation in flight. Its tensors belong to the operation until it is complete.

    >>> work = comm.all_reduce(gradient, op="mean", async_op=True)   # doctest: +SKIP
    >>> work.wait()                                                  # doctest: +SKIP
    """

    def __init__(
        self,
        engine: Progress,
        group: Any,
        what: What,
        stages: Sequence[Stage],
        buffers: Sequence[Any],
        seconds: float,
    ) -> None:
        self.engine, self.group, self.what, self.seconds = engine, group, what, seconds
        self.failed = False
        self.began_ns = time.monotonic_ns()
        self._to_post = list(stages)
        self._posted: list[tuple[Any, Stage]] = []
        self._source: int | None = None
        self._buffers = buffers  # the result, or None; and what else MPI reads
        self._ended = threading.Event()
        self._future: torch.futures.Future[list[Any]] | None = None

    # ---- for the program ---------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> None:
        """Returns when the operation is complete; raises what went wrong.

        ``timeout`` (seconds) counts from here, and is the operation's own deadline by default. When
        it has passed, the communicator is over: MPI cannot take an operation back.
        """
        check_wait(timeout)
        self.engine.wait_for(self, timeout or self.seconds)

    def is_completed(self) -> bool:
        """Whether ``wait`` would return (or raise) at once."""
        if not self._ended.is_set():
            self.engine.look()
        return self._ended.is_set()

    @property
    def source(self) -> int | None:
        """The other rank of a message, once it is known."""
        return self._source

    def exception(self) -> Error | None:
        """The error of an operation that failed, otherwise None."""
        return error_of(self.engine.failure.told()) if self.failed else None

    def get_future(self) -> torch.futures.Future[list[Any]]:
        """A torch future whose value is the list of result tensors. What is attached to it runs on
        a thread of its own."""
        if self._future is None:
            self._future = torch.futures.Future()
            if self._ended.is_set():
                self._fulfil()
            else:
                threading.Thread(target=self._fulfil, name="dpcore-future", daemon=True).start()
        return self._future

    def _fulfil(self) -> None:
        assert self._future is not None
        self._ended.wait()
        if (error := self.exception()) is None:
            self._future.set_result([one for one in self._buffers[:1] if one is not None])
        else:
            self._future.set_exception(error)  # type: ignore[arg-type]  # torch's own stub

    def __repr__(self) -> str:
        state = "complete" if self._ended.is_set() else "in flight"
        return f"<MpiWork: {self.what}, {state}>"

    # ---- for the engine, under its lock ------------------------------------------------------

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def post(self) -> bool:
        """Gives MPI what it may have at once. Whether nothing is left to be given."""
        while self._to_post and len(self._posted) < _AT_ONCE:
            stage = self._to_post.pop(0)
            self._posted.append((stage.post(), stage))
        return not self._to_post

    def poll(self) -> bool:
        """Asks MPI how far it is, and finishes what it has done. Whether all of it is done."""
        while self._posted:
            request, stage = self._posted[0]
            status = self.engine.mpi.Status() if self.what.name == "recv" else None
            if not request.Test(status):
                return False
            del self._posted[0]
            if status is not None:
                self._source = status.Get_source()
                self.group.check_length(self.what, status)
            if stage.finish is not None:
                stage.finish()
        return not self._to_post

    def end(self, failed: bool = False) -> None:
        self.failed = failed
        self._to_post = []
        self._ended.set()

    @property
    def requests(self) -> list[Any]:
        """The requests that MPI still has."""
        return [request for request, _ in self._posted]
