"""What a schedule is: a plain list of moves.

Every rank holds the same number of chunks. A schedule says which rank sends which chunk to which
other rank, and in which step. All moves of one step happen at once and read the state before it:

* ``Move(step, src, dst, chunk, reduce=False)``: ``dst``'s chunk becomes a copy of ``src``'s;
* ``Move(step, src, dst, chunk, reduce=True)``: ``src``'s chunk is added to ``dst``'s own. Several
  such moves into one chunk are one addition, its operands in the order of their ranks.

What the number of a chunk means depends on the collective:

* all_reduce, broadcast, reduce: the algorithm chooses the number of chunks;
* reduce_scatter, all_gather, gather, scatter: one chunk per rank, chunk r belongs to rank r;
* all_to_all: chunk ``s * world + d`` goes from rank s to rank d.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Move(NamedTuple):
    step: int
    src: int
    dst: int
    chunk: int
    reduce: bool


@dataclass(frozen=True)
class Schedule:
    algorithm: str
    collective: str
    world: int
    chunks: int
    root: int
    ordered: bool  # every reduction adds all contributions at once, in rank order
    moves: tuple[Move, ...]  # sorted by step, then as each rank sends them


class Plan(NamedTuple):
    """The result of an algorithm: the number of chunks, and the moves in any order."""

    chunks: int
    moves: list[Move]


def later(moves: list[Move], steps: int) -> list[Move]:
    """The same moves, ``steps`` steps later."""
    return [move._replace(step=move.step + steps) for move in moves]


def in_sending_order(moves: Iterable[Move], world: int) -> tuple[Move, ...]:
    """Sorted by step and then as each rank sends: to its right neighbour first. If all began with
    rank 0, the other NICs would be idle while rank 0's receives N-1 messages. What it sends to one
    rank goes in the order of ``moves``."""

    def place(move: Move) -> tuple[int, int, int]:
        return move.step, move.src, (move.dst - move.src) % world

    return tuple(sorted(moves, key=place))


def order_of_chunks(schedule: Schedule, rank: int) -> list[int]:
    """The order in which a rank works on chunks: those it sends, those it receives, the others."""
    sent = [move.chunk for move in schedule.moves if move.src == rank]
    received = [move.chunk for move in schedule.moves if move.dst == rank]
    return list(dict.fromkeys([*sent, *received, *range(schedule.chunks)]))
