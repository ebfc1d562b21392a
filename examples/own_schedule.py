"""An all-reduce of your own: write its moves, prove it, price it, run it, compare it.

    python examples/own_schedule.py [ranks]

A schedule is a list of moves (step, src, dst, chunk, reduce): in this step rank src sends this
chunk of the buffer to rank dst, which adds it to its own (reduce) or takes it (no reduce). All
moves of a step happen at once. That is all there is to an algorithm: dpcore proves the list,
prices it, and executes it.
"""

from __future__ import annotations

import sys
import time

import torch

import dpcore as dp

ELEMENTS = 300_000


def reverse_ring(world: int) -> dp.Schedule:
    """A ring whose ranks talk to their left neighbour: one chunk per rank goes around twice.

    On the first way every rank adds its part, so that chunk c is complete when it reaches rank c.
    On the second way the complete chunks are handed on.
    """
    adding = [
        (step, rank, (rank - 1) % world, (rank + 1 + step) % world, True)
        for step in range(world - 1)
        for rank in range(world)
    ]
    handing_on = [
        (world - 1 + step, rank, (rank - 1) % world, (rank + step) % world, False)
        for step in range(world - 1)
        for rank in range(world)
    ]
    return dp.Schedule("reverse_ring", "all_reduce", world, world, adding + handing_on)


def prove(schedule: dp.Schedule) -> None:
    """Right for any data, or an error that names the move. A broken copy shows the second."""
    dp.check_schedule(schedule)
    print(f"{schedule}: proven")
    shortened = schedule.moves[:-1]
    try:
        dp.check_schedule(
            dp.Schedule("broken", "all_reduce", schedule.world, schedule.chunks, shortened)
        )
    except dp.Error as problem:
        print(f"without its last move: {problem}")


def price(schedule: dp.Schedule) -> None:
    world = schedule.world
    known = [dp.schedule(name, "all_reduce", world) for name in ("ring", "two_shot", "one_shot")]
    print(f"\n{'algorithm':<14}{'steps':>8}{'bytes sent per rank':>22}")
    for plan in (schedule, *known):
        cost = dp.schedule_cost(plan, ELEMENTS, 4)
        print(f"{plan.algorithm:<14}{cost['steps']:>8}{cost['max_bytes_per_rank']:>22}")


def measure(comm: dp.Communicator, algorithm: dp.Schedule | str) -> tuple[bool, float]:
    """Runs on every rank: is the result right, and microseconds per call."""
    tensor = comm.empty(ELEMENTS)
    tensor.fill_(comm.rank)
    comm.all_reduce(tensor, algorithm=algorithm)
    right = bool(torch.all(tensor == sum(range(comm.world_size))))
    tensor.zero_()
    comm.barrier()
    begin = time.perf_counter()
    for _ in range(20):
        comm.all_reduce(tensor, algorithm=algorithm)
    return right, (time.perf_counter() - begin) / 20 * 1e6


def compare(world: int) -> None:
    def on_every_rank(comm: dp.Communicator) -> list[tuple[str, bool, float]]:
        return [
            ("reverse_ring", *measure(comm, reverse_ring(comm.world_size))),
            ("ring", *measure(comm, "ring")),
            ("auto", *measure(comm, "auto")),
        ]

    print(f"\n{world} ranks, {4 * ELEMENTS} bytes")
    print(f"{'algorithm':<14}{'result':>8}{'time (us)':>12}")
    for name, right, microseconds in dp.spawn(on_every_rank, world)[0]:
        print(f"{name:<14}{'right' if right else 'WRONG':>8}{microseconds:>12.1f}")


if __name__ == "__main__":
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    prove(reverse_ring(ranks))
    price(reverse_ring(ranks))
    compare(ranks)
