"""What each rank holds in a collective, filled with whole numbers, and what has to come out of it.

What a rank sends repeats after 61 elements (a prime, so a shift by any power of two shows), and so
does what the collective makes of it. Where the type has room, a step of 64 per rank shows a chunk
of the wrong rank; elsewhere the numbers stay so small that every result is exact, for up to 31
ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dpcore.tools.compare.collectives.cells import ROOT, Cell

Numbers = npt.NDArray[Any]

PERIOD = 61
RANK_STEP = 64
SLICE = 1 << 20  # elements per step, so that checking 256 MiB needs no second 256 MiB
_ROOMY = ("float64", "float32", "int64", "int32")
_EPSILON = {"float64": 2**-52, "float32": 2**-23, "float16": 2**-10, "bfloat16": 2**-7}


def numpy_type(dtype: str) -> str:
    """numpy has no bfloat16: its bits are the upper half of a float32's."""
    return "uint16" if dtype == "bfloat16" else dtype


@dataclass(frozen=True)
class Span:
    """A run of elements, and where in a period of numbers it begins."""

    begin: int
    count: int
    phase: int
    period: Numbers

    def slices(self) -> Iterator[tuple[slice, Numbers]]:
        table = np.resize(self.period, min(self.count, SLICE) + PERIOD)
        for done in range(0, self.count, SLICE):
            count = min(SLICE, self.count - done)
            phase = (self.phase + done) % PERIOD
            yield slice(self.begin + done, self.begin + done + count), table[phase : phase + count]


@dataclass(frozen=True)
class Layout:
    """The buffers of one rank. `receive` is None for an operation in place on `send`."""

    dtype: str
    tolerance: float  # relative: a mean may be computed as a product with 1/world
    send: int | None
    receive: int | None
    filled: tuple[Span, ...]  # what `send` (or the buffer in place) holds before
    expected: tuple[Span, ...]  # what the buffer with the result holds after

    def fill(self, view: Numbers, spans: tuple[Span, ...]) -> None:
        """Everything outside the spans gets a number that no correct result contains."""
        view.fill(self._stored(np.array(-1 if self.dtype in _ROOMY else 127)))
        for span in spans:
            for where, values in span.slices():
                view[where] = self._stored(values)

    def count_wrong(self, view: Numbers) -> int:
        wrong = 0
        for span in self.expected:
            for where, values in span.slices():
                got = view[where]
                if self.dtype == "bfloat16":
                    got = (got.astype(np.uint32) << 16).view(np.float32)
                bound = self.tolerance * np.maximum(np.abs(values), 1)
                right = np.abs(got - values) <= bound  # never of a NaN
                wrong += len(values) - int(np.count_nonzero(right))
        return wrong

    def _stored(self, values: Numbers) -> Numbers:
        if self.dtype == "bfloat16":
            return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return values.astype(self.dtype)


def layout(cell: Cell, rank: int) -> Layout:
    """The size of a cell is the whole, of which a rank's share is one chunk."""
    is_inexact = cell.redop == "mean" and cell.dtype in _EPSILON
    tolerance = 4 * _EPSILON[cell.dtype] if is_inexact else 0.0
    return Layout(cell.dtype, tolerance, *_buffers(cell, rank))


def _buffers(
    cell: Cell, rank: int
) -> tuple[int | None, int | None, tuple[Span, ...], tuple[Span, ...]]:
    world, elements = cell.world, cell.elements
    chunk = elements // world
    is_root = rank == ROOT
    of_rank = [_sent(r, cell.dtype, cell.redop) for r in range(world)]
    own_all = Span(0, elements, 0, of_rank[rank])
    own_chunk = Span(0, chunk, 0, of_rank[rank])
    all_reduced = _reduced(of_rank, cell)
    everyones_chunks = tuple(Span(r * chunk, chunk, 0, of_rank[r]) for r in range(world))
    match cell.collective:
        case "all_reduce":
            return elements, None, (own_all,), (Span(0, elements, 0, all_reduced),)
        case "reduce":
            whole = Span(0, elements, 0, all_reduced)
            return elements, None, (own_all,), (whole,) if is_root else ()
        case "broadcast":
            of_root = Span(0, elements, 0, of_rank[ROOT])
            return elements, None, (own_all,) if is_root else (), (of_root,)
        case "reduce_scatter":
            return elements, chunk, (own_all,), (Span(0, chunk, rank * chunk, all_reduced),)
        case "all_gather":
            return chunk, elements, (own_chunk,), everyones_chunks
        case "gather":
            if is_root:
                return chunk, elements, (own_chunk,), everyones_chunks
            return chunk, None, (own_chunk,), ()
        case "scatter":
            mine = Span(0, chunk, rank * chunk, of_rank[ROOT])
            if is_root:
                return elements, chunk, (own_all,), (mine,)
            return None, chunk, (), (mine,)
        case "all_to_all":
            columns = (Span(r * chunk, chunk, rank * chunk, of_rank[r]) for r in range(world))
            return elements, elements, (own_all,), tuple(columns)
        case "send_recv":
            return elements, None, (own_all,), (Span(0, elements, 0, of_rank[rank & ~1]),)
        case "barrier":
            return None, None, (), ()
    raise ValueError(f"unknown collective {cell.collective!r}")


def _sent(rank: int, dtype: str, redop: str) -> Numbers:
    """One period of what a rank sends. The smallest and the largest are not all of one rank."""
    steps = np.arange(PERIOD)
    if redop == "prod":
        return 1 + (steps + rank) % 2
    if redop in ("min", "max"):
        return (steps + 3 * rank) % PERIOD
    return steps + RANK_STEP * rank if dtype in _ROOMY else (steps + 3 * rank) % 5


def _reduced(of_rank: list[Numbers], cell: Cell) -> Numbers:
    combine = {"prod": np.multiply, "min": np.minimum, "max": np.maximum}.get(cell.redop, np.add)
    total: Numbers = functools.reduce(combine, of_rank)
    if cell.redop != "mean":
        return total
    return total / cell.world if cell.dtype in _EPSILON else total // cell.world


def pingpong_partner(rank: int, world: int) -> int | None:
    """Ranks play in pairs 0-1, 2-3, ...; the last of an odd world watches."""
    partner = rank ^ 1
    return partner if partner < world else None
