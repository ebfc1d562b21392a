"""Speed-up: 1 and 2 ranks measured, 4 to 16 predicted for links that are stated.

    python examples/course/speed_up.py

Each rank trains a transformer of 4.7 M parameters with a batch of its own, so N ranks train N times
the samples in a step: the speed-up is N times the step of one rank, over the step of N. On this
machine a rank has a core. The run of two is recorded, and `dpcore simulate` tells from its
gradients what a step would take on more ranks, over links of 100, 10 and 1 Gbit/s; the prediction
for two is beside a run over an emulated link. The simulator charges nothing to processors, so it is
a bound.

A textbook trains on 8 GPUs 6.5 times as fast as on one, and on 16 in two machines 1.7 times as fast
as on 8. The right plot asks which links would give that: for a step of 100 ms that ends in 100 MB
of gradients.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from figures import COLOURS, axes, finish, line, numbers_on, options, progress, spread

import dpcore as dp
from dpcore.base.link import Speed, parse_speed
from dpcore.tools.compare.training.models import MODELS
from dpcore.tools.simulate import Gradients, gradients_of, predict

LINKS = ("100gbit,5us", "10gbit,20us", "1gbit,50us")
CHECKED = "1gbit,50us"  # where the prediction for two ranks is beside a run
BOOK = {8: 6.5, 16: 1.7 * 6.5}


def steps_of(comm: dp.Communicator, count: int, trace: str) -> list[float]:
    """Seconds of each step; the last ones are recorded into a file."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module, forward = MODELS["transformer"]()
    model = dp.DataParallel(module, comm=comm, schedule="bucketed")
    times = []

    def step() -> None:
        model.zero_grad()
        comm.barrier()
        begin = time.perf_counter()
        forward(model).backward()
        times.append(time.perf_counter() - begin)

    for _ in range(count + 3):
        step()
    found = times[3:]
    if trace:
        with dp.trace(trace, comm=comm):
            for _ in range(5):
                step()
    return found


def scenario(world: int) -> Gradients:
    """Forward takes 33 ms and backward 67, which brings 25 gradients of 4 MB, evenly. One does not
    reach the cap of 4 MiB, so a bucket has two."""
    ready = [0.067 * (number + 1) / 25 for number in range(25)]
    return Gradients([4_000_000] * 25, [0] * 25, [0.033], [0.067], [ready]).on(world)


def speed_up(work: Gradients, link: Speed, alone: float) -> float:
    if work.world == 1:
        return 1.0
    algorithm = "ring" if work.world > 2 else "two_shot"
    return work.world * 1e3 * alone / predict(work, link, "bucketed", 4, algorithm).step_ms


@functools.cache
def bandwidth_for(world: int, wanted: float) -> float:
    """Gbit/s of each rank, by halving the interval."""
    low, high = 0.1, 1000.0
    for _ in range(14):
        middle = (low * high) ** 0.5
        reached = speed_up(scenario(world), Speed(middle * 1e9 / 8, 10e-6), 0.1)
        low, high = (middle, high) if reached < wanted else (low, middle)
    return (low * high) ** 0.5


def row(ranks: int, link: str, ms: float, times: str) -> dict[str, str]:
    return {"ranks": str(ranks), "link": link, "ms per step": f"{ms:.1f}", "speed-up": times}


def predicted(plot: Any, worlds: list[int], found: list[float], link: str, colour: str) -> None:
    label = f"{link}, predicted"
    plot.plot(worlds, found, marker="o", markersize=4, ls="--", color=colour, label=label)


