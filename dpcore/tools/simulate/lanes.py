"""From an algorithm's moves to what each rank does: the twin of ``comm/schedule/program.cpp``.

A *lane* is what a rank does with one chunk, step by step. Over TCP senders take turns: a message
may wait until another one has come, so that several never send to the same rank at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from dpcore.reference import Move, Schedule

SEGMENTS_AHEAD = 2  # how far the first messages of a step may be ahead of the last ones


class Turn(NamedTuple):
    """What has to have come before a message is sent: that of this source, for the same segment or
    an earlier one."""

    source: int
    chunk: int
    segments_ago: int


class LaneStep(NamedTuple):
    number: int
    sends: tuple[int, ...]
    turns: tuple[Turn | None, ...]  # one for each of the sends
    receives: tuple[int, ...]
    reduces: bool


@dataclass(frozen=True)
class Lanes:
    """``by_rank[rank]``: the steps of each chunk, in the order in which the rank takes chunks; only
    those that it has to do with. ``has_turns``: whether any message waits for one."""

    algorithm: str
    chunks: int
    by_rank: list[dict[int, list[LaneStep]]]
    has_turns: bool


@lru_cache(maxsize=32)
def lanes_of(schedule: Schedule, takes_turns: bool = False, ranks: int = 0) -> Lanes:
    """Of the first ``ranks``; 0: of all."""
    moves, world = schedule.moves, schedule.world
    turns = _turns(moves, world) if takes_turns else [None] * len(moves)
    ranks = ranks or world
    if ranks < world:
        kept = [n for n, move in enumerate(moves) if move[1] < ranks or move[2] < ranks]
        moves, turns = tuple(moves[n] for n in kept), [turns[n] for n in kept]
    own: list[list[int]] = [[] for _ in range(world)]  # chunks, as they are sent, then received
    for end in (1, 2):
        for move in moves:
            own[move[end]].append(move[3])
    steps: dict[tuple[int, int, int], tuple[list[int], list[Turn | None], list[int], list[bool]]]
    steps = defaultdict(lambda: ([], [], [], []))
    for (step, source, target, chunk, reduces), turn in zip(moves, turns, strict=True):
        steps[source, chunk, step][0].append(target)
        steps[source, chunk, step][1].append(turn)
        steps[target, chunk, step][2].append(source)
        steps[target, chunk, step][3].append(reduces)
    by_rank: list[dict[int, list[LaneStep]]] = [
        {chunk: [] for chunk in dict.fromkeys(chunks)} for chunks in own
    ]
    for (rank, chunk, step), (sends, of_sends, receives, reduce) in sorted(steps.items()):
        by_rank[rank][chunk].append(
            LaneStep(step, tuple(sends), tuple(of_sends), tuple(sorted(receives)), any(reduce))
        )
    return Lanes(schedule.algorithm, schedule.chunks, by_rank[:ranks], any(turns))


def _turns(moves: Sequence[Move], world: int) -> list[Turn | None]:
    """Of each move: what its sender waits for. The n-th message of a step goes when the one that
    came as its sender's message n-1 is there, where a rank gets exactly one of those and sends
    nothing itself before it takes it; the first goes when the last of some segments ago is."""
    sent: defaultdict[tuple[int, int], int] = defaultdict(int)  # by step and rank
    places = []
    for step, source, *_ in moves:
        places.append(sent[step, source])
        sent[step, source] += 1
    arrivals: defaultdict[tuple[int, int, int], list[tuple[int, int]]] = defaultdict(list)
    last: defaultdict[tuple[int, int], int] = defaultdict(int)
    also_sends = {(step, source, chunk) for step, source, _, chunk, _ in moves}
    for (step, source, target, chunk, _), place in zip(moves, places, strict=True):
        arrivals[step, target, place].append((source, chunk))
        last[step, target] = max(last[step, target], place)

    def turn(step: int, rank: int, place: int) -> Turn | None:
        final = last[step, rank]
        found = arrivals[step, rank, place - 1 if place else final]
        if final == 0 or len(found) != 1 or (step, rank, found[0][1]) in also_sends:
            return None
        return Turn(*found[0], 0 if place else SEGMENTS_AHEAD)

    return [turn(move[0], move[1], place) for move, place in zip(moves, places, strict=True)]
