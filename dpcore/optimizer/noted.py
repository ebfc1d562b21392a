"""A step that is noted now and done later, a few parameters at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

Groups = list[dict[str, Any]]


def hyperparameters_of(optimizer: Optimizer) -> Groups:
    """Those of each parameter group, as they are now: a scheduler may change them before they are
    used."""
    return [
        {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key != "params"
        }
        for group in optimizer.param_groups
    ]


def step_with(
    optimizer: Optimizer, noted: Groups, params_of: Callable[[int], Iterable[torch.Tensor]]
) -> None:
    """A step of the optimizer with the noted hyperparameters, for these parameters of each group
    only."""
    groups = optimizer.param_groups
    narrowed = [{**group, "params": list(params_of(at))} for at, group in enumerate(noted)]
    optimizer.param_groups = [group for group in narrowed if group["params"]]
    try:
        if optimizer.param_groups:
            optimizer.step()
    finally:
        optimizer.param_groups = groups