def main() -> None:
    chosen = options(__doc__, "speed_up")
    rounds, count = (1, 2) if chosen.quick else (5, 10)
    worlds = [1, 2, 4] if chosen.quick else [1, 2, 4, 8, 16]
    times: dict[str, list[float]] = {"1": [], "2": [], CHECKED: []}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.json"
        parts = 3 * rounds + len(LINKS) * len(worlds) + len(BOOK)
        with progress(parts, "measuring, then predicting") as done:
            for number in range(rounds):
                for name in times:
                    world = 1 if name == "1" else 2
                    link = {"link": name} if name == CHECKED else {}
                    trace = str(file) if name == "2" and number == rounds - 1 else ""
                    found = dp.spawn(steps_of, world, count, trace, timeout=120, **link)
                    of_slowest = [max(step) for step in zip(*found, strict=True)]
                    times[name].append(statistics.median(of_slowest))
                    done()
            work = gradients_of(file)
            computing = work.compute_seconds
            curves = {}
            for link in LINKS:
                curves[link] = []
                for world in worlds:
                    curves[link].append(speed_up(work.on(world), parse_speed(link), computing))
                    done()
            needed = {}
            for world, wanted in BOOK.items():
                needed[world] = 0.0 if chosen.quick else bandwidth_for(world, wanted)
                done()
    one = statistics.median(times["1"])
    ratio = [2 * a / b for a, b in zip(times["1"], times["2"], strict=True)]
    over_link = [2 * a / b for a, b in zip(times["1"], times[CHECKED], strict=True)]
    rows = [row(1, "none, measured", 1e3 * one, "1")]
    for name, found, how in (
        ("2", ratio, "memory of this machine, measured"),
        (CHECKED, over_link, f"{CHECKED} emulated, measured"),
    ):
        rows.append(row(2, how, 1e3 * statistics.median(times[name]), spread(found).text(2)))
    for link, found in curves.items():
        for world, value in zip(worlds[1:], found[1:], strict=True):
            ms = 1e3 * world * computing / value
            rows.append(row(world, f"{link}, predicted", ms, f"{value:.2f}"))

    figure, (left, right) = axes("a transformer, a core per rank", "100 ms, 100 MB of gradients")
    for number, (link, found) in enumerate(curves.items()):
        predicted(left, worlds, found, link, COLOURS[number])
    line(left, [1, 2], [spread([1.0]), spread(ratio)], "in memory, measured", 4)
    line(left, [1, 2], [spread([1.0]), spread(over_link)], f"{CHECKED} emulated, measured", 3)
    if not chosen.quick:
        some = sorted({round(needed[8]), round(needed[16])}, reverse=True)
        for number, gbit in enumerate(some):
            found = [speed_up(scenario(w), Speed(gbit * 1e9 / 8, 10e-6), 0.1) for w in worlds]
            predicted(right, worlds, found, f"{gbit} Gbit/s per rank", COLOURS[number])
        right.plot(list(BOOK), list(BOOK.values()), "k*", markersize=11, label="the textbook")
    for plot in (left, right):
        plot.plot(worlds, worlds, color="grey", lw=1, label="as many times as ranks")
        plot.set(xscale="log", yscale="log", xlabel="ranks", ylabel="speed-up")
        numbers_on(plot.xaxis, worlds)
        numbers_on(plot.yaxis, worlds)
        plot.legend(frameon=False, fontsize=9)
    at_two = curves[CHECKED][1]
    said = [
        f"Two ranks on this machine: {spread(ratio).text(2)} times one. Over {CHECKED}, emulated: "
        f"{spread(over_link).text(2)} measured, {at_two:.2f} predicted.",
    ]
    if not chosen.quick:
        said.append(
            f"6.5 times with 8 ranks is what {needed[8]:.1f} Gbit/s per rank give, and 1.7 times "
            f"that with 16 what {needed[16]:.1f} Gbit/s give, for a step of 100 ms and 100 MB of "
            "gradients, two of 4 MB in a bucket."
        )
    facts = {
        "rounds_s": times,
        "computing_s": computing,
        "worlds": worlds,
        "predicted": curves,
        "gbit_for_the_book": needed,
    }
    finish(chosen, rows, figure, facts, said)


if __name__ == "__main__":
    main()
