"""The moves that a plan of thread blocks makes.

dpcore's schedules know one copy of each chunk on a rank. A plan has scratch memory beside it, adds
where it likes and sends sums that it does not keep. What it computes is noted as versions of the
rank's copy: version 0 is what the rank contributes, and a new version is made when a value of the
rank leaves it or is its result. The values of other ranks that were added then are the moves.

Moves take the earliest step that dependencies allow. A version can be read until the next one is
made, in the same step at the latest, since all moves of a step read before any writes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from dpcore.reference.collectives import Execution, check
from dpcore.reference.moves import Move, Schedule, in_sending_order
from dpcore.reference.plans.blocks import BlockPlan, PlanError

Part = tuple[int, int]  # rank, version of its copy of the chunk


class NotMoves(PlanError):
    """The plan is right, and keeps more than one copy of a chunk where moves have one."""


class Value(NamedTuple):
    chunk: int
    parts: frozenset[Part]  # which are added to give the value
    ranks: frozenset[int]  # that contributed


class Event(NamedTuple):
    """A new version."""

    rank: int
    version: int
    adds: bool  # to the version before
    sources: tuple[Part, ...]


class Versions:
    def __init__(self, world: int, reduces: bool) -> None:
        self.reduces = reduces
        self.problem = ""  # why there are no such moves
        self.events: defaultdict[int, list[Event]] = defaultdict(list)  # by chunk
        self._newest: dict[tuple[int, int], int] = {}  # of rank and chunk
        self._made_of: dict[tuple[int, int], frozenset[Part]] = {}  # the newest, and what it adds
        self._known: dict[tuple[int, Value], Value] = {}

    def contribution(self, rank: int, chunk: int) -> Value:
        self._newest[rank, chunk] = 0
        return Value(chunk, frozenset([(rank, 0)]), frozenset([rank]))

    def at(self, rank: int, value: Value, place: str) -> Value:
        """The value as the rank's own copy."""
        if len(value.parts) == 1 and next(iter(value.parts))[0] == rank:
            return value
        if (rank, value) not in self._known:
            self._known[rank, value] = self._made(rank, value, place)
        return self._known[rank, value]

    def end_with(self, rank: int, value: Value) -> None:
        """The rank's result must be its last copy."""
        ((_, version),) = self.at(rank, value, "the end").parts
        if version != self._newest[rank, value.chunk]:
            self._give_up(f"gpu {rank} still sends chunk {value.chunk} when it has its result")

    def _made(self, rank: int, value: Value, place: str) -> Value:
        newest = self._newest.get((rank, value.chunk), -1)
        parts, before = value.parts, self._made_of.get((rank, value.chunk), value.parts)
        if before < parts:
            parts = (parts - before) | {(rank, newest)}
        own = [version for source, version in parts if source == rank]
        others = sorted(part for part in parts if part[0] != rank)
        if own and own != [newest]:
            self._give_up(
                f"{place} uses what gpu {rank} had in chunk {value.chunk} before it made a sum "
                "of it"
            )
        if not own and len(others) > 1:  # a copy, to which the others are added
            self._append(rank, value.chunk, False, others[:1])
            own, others = [1], others[1:]
        version = self._append(rank, value.chunk, bool(own), others)
        self._made_of[rank, value.chunk] = value.parts
        return Value(value.chunk, frozenset([(rank, version)]), value.ranks)

    def _append(self, rank: int, chunk: int, adds: bool, sources: list[Part]) -> int:
        version = max(0, self._newest.get((rank, chunk), 0)) + 1
        self._newest[rank, chunk] = version
        self.events[chunk].append(Event(rank, version, adds, tuple(sources)))
        return version

    def _give_up(self, why: str) -> None:
        self.problem = self.problem or why


def schedule_of(plan: BlockPlan, versions: Versions) -> Schedule:
    """The moves of a plan that was proved."""
    if versions.problem:
        raise NotMoves(_NO_MOVES.format(versions.problem))
    by_chunk = {chunk: _placed(chunk, versions.events[chunk]) for chunk in range(plan.chunks)}
    pieces = _alike(plan, by_chunk)
    moves = [
        Move(step, source, rank, chunk // pieces, adds)
        for chunk in range(0, plan.chunks, pieces)
        for step, source, rank, adds in by_chunk[chunk]
    ]
    made = Schedule(
        plan.name, plan.collective, plan.world, plan.chunks // pieces, 0, False,
        in_sending_order(moves, plan.world),
    )  # fmt: skip
    check(made)
    return replace(made, ordered=_is_ordered(made))


_NO_MOVES = "the plan is right, and no list of moves with one copy of a chunk on each gpu: {}"

Placed = list[tuple[int, int, int, bool]]  # step, source, destination, adds


def _placed(chunk: int, events: list[Event]) -> Placed:
    """Moves of one chunk in the earliest steps: the longest way to each version."""
    number = {(event.rank, event.version): at for at, event in enumerate(events)}
    later: list[tuple[int, int, int]] = []  # an event, one before it, how many steps at least
    for at, event in enumerate(events):
        before = number.get((event.rank, event.version - 1))
        if before is not None:
            later.append((at, before, 1))
        for rank, version in event.sources:
            made, overwritten = number.get((rank, version)), number.get((rank, version + 1))
            if made is not None:
                later.append((at, made, 1))
            if overwritten is not None and overwritten != at:
                later.append((overwritten, at, 0))
    steps = [0] * len(events)
    for _ in range(len(events) + 1):
        changed = False
        for at, before, distance in later:
            if steps[at] < steps[before] + distance:
                steps[at] = steps[before] + distance
                changed = True
        if not changed:
            break
    else:
        reason = f"gpus keep chunk {chunk} in scratch memory while they change their own copy"
        raise NotMoves(_NO_MOVES.format(reason))
    return sorted(
        (steps[at], source, event.rank, event.adds)
        for at, event in enumerate(events)
        for source, _ in event.sources
    )


def _alike(plan: BlockPlan, by_chunk: dict[int, Placed]) -> int:
    """How many chunks side by side make the same moves, and so are one."""
    for pieces in _divisors(plan.pieces):
        groups = range(0, plan.chunks, pieces)
        if all(by_chunk[first] == by_chunk[first + i] for first in groups for i in range(pieces)):
            if plan.collective != "all_reduce" and pieces < plan.pieces:
                break
            return pieces
    raise NotMoves(
        f"the plan is right, and sends the {plan.pieces} pieces of a gpu's part on different ways, "
        f"where moves of {plan.collective} have one chunk for each part"
    )


def _divisors(number: int) -> Iterator[int]:
    return (d for d in range(number, 0, -1) if number % d == 0)


def _is_ordered(schedule: Schedule) -> bool:
    import numpy as np

    execution = Execution(schedule, [np.empty(0)] * schedule.world, "sum")
    execution.run()
    return execution.ordered
