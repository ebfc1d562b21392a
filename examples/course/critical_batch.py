"""The critical batch: from which size on more samples hardly save steps, and the noise that tells.

    python examples/course/critical_batch.py

An MLP learns the digits to a training loss of 0.05, by plain SGD, with batches of 8 to 512. The
learning rate of each size is tuned with seeds that are not reported. Twice the batch halves the
steps while gradients are mostly noise; later it does not. The steps follow S = S_least (1 + B / b)
for a batch b, where B is the critical batch (McCandlish et al., 2018).

B can be told from one run, without trying sizes: it is about the ratio of the gradient's variance
to its square, which dpcore.gradient_noise_scale measures on two ranks.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch
from data import Part, batches, digits, loss_of, mlp
from figures import (
    COLOURS,
    axes,
    finish,
    line,
    numbers_of_scale,
    numbers_on,
    options,
    progress,
    spread,
)
from matplotlib.colors import to_rgb

import dpcore as dp


class Point(NamedTuple):
    """The noise scale over a window of steps, which ended at this training loss."""

    loss: float
    value: float
    low: float
    high: float


TARGET = 0.05  # training loss
MOST_DRAWN = 10_000  # samples
RATES = [0.05 * 2 ** (power / 2) for power in range(13)]
WINDOW = 8  # steps, of each measurement of the noise


def steps_to_target(batch: int, rate: float, seed: int, most: int) -> int:
    """``most`` when the loss was not reached before."""
    model, train = mlp(seed), digits().train
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    step = 0
    while step < most:
        for part in batches(train, batch, 1000 * seed + step):
            optimizer.zero_grad()
            loss_of(model, part).backward()
            optimizer.step()
            step += 1
            if step % max(1, 32 // batch) == 0:  # looking takes longer than a small step
                with torch.no_grad():
                    loss = loss_of(model, train).item()
                if loss <= TARGET or step >= most:
                    return step
                if not math.isfinite(loss):
                    return most
    return most


def tuned(batch: int, most: int, seeds: Sequence[int]) -> float:
    """The learning rate with the fewest steps. One with which any seed takes more than are left,
    or diverges, is not it."""
    least, best = most * len(seeds), RATES[0]
    for rate in RATES:
        taken = 0
        for seed in seeds:
            taken += steps_to_target(batch, rate, seed, least - taken + 1)
            if taken > least:
                break
        if taken < least:
            least, best = taken, rate
    return best


def fitted(sizes: Sequence[int], steps: Sequence[float]) -> tuple[float, float]:
    """The critical batch and the least number of steps, by least squares of logarithms."""

    def least_of(critical: float) -> float:
        logs = [math.log(s / (1 + critical / b)) for b, s in zip(sizes, steps, strict=True)]
        return statistics.fmean(logs)

    def misses(critical: float) -> float:
        least = least_of(critical)
        pairs = zip(sizes, steps, strict=True)
        return sum((math.log(s / (1 + critical / b)) - least) ** 2 for b, s in pairs)

    critical = min((2 ** (power / 16) for power in range(16 * 14)), key=misses)
    return critical, math.exp(least_of(critical))


def noise(comm: dp.Communicator, batch: int, rate: float, seed: int, steps: int) -> list[Point]:
    """The noise scale over a run of this rank and the other one, in windows of ``steps``."""
    model = dp.DataParallel(mlp(seed), comm=comm, schedule="sequential")
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    parts = itertools.chain.from_iterable(
        batches(digits().train, batch, 1000 * seed + epoch) for epoch in itertools.count()
    )
    found = []
    while True:
        with dp.gradient_noise_scale(model, every=1) as g:
            for part in itertools.islice(parts, steps):
                mine = Part(*(tensor.chunk(2)[comm.rank] for tensor in part))
                optimizer.zero_grad()
                loss_of(model, mine).backward()
                optimizer.step()
        with torch.no_grad():
            loss = loss_of(model.module, digits().train).item()
        found.append(Point(loss, g.value, *g.interval))
        if loss <= TARGET or len(found) == 40:
            return found


def worth_of_steps(run: Sequence[Point], batch: int) -> float:
    """The mean noise scale of a run. A step is worth 1 / (1 + B / batch) of one without noise."""
    seen = [point.value for point in run if math.isfinite(point.value)]
    worth = [1 / (1 + value / batch) for value in seen]
    return sum(w * value for w, value in zip(worth, seen, strict=True)) / sum(worth)


def main() -> None:
    chosen = options(__doc__, "critical_batch")
    torch.set_num_threads(1)
    sizes = [8, 64] if chosen.quick else [8, 16, 32, 64, 128, 256, 512]
    seeds, most = ([0], 60) if chosen.quick else ([0, 1, 2, 3, 4], 1200)
    tuning = [10] if chosen.quick else [10, 11, 12, 13]
    steps: dict[int, list[int]] = {}
    rates = {}
    with progress(2 * len(sizes) + 1, "tuning, and training to the loss") as done:
        for size in sizes:
            rates[size] = tuned(size, most, tuning)
            done()
            steps[size] = [steps_to_target(size, rates[size], seed, 2 * most) for seed in seeds]
            done()
        size = sizes[len(sizes) // 2]
        windows = [  # at half of the rate: twice as many steps on the same way down
            dp.spawn(noise, 2, size, rates[size] / 2, seed, WINDOW, mode="threads")[0]
            for seed in seeds
        ]
        done()
    fits = [fitted(sizes, [steps[s][n] for s in sizes]) for n in range(len(seeds))]
    critical, least = spread([fit[0] for fit in fits]), statistics.fmean(f[1] for f in fits)

    rows = [
        {
            "batch": str(size),
            "learning rate": f"{rates[size]:.2g}",
            "steps to 0.05": spread(steps[size]).text(0),
            "samples": f"{size * statistics.fmean(steps[size]):.0f}",
            "by the fit": f"{least * (1 + critical.mean / size):.0f}",
        }
        for size in sizes
    ]
    figure, (left, right) = axes("steps to a training loss of 0.05", "noise on the way there")
    line(left, sizes, [spread(steps[size]) for size in sizes], "measured, 95% over seeds", 0)
    curve = [sizes[0] * (sizes[-1] / sizes[0]) ** (n / 50) for n in range(51)]
    label = f"{least:.0f} (1 + {critical.mean:.0f} / batch)"
    by_fit = [least * (1 + critical.mean / b) for b in curve]
    left.plot(curve, by_fit, "--", color="grey", label=label)
    left.set(xscale="log", yscale="log", xlabel="batch", ylabel="steps")
    numbers_on(left.xaxis, sizes)
    numbers_on(left.yaxis, [tick for tick in (10, 20, 50, 100, 200, 500, 1000) if tick > least])
    left.legend(frameon=False)
    seen = [point for run in windows for point in run if point.value < MOST_DRAWN]
    below = [max(0.0, point.value - point.low) for point in seen]
    above = [max(0.0, min(point.high, MOST_DRAWN) - point.value) for point in seen]
    right.errorbar(
        [point.loss for point in seen],
        [point.value for point in seen],
        [below, above],
        fmt="o",
        markersize=4,
        color=COLOURS[1],
        ecolor=(*to_rgb(COLOURS[1]), 0.3),
        label=f"noise scale, batch {size}, windows of {WINDOW} steps",
    )
    right.axhline(critical.mean, ls="--", color="grey", label="critical batch of the fit")
    right.axhspan(critical.low, critical.high, color="grey", alpha=0.15)
    right.set(
        xscale="log", yscale="log", xlabel="training loss (falls to the left)", ylabel="samples"
    )
    right.set_ylim(1, MOST_DRAWN)
    numbers_of_scale(right)
    numbers_on(right.xaxis, [0.05, 0.1, 0.2, 0.5, 1, 2])
    right.legend(frameon=False, loc="lower left")
    whole = [worth_of_steps(run, size) for run in windows]
    first, last = (statistics.median(run[at].value for run in windows) for at in (0, -1))
    said = [
        f"Critical batch {critical.text(0)} samples (95% over {len(seeds)} seeds), by the fit.",
        f"Noise scale, from runs with a batch of {size}: {spread(whole).text(0)}, each window of "
        f"{WINDOW} steps weighted by what such a step is worth. It grows as the loss falls, from "
        f"{first:.0f} in the first window to {last:.0f} in the last one. It promises no more "
        "than the order of magnitude.",
    ]
    facts = {
        "steps": steps,
        "rates": rates,
        "critical": critical._asdict(),
        "least_steps": least,
        "noise": [[point._asdict() for point in run] for run in windows],
    }
    finish(chosen, rows, figure, facts, said)


if __name__ == "__main__":
    main()
