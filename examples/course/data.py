"""Digits for the demonstrations of this folder, and the loop that trains on them.

scikit-learn brings 1797 handwritten digits of 8 x 8 pixels along; nothing is fetched. They are cut
into 1280 to train on, 217 to tune on, and 300 to report, always the same ones. Each pixel has a
mean of 0 and, unless it hardly varies, a variance of 1 over the training part: otherwise what all
digits have in common decides which learning rate diverges.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Part(NamedTuple):
    """Samples, and their labels."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:  # type: ignore[override]
        return self.x.shape[0]


class Digits(NamedTuple):
    train: Part
    validation: Part
    test: Part


@cache
def digits() -> Digits:
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        sys.exit("this trains on scikit-learn's digits: pip install '.[learn]' in the clone")
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(pixels, dtype=torch.float32)[order], torch.tensor(labels)[order]
    x = (x - x[:1280].mean(0)) / x[:1280].std(0).clamp(min=1)
    return Digits(*(Part(x[a:b], y[a:b]) for a, b in ((0, 1280), (1280, 1497), (1497, 1797))))


def mlp(seed: int, *sizes: int, norm: bool = False) -> nn.Sequential:
    """Linear layers with ReLU between them, and batch norm before it if asked for. Weights are
    drawn as He et al. (2015) do for ReLU: with torch's own, which are smaller, activations fade
    from layer to layer, and deep networks begin slowly."""
    numbers = torch.Generator().manual_seed(seed)
    layers: list[nn.Module] = []
    for wide, narrow in pairwise(sizes or (64, 64, 10)):
        layer = nn.Linear(wide, narrow)
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu", generator=numbers)
        nn.init.zeros_(layer.bias)
        layers += [layer, nn.BatchNorm1d(narrow), nn.ReLU()] if norm else [layer, nn.ReLU()]
    return nn.Sequential(*layers[: -2 if norm else -1])


def batches(part: Part, size: int, seed: int) -> Iterator[Part]:
    """One epoch, shuffled; what is left over at the end is not used, as with drop_last=True."""
    order = torch.randperm(len(part), generator=torch.Generator().manual_seed(seed))
    for begin in range(0, len(part) - size + 1, size):
        chosen = order[begin : begin + size]
        yield Part(part.x[chosen], part.y[chosen])


def loss_of(model: nn.Module, part: Part) -> Tensor:
    return nn.functional.cross_entropy(model(part.x), part.y)


def accuracy(model: nn.Module, part: Part) -> float:
    """Per cent."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        right = (model(part.x).argmax(1) == part.y).float().mean().item()
    model.train(was_training)
    return 100 * right


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    size: int,
    epochs: int,
    seed: int,
    rate: Callable[[int], float] | None = None,
) -> bool:
    """Trains on the digits. ``rate``: a factor of the learning rate in each step. False when the
    loss is not a number any more."""
    train, step = digits().train, 0
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate) if rate else None
    for epoch in range(epochs):
        for batch in batches(train, size, 1000 * seed + epoch):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            if schedule is not None:
                schedule.step()
            step += 1
        if not torch.isfinite(loss):
            return False
    return True


def traffic(comm: Any) -> int:
    """Bytes that this rank has sent, or read and written in the memory of other ranks, so far.

    What it writes into its own stage, where the others read it, is not one of these. A list of
    moves sends messages, and they are counted with the others."""
    counters = comm.stats()
    moved = counters["sent"]["memory"] + counters["sent"]["network"]
    for found in counters.values():
        for path, of in found.items():
            if isinstance(of, dict) and path != "moves":
                is_own_stage = path in ("direct/stage", "one_shot/stage")
                moved += of["peer_reads"] + (0 if is_own_stage else of["peer_writes"])
    return int(moved)
