"""Runs a schedule on numpy arrays, and proves that it is right.

The state is one dictionary: ``(rank, chunk)`` leads to that rank's copy of the chunk. A copy has
its values and the ranks that contributed, so the same few lines compute a result and prove that no
contribution is missing or counted twice. This defines what a schedule means; the compiled executor
is fast and must give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from dpcore.reference.moves import Move, Schedule

Array = npt.NDArray[Any]

OPERATORS: dict[str, np.ufunc] = {
    "sum": np.add,
    "mean": np.add,  # divided by the world when a sum is complete
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


class ScheduleError(ValueError):
    """The schedule does not do what its collective promises."""


@dataclass(frozen=True)
class Copy:
    """One rank's copy of one chunk."""

    value: Array
    contributors: tuple[int, ...]  # sorted ranks


Holdings = dict[tuple[int, int], Copy]


def chunks_at_start(schedule: Schedule, rank: int) -> Sequence[int]:
    """The chunks into which the rank's input is cut."""
    match schedule.collective:
        case "all_reduce" | "reduce" | "reduce_scatter":
            return range(schedule.chunks)
        case "broadcast" | "scatter":
            return range(schedule.chunks) if rank == schedule.root else []
        case "all_gather" | "gather":
            return [rank]
        case "all_to_all":
            return range(rank * schedule.world, (rank + 1) * schedule.world)
    raise ScheduleError(f"{schedule.collective!r} moves no data")


def chunks_at_end(schedule: Schedule, rank: int) -> Sequence[int]:
    """The chunks from which the rank's output is joined."""
    match schedule.collective:
        case "all_reduce" | "all_gather" | "broadcast":
            return range(schedule.chunks)
        case "reduce" | "gather":
            return range(schedule.chunks) if rank == schedule.root else []
        case "reduce_scatter" | "scatter":
            return [rank]
        case "all_to_all":
            return range(rank, schedule.world * schedule.world, schedule.world)
    raise ScheduleError(f"{schedule.collective!r} moves no data")


def combine(op: str, values: list[Array], divisor: int) -> Array:
    """One n-ary reduction. Half precision is widened for it, and rounded once at the end."""
    narrow = values[0].dtype
    wide = np.dtype(np.float32) if narrow == np.float16 else narrow
    total: Array = reduce(OPERATORS[op], [value.astype(wide) for value in values])
    if divisor != 1:
        total = divided(total, divisor)
    return total.astype(narrow)


def divided(total: Array, divisor: int) -> Array:
    """The mean of a sum. Integer sums may have wrapped; their means are rounded toward zero."""
    if np.issubdtype(total.dtype, np.inexact):
        scaled: Array = total * total.dtype.type(1.0 / divisor)
        return scaled
    wide = total.astype(np.uint64 if total.dtype.kind == "u" else np.int64)
    # The remainder has the sign of the sum: without it the quotient is exact.
    quotients: Array = (wide - np.fmod(wide, divisor)) // divisor
    return quotients


