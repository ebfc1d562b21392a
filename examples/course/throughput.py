"""Samples per second against the size of the batch: what a larger batch buys in time.

    python examples/course/throughput.py

A step costs something whatever its batch: Python, the launches of kernels, the optimizer, and with
several ranks the communication. A larger batch spreads that over more samples, until the arithmetic
takes most of the time; from there on, twice the batch takes twice as long.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from data import Part, digits, loss_of, mlp
from figures import axes, finish, line, numbers_of_scale, numbers_on, options, progress, spread

from dpcore.tools.compare.training.text import Text, language_model
from dpcore.tools.compare.training.text import loss_of as loss_of_text


def digits_step(batch: int) -> Callable[[], None]:
    """A step of the MLP with two hidden layers of 256."""
    model = mlp(0, 64, 256, 256, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    train = digits().train
    chosen = torch.arange(batch) % len(train)
    part = Part(train.x[chosen], train.y[chosen])

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model, part).backward()
        optimizer.step()

    return step


def text_step(batch: int) -> Callable[[], None]:
    """A step of the transformer of 3.2 M parameters on sequences of 64 letters."""
    text = Text()
    model = language_model(text)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    letters = text.batch(0, 0, 1, batch)

    def step() -> None:
        optimizer.zero_grad()
        loss_of_text(model, letters).backward()
        optimizer.step()

    return step


def seconds(step: Callable[[], None], least: float) -> float:
    """Of one step, over as many as take ``least`` seconds together."""
    begin, count = time.perf_counter(), 0
    while count < 1 or time.perf_counter() - begin < least:
        step()
        count += 1
    return (time.perf_counter() - begin) / count


def main() -> None:
    chosen = options(__doc__, "throughput")
    torch.set_num_threads(1)  # as a rank has
    works = {
        "MLP on digits": (digits_step, [1, 4, 16, 64, 256, 1024]),
        "transformer on text": (text_step, [1, 2, 4, 8, 16, 32]),
    }
    if chosen.quick:
        works = {name: (make, sizes[:2]) for name, (make, sizes) in works.items()}
    rounds, least = (2, 0.01) if chosen.quick else (7, 0.1)
    steps = {(name, size): make(size) for name, (make, sizes) in works.items() for size in sizes}
    for step in steps.values():
        step()
    times: dict[tuple[str, int], list[float]] = {key: [] for key in steps}
    with progress(rounds * len(steps), "steps of all sizes in turn") as done:
        for _ in range(rounds):
            for key, step in steps.items():
                times[key].append(seconds(step, least))
                done()
    rates = {key: spread([key[1] / t for t in found]) for key, found in times.items()}

    rows = [
        {
            "model": name,
            "batch": str(size),
            "ms per step": f"{1e3 * spread(times[name, size]).mean:.2f}",
            "samples per second": rates[name, size].text(0),
        }
        for name, size in steps
    ]
    figure, plots = axes(*works)
    said = []
    for number, (plot, (name, (_, sizes))) in enumerate(zip(plots, works.items(), strict=True)):
        line(plot, sizes, [rates[name, size] for size in sizes], "measured", number)
        first = rates[name, sizes[0]].mean / sizes[0]
        label = "if a step cost the same"
        plot.plot(sizes, [size * first for size in sizes], "--", color="grey", lw=1, label=label)
        plot.set(xscale="log", yscale="log", xlabel="batch", ylabel="samples per second")
        numbers_on(plot.xaxis, sizes)
        plot.set_ylim(top=2 * max(rates[name, size].high for size in sizes))
        numbers_of_scale(plot)
        plot.legend(frameon=False, loc="lower right")
        gain = [rates[name, size].mean / rates[name, sizes[0]].mean for size in sizes]
        enough = next(s for s, g in zip(sizes, gain, strict=True) if g > 0.8 * max(gain))
        said.append(
            f"{name}: a batch of {sizes[-1]} trains {gain[-1]:.1f} times as many samples per "
            f"second as a batch of {sizes[0]}; from {enough} on, a larger one gains less than 25%."
        )
    cells = [{"model": n, "batch": b, "per_second": r._asdict()} for (n, b), r in rates.items()]
    finish(chosen, rows, figure, {"cells": cells}, said)


if __name__ == "__main__":
    main()
