"""Ring attention in a trace: how much of each shift is hidden under the block above it.

``ring_attention(..., span=trace.span)`` records "block 2" around the arithmetic with the keys of
rank 2, and "block 2 back" in backward. The keys and values of the next block come meanwhile, and in
backward the gradients of the block before go on. A turn is a block and the shifts under it; the
last gradients have no block to hide under: they come home.
"""

from __future__ import annotations

import bisect
import functools
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from dpcore.base.link import parse_speed
from dpcore.errors import Unsupported
from dpcore.parallel import tags
from dpcore.recorder.file import Event
from dpcore.recorder.intervals import Intervals, union_of
from dpcore.tools.show.run import RankEvents, Run

_BLOCK = re.compile(r"block (\d{1,9})( back)?")


@dataclass(frozen=True)
class TurnFigures:
    """One turn of all rounds on all ranks, in means. ``link_ms``: what its bytes take on the link
    that was emulated, None where none was. ``hidden``: the share of the shifts that no rank waited
    for, None in a turn without a shift."""

    name: str
    count: int
    block_ms: float
    shift_ms: float
    link_ms: float | None
    exposed_ms: float
    hidden: float | None


@dataclass
class _Turn:
    block_ms: list[float] = field(default_factory=list)
    shift_ms: list[float] = field(default_factory=list)
    exposed_ms: list[float] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)


@functools.lru_cache(maxsize=4096)  # names repeat in every step
def block_of(name: str) -> tuple[int, bool] | None:
    """Whose keys a span with this name is about, and whether in backward.

    >>> block_of("block 2"), block_of("block 0 back"), block_of("2F3")
    ((2, False), (0, True), None)
    """
    found = _BLOCK.fullmatch(name)
    return (int(found[1]), bool(found[2])) if found else None


def turns_of(run: Run) -> list[TurnFigures]:
    """Nothing where no rank has recorded blocks, or no shift is in the file."""
    turns: dict[tuple[bool, int], _Turn] = {}
    for rank in run.ranks:
        for key, block_ms, shifts, exposed in _turns(rank):
            turn = turns.setdefault(key, _Turn())
            moving = union_of(shifts)
            turn.block_ms.append(block_ms)
            turn.shift_ms.append(moving.total_ns * 1e-6)
            turn.exposed_ms.append(moving.within(exposed) * 1e-6)
            turn.bytes.append(sum(event.bytes for event in shifts))
    if not any(any(turn.bytes) for turn in turns.values()):
        return []
    return [_figures(run, *key, turn) for key, turn in sorted(turns.items())]


def _turns(rank: RankEvents) -> Iterator[tuple[tuple[bool, int], float, list[Event], Intervals]]:
    """Direction and number of each turn, the milliseconds of its block, and its shifts."""
    blocks = [(told, event) for event in rank.compute if (told := block_of(event.name))]
    if not blocks:
        return
    own = blocks[0][0][0]
    exposed = union_of(rank.exposed)
    begins = [event.begin_ns for _, event in blocks]
    under: list[list[Event]] = [[] for _ in blocks]
    home: dict[int, list[Event]] = {}
    for event in rank.operations:
        if event.name != "recv" or event.operation not in (tags.SHIFT, tags.GRADIENTS):
            continue
        at = bisect.bisect_right(begins, event.begin_ns)
        if event.operation == tags.SHIFT and at < len(blocks):
            under[at].append(event)
        elif event.operation == tags.GRADIENTS and at:
            ends = at == len(blocks) or blocks[at][0][0] == own  # the block behind begins a round
            (home.setdefault(at - 1, []) if ends else under[at]).append(event)
    turn = 0
    for number, ((source, back), event) in enumerate(blocks):
        turn = 0 if source == own else turn + 1
        yield (back, turn), event.ms, under[number], exposed
        if number in home:
            yield (back, turn + 1), 0.0, home[number], exposed


def _figures(run: Run, back: bool, number: int, turn: _Turn) -> TurnFigures:
    shift, exposed = statistics.fmean(turn.shift_ms), statistics.fmean(turn.exposed_ms)
    where = "backward" if back else "forward"
    return TurnFigures(
        name=f"{where}, " + (f"block {number}" if any(turn.block_ms) else "gradients home"),
        count=len(turn.block_ms),
        block_ms=statistics.fmean(turn.block_ms),
        shift_ms=shift,
        link_ms=_link_ms(run.link, turn.bytes),
        exposed_ms=exposed,
        hidden=1 - exposed / shift if shift else None,
    )


def _link_ms(words: str, nbytes: Sequence[int]) -> float | None:
    try:
        speed = parse_speed(words) if words else None
    except Unsupported:  # a file with a speed for each pair of ranks
        speed = None
    if speed is None or not any(nbytes):
        return None
    seconds = speed.latency
    if speed.bytes_per_second:
        seconds += statistics.fmean(nbytes) / speed.bytes_per_second
    return seconds * 1e3
