"""The contract between the command loop and a contender, and what all collectives share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat
from time import perf_counter
from typing import Any

import numpy as np

from dpcore.tools.compare.collectives.cells import BYTES, Cell
from dpcore.tools.compare.collectives.workers.layout import (
    Numbers,
    layout,
    numpy_type,
    pingpong_partner,
)

Operation = Callable[[], object]
CACHE_LINE = 64


class UnsupportedError(Exception):
    """This contender cannot do this cell; the others go on."""


def pingpong(
    rank: int, world: int, send: Callable[[int], object], receive: Callable[[int], object]
) -> Operation:
    """There and back between the ranks of a pair; both get the other one's number. What goes back
    is what has come, so no receiver has the bytes in its caches from the message before."""
    partner = pingpong_partner(rank, world)
    if partner is None:
        return lambda: None
    first = rank < partner

    def round_trip() -> None:
        if first:
            send(partner)
        receive(partner)
        if not first:
            send(partner)

    return round_trip


@dataclass(frozen=True)
class Place:
    """Where a rank stands. `rank` is -1 when the launcher alone knows it (MPI)."""

    group: str
    rank: int
    world: int
    job: str  # unique to this start of this group, and the path prefix of a private folder


@dataclass(frozen=True)
class Prepared:
    """A cell that is ready to run: seconds per iteration, and how many elements were wrong."""

    seconds_per_iteration: Callable[[int], float]
    wrong: int | None = None


class Backend(ABC):
    rank: int
    world: int

    @abstractmethod
    def versions(self) -> dict[str, str]: ...

    @abstractmethod
    def prepare(self, variant: str, cell: Cell) -> Prepared: ...

    @abstractmethod
    def synchronise(self, start_at: float) -> None:
        """Brings the ranks together before the clock starts (`start_at`: of `time.monotonic`)."""

    @abstractmethod
    def close(self) -> None: ...

    def facts(self) -> dict[str, Any]:
        """What the contender says about itself after a cell, for the record."""
        return {}


class CollectiveBackend(Backend):
    """Allocates, fills, runs once, checks; then sets the data to zero.

    The data of the timed loop are zeros for every contender: a sum in place then neither overflows
    nor becomes denormal however often it runs. MPI has no mean that would keep other values small.
    """

    @abstractmethod
    def empty(self, variant: str, dtype: str, elements: int) -> Any: ...

    @abstractmethod
    def operation(self, cell: Cell, send: Any, receive: Any) -> Operation: ...

    @abstractmethod
    def barrier(self) -> None: ...

    def view(self, buffer: Any) -> Numbers:
        view: Numbers = buffer.numpy()
        return view

    def synchronise(self, start_at: float) -> None:
        self.barrier()

    def prepare(self, variant: str, cell: Cell) -> Prepared:
        plan = layout(cell, self.rank)

        def buffer(elements: int | None) -> Any:
            return None if elements is None else self.empty(variant, cell.dtype, elements)

        send, receive = buffer(plan.send), buffer(plan.receive)
        if send is not None:
            plan.fill(self.view(send), plan.filled)
        if receive is not None:
            plan.fill(self.view(receive), ())
        operation = self.operation(cell, send, receive)
        self.barrier()
        operation()
        result = send if receive is None else receive
        wrong = None if result is None else plan.count_wrong(self.view(result))
        for used in (send, receive):
            if used is not None:
                self.view(used).fill(0)
        return Prepared(python_loop(operation), wrong)


def python_loop(operation: Operation) -> Callable[[int], float]:
    def seconds_per_iteration(iterations: int) -> float:
        begin = perf_counter()
        for _ in repeat(None, iterations):
            operation()
        return (perf_counter() - begin) / iterations

    return seconds_per_iteration


def ordinary_memory(elements: int, dtype: str = "float32") -> Numbers:
    """The same memory for every contender that brings its own: aligned as torch aligns it.

    Huge pages are decided for all by NUMPY_MADVISE_HUGEPAGE (contenders.py): numpy asks for them on
    its own and torch does not, which would compare page sizes instead of libraries.
    """
    size = elements * BYTES[dtype]
    raw = np.empty(size + CACHE_LINE, dtype=np.uint8)
    shift = -raw.ctypes.data % CACHE_LINE
    memory: Numbers = raw[shift : shift + size].view(numpy_type(dtype))
    return memory
