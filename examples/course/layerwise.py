"""Divergence, and optimizers that scale each layer's step.

    python examples/course/layerwise.py

An MLP of eight layers learns the digits with a batch of 256, for a range of learning rates. Plain
SGD learns in a narrow range: below it is too slow, above it diverges. The figure shows how much
wider the range of LARS, LAMB and NovoGrad is, and whether warm-up widens that of SGD. The rate of
each is chosen on the validation part, and the test part is looked at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from data import accuracy, digits, fit, mlp
from figures import Spread, axes, finish, in_per_cent, line, options, progress, spread
from optimizers import Lamb, Lars, NovoGrad

BATCH, EPOCHS = 256, 10
SIZES = (64, *[64] * 7, 10)
WARM_STEPS = 10  # of 50


def trained(make: Callable[..., Any], rate: float, seed: int, warms_up: bool) -> Any:
    """The model, or None when its loss is no number any more."""
    model = mlp(seed, *SIZES)
    warm = (lambda step: min(1.0, (step + 1) / WARM_STEPS)) if warms_up else None
    is_sound = fit(model, make(model.parameters(), lr=rate), BATCH, EPOCHS, seed, warm)
    return model if is_sound else None


def main() -> None:
    chosen = options(__doc__, "layerwise")
    torch.set_num_threads(1)

    def sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9)

    def lars(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return Lars(parameters, lr=lr, momentum=0.9, eta=0.02)

    # Each with the rate in the middle of its range.
    methods: dict[str, tuple[Any, float, bool]] = {
        "SGD": (sgd, 0.1, False),
        "SGD, warm-up": (sgd, 0.1, True),
        "LARS": (lars, 1.0, False),
        "LAMB": (Lamb, 0.02, False),
        "NovoGrad": (NovoGrad, 0.02, False),
    }
    powers = [-1, 1] if chosen.quick else list(range(-6, 7))
    seeds = [0, 1] if chosen.quick else [0, 1, 2, 3, 4]
    tuning = [10] if chosen.quick else [10, 11, 12]
    curves: dict[str, list[Spread]] = {name: [] for name in methods}
    diverged = dict.fromkeys(methods, 0)
    rows, best, tests = [], {}, {}
    with progress(len(methods) * len(powers), "every optimizer at every rate") as done:
        for name, (make, middle, warms_up) in methods.items():
            for power in powers:
                found = [trained(make, middle * 2**power, s, warms_up) for s in tuning]
                diverged[name] += sum(model is None for model in found)
                part = digits().validation
                # A model whose weights are no numbers says "0" to everything.
                curves[name].append(spread([accuracy(m, part) if m else 10.0 for m in found]))
                done()
            top = max(range(len(powers)), key=lambda at, name=name: curves[name][at].mean)
            best[name] = middle * 2 ** powers[top]
            models = [trained(make, best[name], seed, warms_up) for seed in seeds]
            tests[name] = spread([accuracy(m, digits().test) if m else 10.0 for m in models])
            good = [c.mean > curves[name][top].mean - 5 for c in curves[name]]
            rows.append(
                {
                    "optimizer": name,
                    "best rate": f"{best[name]:g}",
                    "test accuracy, %": tests[name].text(),
                    "rates within 5 points of the best": f"{sum(good)} of {len(good)}",
                    "runs with a loss that is no number": str(diverged[name]),
                }
            )

    figure, (plot,) = axes("accuracy after 10 epochs with a batch of 256, MLP of 8 layers")
    for number, name in enumerate(methods):
        line(plot, [2.0**power for power in powers], curves[name], name, number)
    plot.set(xscale="log", ylabel="accuracy on the validation part, %")
    plot.set_xlabel(
        "learning rate, as a multiple of "
        + ", ".join(
            f"{middle:g} ({name})" for name, (_, middle, _) in methods.items() if "," not in name
        ),
        fontsize=8,
    )
    in_per_cent(plot)
    plot.legend(frameon=False, loc="lower center")
    said = [
        f"Rates are doubled from line to line; the test part is reported once, at the rate that "
        f"was best on the validation part, with 95% over {len(seeds)} seeds."
    ]
    facts = {
        "rates": {n: [methods[n][1] * 2**power for power in powers] for n in methods},
        "validation": {n: [s._asdict() for s in found] for n, found in curves.items()},
        "best_rate": best,
        "test": {n: s._asdict() for n, s in tests.items()},
    }
    finish(chosen, rows, figure, facts, said)


if __name__ == "__main__":
    main()