class Execution:
    """The state of all ranks, one step after the other."""

    def __init__(self, schedule: Schedule, inputs: Sequence[Array], op: str) -> None:
        self.schedule = schedule
        self.op = op
        self.everyone = tuple(range(schedule.world))
        self.ordered = True
        self.holdings: Holdings = {}
        for rank in self.everyone:
            mine = chunks_at_start(schedule, rank)
            if mine:
                parts = np.array_split(np.ravel(inputs[rank]), len(mine))
                for chunk, part in zip(mine, parts, strict=True):
                    self.holdings[rank, chunk] = Copy(part, (rank,))

    def run(self) -> None:
        for _ in self.steps():
            pass

    def steps(self) -> Iterator[list[Move]]:
        """Executes one step after the other and yields its moves."""
        for _, group in groupby(self.schedule.moves, key=lambda move: move.step):
            moves_of_step = list(group)
            by_target: dict[tuple[int, int], list[Move]] = {}
            for move in moves_of_step:
                by_target.setdefault((move.dst, move.chunk), []).append(move)
            # All reads come before the writes, since the moves of a step happen at once.
            self.holdings |= {target: self.arrive(moves) for target, moves in by_target.items()}
            yield moves_of_step

    def arrive(self, moves: list[Move]) -> Copy:
        """The new copy of a chunk after all moves of one step into it."""
        first = moves[0]
        if not all(move.reduce for move in moves):
            if len(moves) > 1:
                raise ScheduleError(f"{first} is not alone in copying or adding to its target")
            return self.held(first, first.src)
        operands = [(first.dst, self.held(first, first.dst))]
        operands += [(move.src, self.held(move, move.src)) for move in moves]
        operands.sort(key=lambda operand: operand[0])
        copies = [copy for _, copy in operands]
        contributors = tuple(sorted(rank for copy in copies for rank in copy.contributors))
        if len(set(contributors)) < len(contributors):
            raise ScheduleError(f"{first} leads to a contribution that is added twice")
        complete = contributors == self.everyone
        if not complete or any(copy.contributors != (rank,) for rank, copy in operands):
            self.ordered = False
        divisor = self.schedule.world if self.op == "mean" and complete else 1
        return Copy(combine(self.op, [copy.value for copy in copies], divisor), contributors)

    def held(self, move: Move, rank: int) -> Copy:
        if (rank, move.chunk) not in self.holdings:
            raise ScheduleError(f"{move}: rank {rank} does not hold this chunk yet")
        return self.holdings[rank, move.chunk]

    def output(self, rank: int) -> Array | None:
        """The rank's output, or None if the collective gives it none."""
        reduces = self.schedule.collective in ("all_reduce", "reduce", "reduce_scatter")
        parts = []
        for chunk in chunks_at_end(self.schedule, rank):
            copy = self.holdings.get((rank, chunk))
            # Without a reduction there is one contributor, so any copy is complete.
            if copy is None or (reduces and copy.contributors != self.everyone):
                raise ScheduleError(f"rank {rank} ends without a complete chunk {chunk}")
            parts.append(copy.value)
        return np.concatenate(parts) if parts else None


def run(schedule: Schedule, inputs: Sequence[Array], op: str = "sum") -> list[Array | None]:
    """Executes the schedule on one input per rank and returns one flat output per rank.

    Each input is cut into as many nearly equal parts as the rank has chunks at the beginning. The
    inputs of ranks that have none (all but the root of a broadcast or scatter) are ignored. Ranks
    without an output (all but the root of a reduce or gather) get None.
    """
    if op == "mean" and any(array.dtype == np.bool_ for array in inputs):
        raise TypeError("booleans have no mean: convert them to numbers, or take their sum")
    execution = Execution(schedule, inputs, op)
    execution.run()
    return [execution.output(rank) for rank in range(schedule.world)]


def check(schedule: Schedule) -> None:
    """Raises ScheduleError unless the schedule is right for any data."""
    check_ranges(schedule)
    no_data = [np.empty(0)] * schedule.world
    execution = Execution(schedule, no_data, "sum")
    execution.run()
    for rank in range(schedule.world):
        execution.output(rank)
    if schedule.ordered and not execution.ordered:
        raise ScheduleError("it calls itself ordered, but does not add all contributions at once")


def check_ranges(schedule: Schedule) -> None:
    world = schedule.world
    prescribed = {
        "reduce_scatter": world,
        "all_gather": world,
        "gather": world,
        "scatter": world,
        "all_to_all": world * world,
    }
    if world < 1 or schedule.chunks < 1 or not 0 <= schedule.root < world:
        raise ScheduleError("world and chunks must be positive, and the root one of the ranks")
    if schedule.chunks != prescribed.get(schedule.collective, schedule.chunks):
        expected = prescribed[schedule.collective]
        raise ScheduleError(f"{schedule.collective} must have {expected} chunks")
    last_step = 0
    for move in schedule.moves:
        if move.step < last_step:
            raise ScheduleError(f"{move}: moves must be sorted by step")
        last_step = move.step
        if not (0 <= move.src < world and 0 <= move.dst < world and move.src != move.dst):
            raise ScheduleError(f"{move}: source and destination must be two different ranks")
        if not 0 <= move.chunk < schedule.chunks:
            raise ScheduleError(f"{move}: there is no such chunk")
        if move.reduce and schedule.collective not in ("all_reduce", "reduce", "reduce_scatter"):
            raise ScheduleError(f"{move}: {schedule.collective} has no reduction")
