"""To one and back, all to all, or around a ring: three ways to the same sum.

    python examples/course/all_reduce_ways.py

Four, eight or sixteen ranks each have a gradient of 256 KiB, and want the sum of all.

    to one      everybody sends its gradient to rank 0, which adds and sends the sum back
    all to all  everybody sends its gradient to everybody, and adds by itself
    ring        everybody passes a part on to its right, adding; then the sums go around

The lists of moves are dpcore's: dpcore.schedule() makes them, a check proves them, and here they
run on ranks that are threads, over an emulated link of 100 Mbit/s. `dpcore show ring` draws one.
"""

from __future__ import annotations

import time
from collections import Counter

import torch
from figures import COLOURS, axes, finish, line, numbers_on, options, progress, spread

import dpcore as dp

WAYS = {"to one": "", "all to all": "one_shot", "ring": "ring"}
BYTES = 256 * 1024


def cost(way: str, world: int) -> tuple[int, int]:
    """Steps, and bytes that the busiest rank sends or receives."""
    if way == "to one":
        parts = [dp.schedule("direct", name, world) for name in ("reduce", "broadcast")]
    else:
        parts = [dp.schedule(WAYS[way], "all_reduce", world)]
    steps, busiest = 0, 0
    for part in parts:
        leaves, comes = Counter(), Counter()
        for _, source, target, _, _ in part.moves:
            leaves[source] += 1
            comes[target] += 1
        steps += 1 + max(move[0] for move in part.moves)
        busiest += BYTES // part.chunks * max(*leaves.values(), *comes.values())
    return steps, busiest


def seconds(comm: dp.Communicator, way: str, rounds: int) -> list[float]:
    """Of each all-reduce, whose sum is checked."""
    tensor = torch.empty(BYTES // 4)
    found = []
    for _ in range(rounds + 1):
        tensor.fill_(comm.rank + 1)
        comm.barrier()
        begin = time.perf_counter()
        if way == "to one":
            comm.reduce(tensor, algorithm="direct")
            comm.broadcast(tensor, algorithm="direct")
        else:
            comm.all_reduce(tensor, algorithm=WAYS[way])
        found.append(time.perf_counter() - begin)
        assert tensor.eq(comm.world_size * (comm.world_size + 1) / 2).all()
    return found[1:]


def main() -> None:
    chosen = options(__doc__, "all_reduce_ways")
    torch.set_num_threads(1)
    worlds = [2, 4] if chosen.quick else [2, 4, 8, 16]
    rounds = 2 if chosen.quick else 7
    times, costs = {}, {}
    with progress(len(worlds) * len(WAYS), "all-reduces of 256 KiB over 100 Mbit/s") as done:
        for world in worlds:
            for way in WAYS:
                arguments = (seconds, world, way, rounds)
                of_ranks = dp.spawn(*arguments, mode="threads", link="100mbit,100us")
                slowest = [1e3 * max(of) for of in zip(*of_ranks, strict=True)]
                times[way, world] = spread(slowest)
                costs[way, world] = cost(way, world)
                done()
    rows = [
        {
            "way": way,
            "ranks": str(world),
            "steps": str(costs[way, world][0]),
            "KiB at the busiest rank": str(costs[way, world][1] // 1024),
            "ms": times[way, world].text(),
        }
        for world in worlds
        for way in WAYS
    ]
    figure, (left, right) = axes("one all-reduce", "what the busiest rank sends or receives")
    for number, way in enumerate(WAYS):
        line(left, worlds, [times[way, world] for world in worlds], way, number)
        kib = [costs[way, world][1] / 1024 for world in worlds]
        right.plot(worlds, kib, marker="o", markersize=4, color=COLOURS[number], label=way)
    for plot, label in ((left, "ms over 100 Mbit/s and 100 us"), (right, "KiB of a tensor of 256")):
        plot.set(xscale="log", yscale="log", xlabel="ranks", ylabel=label)
        numbers_on(plot.xaxis, worlds)
        plot.legend(frameon=False)
    numbers_on(left.yaxis, [20, 50, 100, 200, 500, 1000])
    numbers_on(right.yaxis, [256, 512, 1024, 2048, 4096, 8192])
    last = worlds[-1]
    said = [
        f"On {last} ranks the ring takes {times['ring', last].text()} ms, all to all "
        f"{times['all to all', last].text()} ms, to one {times['to one', last].text()} ms: a rank "
        "of a ring never sends more than twice the tensor, however many there are.",
        f"Mean and 95% over {rounds} all-reduces, of the slowest rank; each sum is checked.",
    ]
    facts = {
        "cells": [
            {
                "way": way,
                "ranks": world,
                "ms": times[way, world]._asdict(),
                "steps": costs[way, world][0],
                "busiest_bytes": costs[way, world][1],
            }
            for way, world in times
        ]
    }
    finish(chosen, rows, figure, facts, said)


if __name__ == "__main__":
    main()
