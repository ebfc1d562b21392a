"""Divergence, optimizers that scale each layer's step, and where warm-up helps.

    python examples/course/layerwise.py

An MLP of eight layers learns the digits with a batch of 256, for a range of learning rates. Plain
SGD learns in a narrow range: below it is too slow, above it diverges. The first figure shows how
wide the range of LARS, LAMB and NovoGrad is, and what becomes of each above it.

Warm-up changes little there. It does for a transformer whose norms come behind what is added up
(as in the first one, of 2017): its gradients are large at first, and Adam's averages of them know
little yet. The second figure has it with rates that are constant, and with such that grow over the
first 30% of the steps.

The rate of each is chosen on the validation part, and the test part is looked at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from data import accuracy, digits, fit, mlp
from figures import (
    Spread,
    axes,
    finish,
    in_per_cent,
    line,
    numbers_on,
    options,
    progress,
    spread,
)
from optimizers import Lamb, Lars, NovoGrad
from torch import Tensor, nn

SIZES = (64, *[64] * 7, 10)
LOST = 10.0  # per cent: a model whose weights are not numbers says "0" to everything


class Rows(nn.Module):
    """A transformer that reads a digit row by row, with its norms behind the sums."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.places = nn.Linear(8, 32), nn.Parameter(0.02 * torch.randn(8, 32))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 128, 0.0, "gelu", batch_first=True) for _ in range(4)
        )
        self.last = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.view(-1, 8, 8)) + self.places
        for layer in self.layers:
            x = layer(x)
        made: Tensor = self.last(x.mean(1))
        return made


class Method(NamedTuple):
    model: Callable[[int], nn.Module]
    optimizer: Callable[..., torch.optim.Optimizer]
    rates: Sequence[float]
    batch: int
    epochs: int
    warm: float = 0.0  # of all steps
    tuning: Sequence[int] = (10, 11, 12)  # seeds

    def trained(self, rate: float, seed: int) -> nn.Module | None:
        """None when its loss is not a number any more."""
        model = self.model(seed)
        steps = self.warm * self.epochs * (1280 // self.batch)
        factor = (lambda step: min(1.0, (step + 1) / steps)) if steps else None
        optimizer = self.optimizer(model.parameters(), lr=rate)
        is_sound = fit(model, optimizer, self.batch, self.epochs, seed, factor)
        return model if is_sound else None


def sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def lars(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return Lars(parameters, lr=lr, momentum=0.9, eta=0.02)


def methods(doublings: Sequence[int]) -> list[dict[str, Method]]:
    """By name, for each plot. ``doublings``: of the rate in the middle of its range."""

    def deep(optimizer: Any, middle: float, warm: float = 0.0) -> Method:
        rates = [middle * 2.0**power for power in doublings]
        return Method(lambda seed: mlp(seed, *SIZES), optimizer, rates, 256, 10, warm)

    def rows(warm: float) -> Method:
        rates = [0.01 * 2.0**power for power in doublings if -2 <= power <= 2]
        return Method(Rows, torch.optim.Adam, rates, 128, 6, warm, (10, 11, 12, 13, 14))

    return [
        {
            "SGD": deep(sgd, 0.1),
            "SGD, warm-up": deep(sgd, 0.1, 0.3),
            "LARS": deep(lars, 1.0),
            "LAMB": deep(Lamb, 0.02),
            "NovoGrad": deep(NovoGrad, 0.02),
        },
        {"transformer, Adam": rows(0.0), "transformer, Adam, warm-up": rows(0.3)},
    ]


def main() -> None:
    chosen = options(__doc__, "layerwise")
    torch.set_num_threads(1)
    plotted = methods([-1, 1] if chosen.quick else range(-6, 7))
    seeds = [0, 1] if chosen.quick else [0, 1, 2, 3, 4]
    every = {name: method for plot in plotted for name, method in plot.items()}
    curves: dict[str, list[Spread]] = {name: [] for name in every}
    diverged = dict.fromkeys(every, 0)
    rows, best, tests = [], {}, {}
    with progress(sum(len(m.rates) for m in every.values()), "everybody at every rate") as done:
        for name, method in every.items():
            for rate in method.rates:
                tuning = method.tuning[:1] if chosen.quick else method.tuning
                found = [method.trained(rate, seed) for seed in tuning]
                diverged[name] += sum(model is None for model in found)
                part = digits().validation
                curves[name].append(spread([accuracy(m, part) if m else LOST for m in found]))
                done()
            top = max(range(len(method.rates)), key=lambda at, name=name: curves[name][at].mean)
            best[name] = method.rates[top]
            models = [method.trained(best[name], seed) for seed in seeds]
            tests[name] = spread([accuracy(m, digits().test) if m else LOST for m in models])
            good = [c.mean > curves[name][top].mean - 5 for c in curves[name]]
            rows.append(
                {
                    "optimizer": name,
                    "best rate": f"{best[name]:g}",
                    "test accuracy, %": tests[name].text(),
                    "rates within 5 points of the best": f"{sum(good)} of {len(good)}",
                    "runs with a loss of NaN": str(diverged[name]),
                }
            )

    titles = "MLP of 8 layers, batch of 256, 10 epochs", "transformer, batch of 128, 6 epochs"
    figure, plots = axes(*titles)
    for plot, group in zip(plots, plotted, strict=True):
        for number, (name, method) in enumerate(group.items()):
            middle = method.rates[len(method.rates) // 2]
            label = f"{name} (1 is {middle:g})" if plot is plots[0] else name.partition(", ")[2]
            scale = middle if plot is plots[0] else 1.0
            line(plot, [rate / scale for rate in method.rates], curves[name], label, number)
        plot.set(xscale="log", ylabel="accuracy on the validation part, %")
        in_per_cent(plot)
    plots[0].set(xlabel="learning rate, as a multiple of the one in the middle")
    plots[0].legend(frameon=False, fontsize=8, loc="lower left")
    plots[1].set(xlabel="learning rate")
    numbers_on(plots[1].xaxis, next(iter(plotted[1].values())).rates)
    plots[1].legend(frameon=False, loc="lower left")
    cold, warm = (curves[name] for name in plotted[1])
    gain = [b.mean - a.mean for a, b in zip(cold, warm, strict=True)]
    most = max(range(len(gain)), key=gain.__getitem__)
    rate = every["transformer, Adam"].rates[most]
    said = [
        f"With a rate of {rate:g} warm-up takes the transformer from {cold[most].text()} to "
        f"{warm[most].text()} %, on the validation part; SGD on the MLP, each at its best rate, "
        f"from {tests['SGD'].text()} to {tests['SGD, warm-up'].text()} % on the test part.",
        f"{diverged['SGD']} runs of SGD ended with a loss of NaN, {diverged['LAMB']} of "
        f"LAMB, {diverged['LARS']} of LARS and {diverged['NovoGrad']} of NovoGrad.",
        f"Rates are doubled from point to point; the test part is reported once, at the rate that "
        f"was best on the validation part, with 95% over {len(seeds)} seeds.",
    ]
    facts = {
        "rates": {name: list(method.rates) for name, method in every.items()},
        "validation": {n: [s._asdict() for s in found] for n, found in curves.items()},
        "best_rate": best,
        "test": {n: s._asdict() for n, s in tests.items()},
    }
    finish(chosen, rows, figure, facts, said)


if __name__ == "__main__":
    main()
