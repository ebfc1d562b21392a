"""The communicator that a student gets: the calls of the exercise, and works that are strict.

An operation in flight owns its tensors until ``wait()``. Code that forgets the wait is right most
of the time, since the operation was over by then. Here it never is:

* What an operation writes is not a number before its ``wait()``, which brings the result.
* What it reads must be at its ``wait()`` what it was when the operation began.
* Every work is waited for.

``misuse()`` says in words what was not so. What is sent, and when, is not changed by this.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

COLLECTIVES = {"all_reduce", "broadcast", "reduce", "reduce_scatter", "all_gather", "gather"}
COLLECTIVES |= {"scatter", "all_to_all", "send", "recv", "barrier"}
SUBMISSION = "dpcore_exercise_submission"  # the name of the student's module


class Shortcut(Exception):
    """The code uses what it is to be written without."""


class Call(NamedTuple):
    """A call of the student's communicator, or the ``wait()`` of a work. How many bytes it sends is
    in the core's own record."""

    name: str
    peer: int  # the other rank of a message, or the root, or -1
    tag: int
    work: int  # of a wait: which call began it. Of a call that returns at once: its own number
    moment: float  # when it began, in milliseconds
    line: int  # of the student's file, or 0

    @property
    def blocks(self) -> bool:
        """Whether it returns only when the operation is complete."""
        return self.name == "wait" or self.work < 0

    def __str__(self) -> str:
        where = {"send": f" to rank {self.peer}", "recv": f" from rank {self.peer}"}
        return f"{self.name}{where.get(self.name, '')} (line {self.line})"


class StudentComm:
    """The calls of this exercise and no others."""

    def __init__(self, comm: Any, allowed: Sequence[str], record: Record) -> None:
        self.rank: int = comm.rank
        self.world_size: int = comm.world_size
        for name in allowed:
            setattr(self, name, _recorded(name, getattr(comm, name), record))
        self._has = f"comm has {', '.join(allowed)}, rank and world_size"

    def __getattr__(self, name: str) -> Any:
        if name in COLLECTIVES:
            raise Shortcut(f"comm.{name} is not part of this exercise: {self._has}")
        raise AttributeError(f"there is no comm.{name}: {self._has}")


class Record:
    """What was called, and which works are still to be waited for."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.calls: list[Call] = []
        self.clock = clock
        self.changed: list[Call] = []  # operations whose tensors were written to before their wait
        self._in_flight: dict[int, Any] = {}  # by number of the call, what the core returned

    def note(self, name: str, peer: int = -1, tag: int = 0, work: int = -1) -> None:
        self.calls.append(Call(name, peer, tag, work, self.clock(), _line()))

    def begun(self, number: int, real: Any) -> None:
        self._in_flight[number] = real

    def waited(self, number: int) -> None:
        self._in_flight.pop(number, None)

    def settle(self) -> None:
        """Returns when nothing is in flight, so that all of it is in the core's record."""
        for real in self._in_flight.values():
            real.wait()

    def misuse(self) -> list[str]:
        """What was done wrong with operations in flight, in the order in which they began."""
        forgotten = [self.calls[number] for number in self._in_flight]
        return [
            f"nothing waits for the {call}: call wait() on what it returns before its tensor is "
            "used again" for call in forgotten
        ] + [
            f"the tensor of the {call} was changed before wait() on what it returned"
            for call in self.changed
        ]  # fmt: skip


class Work:
    """An operation in flight, for whose result or end the student has to wait."""

    def __init__(
        self,
        real: Any,
        number: int,
        record: Record,
        results: list[tuple[torch.Tensor, torch.Tensor]],
        inputs: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        self._real, self._number, self._record = real, number, record
        self._results = results  # tensors of the student, and what becomes of them
        self._inputs = inputs  # and what they were

    def wait(self, timeout: float | None = None) -> None:
        """Returns when the operation is complete."""
        self._record.note("wait", work=self._number)
        self._real.wait(timeout)
        self._record.waited(self._number)
        was_changed = any(_bits(tensor) != _bits(before) for tensor, before in self._inputs)
        for tensor, result in self._results:
            was_changed |= tensor.is_floating_point() and not bool(tensor.isnan().all())
            tensor.data.copy_(result)
        if was_changed:
            self._record.changed.append(self._record.calls[self._number])
        self._results, self._inputs = [], []

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"there is no {name} here: a work of this exercise has wait() only")


def _recorded(name: str, call: Callable[..., Any], record: Record) -> Callable[..., Any]:
    """The same call, which is written down first."""
    signature = inspect.signature(call)

    def recorded(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        number = len(record.calls)
        is_async = bool(given.get("async_op"))
        peer = given.get("dst", given.get("src", given.get("root", -1)))
        is_rank = isinstance(peer, int)
        record.note(name, peer if is_rank else -1, given.get("tag", 0), number if is_async else -1)
        if not is_async:
            return call(*args, **kwargs)
        results, inputs = [], []
        for argument in {"tensor", "output", "input"} & set(given):
            tensor = given[argument]
            given[argument] = own = tensor.detach().clone()
            if argument == "input" or name == "send":
                inputs.append((tensor, own))
            else:
                results.append((tensor, own))
                if tensor.is_floating_point():
                    tensor.data.fill_(float("nan"))
        real = call(*bound.args, **bound.kwargs)
        record.begun(number, real)
        return Work(real, number, record, results, inputs)

    return recorded


def _bits(tensor: torch.Tensor) -> bytes:
    """Which says that a nan is a nan."""
    return bytes(tensor.detach().contiguous().numpy().tobytes())


def _line() -> int:
    """Of the student's file, from which this was called."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") != SUBMISSION:
        frame = frame.f_back
    return frame.f_lineno if frame.f_globals.get("__name__") == SUBMISSION else 0
