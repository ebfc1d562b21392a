"""Accuracy that more ranks lose, and what keeps it.

    python examples/course/accuracy.py

Every rank brings 16 samples to a step, so 16 ranks train with a batch of 256 and make a sixteenth
of the steps in an epoch. At the learning rate of one rank they learn less in the same five epochs:
not since the gradients were worse, but since there are fewer steps. The linear rule raises the rate
with the ranks, the square-root rule with their square root, warm-up begins below it, and LAMB
measures each layer's step by its weights; its rate is tuned on the validation part.

A mean of gradients over ranks is the gradient of the mean over all of their samples, so one process
with the whole batch takes the place of the ranks here. That this is exact (to the last bits of a
float) is checked first, on 16 ranks that are threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from data import Part, accuracy, batches, digits, fit, loss_of, mlp
from figures import Spread, axes, finish, in_per_cent, line, numbers_on, options, progress, spread
from optimizers import Lamb
from torch import nn

import dpcore as dp

EACH = 16  # samples of a rank in a step
EPOCHS = 5
SIZES = (64, 64, 64, 64, 64, 10)
RATE, MOMENTUM = 0.01, 0.9


def sgd(factor: Callable[[int], float]) -> Callable[[nn.Module, int], torch.optim.Optimizer]:
    """With the learning rate of one rank times ``factor(ranks)``."""
    return lambda model, ranks: torch.optim.SGD(
        model.parameters(), lr=RATE * factor(ranks), momentum=MOMENTUM
    )


def warm_up(ranks: int) -> Callable[[int], float]:
    """For LambdaLR: from the rate of one rank to that of all in a fifth of the steps."""
    steps = max(1, EPOCHS * (1280 // (EACH * ranks)) // 5)
    return lambda step: min(1.0, 1 / ranks + step / steps)


def trained(name: str, make: Any, ranks: int, seed: int, part: Part) -> float:
    """Accuracy on ``part``, in per cent."""
    model = mlp(seed, *SIZES)
    rate = warm_up(ranks) if name.endswith("warm-up") else None
    fit(model, make(model, ranks), EACH * ranks, EPOCHS, seed, rate)
    return accuracy(model, part)


def tuned_lamb(ranks: int, rates: list[float], seeds: list[int]) -> float:
    def on_validation(rate: float) -> float:
        make = lambda model, _: Lamb(model.parameters(), lr=rate)  # noqa: E731
        return sum(trained("LAMB", make, ranks, seed, digits().validation) for seed in seeds)

    return max(rates, key=on_validation)


def difference_from_ranks(ranks: int, steps: int) -> float:
    """The largest of any weight, between this many threads and one process with all samples."""

    def body(comm: dp.Communicator) -> list[torch.Tensor]:
        model = dp.DataParallel(mlp(0, *SIZES), comm=comm)
        return train(model, lambda part: Part(*(t.chunk(ranks)[comm.rank] for t in part)))

    def train(model: nn.Module, mine: Callable[[Part], Part]) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE * ranks, momentum=MOMENTUM)
        for _, part in zip(range(steps), batches(digits().train, EACH * ranks, 0), strict=False):
            optimizer.zero_grad()
            loss_of(model, mine(part)).backward()
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    alone = train(mlp(0, *SIZES), lambda part: part)
    together = dp.spawn(body, ranks, mode="threads")[0]
    return max((a - b).abs().max().item() for a, b in zip(alone, together, strict=True))


def main() -> None:
    chosen = options(__doc__, "accuracy")
    torch.set_num_threads(1)
    worlds = [1, 16] if chosen.quick else [1, 2, 4, 8, 16]
    seeds = [0, 1] if chosen.quick else [0, 1, 2, 3, 4]
    tuning, rates = ([10], [0.01]) if chosen.quick else ([10, 11], [0.002, 0.005, 0.01, 0.02, 0.05])
    methods: dict[str, Any] = {
        "same rate": sgd(lambda ranks: 1),
        "square-root rule": sgd(lambda ranks: ranks**0.5),
        "linear rule": sgd(lambda ranks: ranks),
        "linear, warm-up": sgd(lambda ranks: ranks),
        "LAMB, tuned": None,
    }
    results: dict[str, list[Spread]] = {name: [] for name in methods}
    lamb_rates = []
    with progress(len(worlds) * (len(methods) + 1) + 1, "training and reporting") as done:
        difference = difference_from_ranks(worlds[-1], 5)
        done()
        for ranks in worlds:
            best = tuned_lamb(ranks, rates, tuning)
            lamb_rates.append(best)
            done()
            for name, make in methods.items():
                make = make or (lambda model, _, best=best: Lamb(model.parameters(), lr=best))
                found = [trained(name, make, ranks, seed, digits().test) for seed in seeds]
                results[name].append(spread(found))
                done()

    rows = [
        {
            "ranks": str(ranks),
            "batch": str(EACH * ranks),
            "steps": str(EPOCHS * (1280 // (EACH * ranks))),
            **{name: results[name][at].text() for name in methods},
        }
        for at, ranks in enumerate(worlds)
    ]
    figure, (plot,) = axes(f"digits after {EPOCHS} epochs, 16 samples per rank and step")
    for number, name in enumerate(methods):
        line(plot, worlds, results[name], name, number)
    plot.set(xscale="log", xlabel="ranks", ylabel="accuracy on the test part, %")
    numbers_on(plot.xaxis, worlds)
    in_per_cent(plot)
    plot.legend(frameon=False, loc="lower left")
    first, last = results["same rate"][0], results["same rate"][-1]
    said = [
        f"One rank reaches {first.text()} %, {worlds[-1]} ranks at the same rate {last.text()} %. "
        f"The linear rule gives {results['linear rule'][-1].text()} %, with warm-up "
        f"{results['linear, warm-up'][-1].text()} %, LAMB {results['LAMB, tuned'][-1].text()} %.",
        f"{worlds[-1]} ranks as threads and one process with their samples differ by at most "
        f"{difference:.1e} in any weight after 5 steps.",
        f"Test accuracy, mean and 95% over {len(seeds)} seeds; LAMB's rate tuned on the validation "
        f"part: {', '.join(f'{rate:g}' for rate in lamb_rates)}.",
    ]
    facts = {
        "worlds": worlds,
        "accuracy": {name: [s._asdict() for s in found] for name, found in results.items()},
        "lamb_rates": lamb_rates,
        "difference_from_ranks": difference,
    }
    finish(chosen, rows, figure, facts, said)


if __name__ == "__main__":
    main()
