"""A step that is recorded now and done later, a few parameters at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from dpcore.errors import Unsupported

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
    optimizer: Optimizer, recorded: Groups, params_of: Callable[[int], Iterable[torch.Tensor]]
) -> None:
    """A step of the optimizer with the recorded hyperparameters, for these parameters of each group
    only."""
    groups = optimizer.param_groups
    narrowed = [{**group, "params": list(params_of(at))} for at, group in enumerate(recorded)]
    optimizer.param_groups = [group for group in narrowed if group["params"]]
    try:
        if optimizer.param_groups:
            optimizer.step()
    finally:
        optimizer.param_groups = groups
    for before, after in zip(recorded, narrowed, strict=True):
        for key, value in after.items():
            if key != "params" and (key not in before or _is_changed(before[key], value)):
                raise Unsupported(
                    f"DistributedOptimizer: {type(optimizer).__name__}.step() changes {key!r} in "
                    "param_groups, which would be lost: each of several calls steps a few "
                    "parameters, with a copy of the groups. Count in optimizer.state of each "
                    "parameter, or use schedule='bucketed' and the optimizer as it is"
                )


def _is_changed(before: Any, after: Any) -> bool:
    if isinstance(after, torch.Tensor):
        return after is not before or after._version > 0  # it was cloned to be recorded
    return after is not before and bool(after != before)
