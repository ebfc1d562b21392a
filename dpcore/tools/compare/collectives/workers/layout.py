"""Who holds how much in a collective, filled with integers and checked in closed form.

The pattern has a period of 61 (a prime, so a shift by any power of two shows) and a step of 64 per
rank (so a chunk of the wrong rank shows). All sums stay far below 2^24: exact in f32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]

PERIOD = 61
RANK_STEP = 64
SLICE = 1 << 20  # elements per step, so that checking 256 MiB needs no second 256 MiB
ROOT = 0
_TABLE: FloatArray = np.resize(np.arange(PERIOD, dtype=np.float32), SLICE + PERIOD)


@dataclass(frozen=True)
class Span:
    """A run of elements and the affine function of the pattern that it holds."""

    begin: int
    count: int
    pattern_begin: int
    factor: int
    offset: int


@dataclass(frozen=True)
class Layout:
    """The buffers of one rank. `receive` is None for an operation in place on `send`."""

    send: int | None
    receive: int | None
    filled: tuple[Span, ...]  # what `send` (or the buffer in place) holds before
    expected: tuple[Span, ...]  # what the buffer with the result holds after


def layout(collective: str, elements: int, rank: int, world: int) -> Layout:
    """`elements` is the size of the cell: the whole, of which a rank's share is one chunk."""
    chunk = elements // world
    root = rank == ROOT
    own_all = _of_rank(rank, 0, elements)
    own_chunk = _of_rank(rank, 0, chunk)
    sum_all = Span(0, elements, 0, world, RANK_STEP * world * (world - 1) // 2)
    everyones_chunks = tuple(_of_rank(r, r * chunk, chunk, pattern_begin=0) for r in range(world))
    match collective:
        case "all_reduce":
            return Layout(elements, None, (own_all,), (sum_all,))
        case "reduce":
            return Layout(elements, None, (own_all,), (sum_all,) if root else ())
        case "broadcast":
            return Layout(elements, None, (own_all,) if root else (), (_of_rank(0, 0, elements),))
        case "reduce_scatter":
            mine = Span(0, chunk, rank * chunk, sum_all.factor, sum_all.offset)
            return Layout(elements, chunk, (own_all,), (mine,))
        case "all_gather":
            return Layout(chunk, elements, (own_chunk,), everyones_chunks)
        case "gather":
            if root:
                return Layout(chunk, elements, (own_chunk,), everyones_chunks)
            return Layout(chunk, None, (own_chunk,), ())
        case "scatter":
            mine = _of_rank(ROOT, 0, chunk, pattern_begin=rank * chunk)
            if root:
                return Layout(elements, chunk, (own_all,), (mine,))
            return Layout(None, chunk, (), (mine,))
        case "all_to_all":
            columns = tuple(
                _of_rank(r, r * chunk, chunk, pattern_begin=rank * chunk) for r in range(world)
            )
            return Layout(elements, elements, (own_all,), columns)
        case "send_recv":
            return Layout(elements, None, (own_all,), (_of_rank(rank & ~1, 0, elements),))
        case "barrier":
            return Layout(None, None, (), ())
    raise ValueError(f"unknown collective {collective!r}")


def pingpong_partner(rank: int, world: int) -> int | None:
    """Ranks play in pairs 0-1, 2-3, ...; the last of an odd world watches."""
    partner = rank ^ 1
    return partner if partner < world else None


def fill(view: FloatArray, spans: tuple[Span, ...]) -> None:
    """Everything outside the spans becomes -1, which no correct result contains."""
    view.fill(-1.0)
    for span in spans:
        for begin, values in _slices(span):
            view[begin : begin + len(values)] = values


def count_wrong(view: FloatArray, spans: tuple[Span, ...]) -> int:
    wrong = 0
    for span in spans:
        for begin, values in _slices(span):
            wrong += int(np.count_nonzero(view[begin : begin + len(values)] != values))
    return wrong


def _of_rank(rank: int, begin: int, count: int, pattern_begin: int | None = None) -> Span:
    return Span(
        begin, count, begin if pattern_begin is None else pattern_begin, 1, RANK_STEP * rank
    )


def _slices(span: Span) -> Iterator[tuple[int, FloatArray]]:
    for done in range(0, span.count, SLICE):
        count = min(SLICE, span.count - done)
        phase = (span.pattern_begin + done) % PERIOD
        yield span.begin + done, _TABLE[phase : phase + count] * span.factor + span.offset
