"""Which optimizers may step a few parameters at a time, and which may step part of a parameter."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from dpcore.ddp.across_steps import saved
from dpcore.errors import Unsupported

# The step of each element depends only on its own gradient and state.
_ELEMENT_WISE = (
    *("SGD", "Adam", "AdamW", "NAdam", "RAdam"),
    *("RMSprop", "Adagrad", "Adadelta", "Adamax"),
)
_PER_PARAMETER = ("Adafactor", "Muon")  # the step of each parameter depends on no other parameter


def is_element_wise(optimizer: Optimizer) -> bool:
    """Whether it steps each element by that element's gradient and state alone."""
    return _is_one_of(_ELEMENT_WISE, optimizer, "element_wise")


def check_kind(optimizer: Optimizer, in_parts: bool, schedule: str) -> None:
    """Raises if the optimizer may not step the parts that the schedule would give it."""
    if is_element_wise(optimizer):
        saved.check_whole(optimizer)
        return
    kind = type(optimizer)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise Unsupported(
            f"schedule='{schedule}': LBFGS steps all parameters together and calls the model "
            "again, so no bucket can be updated by itself; use schedule='bucketed' and the plain "
            "LBFGS"
        )
    if not _is_one_of(_PER_PARAMETER, optimizer, "per_parameter"):
        raise Unsupported(
            f"DistributedOptimizer: whether {kind.__name__} may step a few parameters at a time is "
            "not known. If each number is stepped by its own gradient and state, set "
            f"{kind.__name__}.element_wise = True; if each parameter is, per_parameter = True"
        )
    if in_parts:
        raise Unsupported(
            f"schedule='{schedule}' cuts parameters in parts, and {kind.__name__} needs them "
            "whole (per_parameter); use schedule='priority' or 'dear'"
        )


def _is_one_of(torchs: tuple[str, ...], optimizer: Optimizer, mark: str) -> bool:
    kind = type(optimizer)
    is_torchs = kind.__module__.startswith("torch.optim")
    return (is_torchs and kind.__name__ in torchs) or bool(getattr(kind, mark, False))
