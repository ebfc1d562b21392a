"""Refuses what local updates cannot train, with an error that names it, before anything is sent."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from numbers import Integral, Real
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dpcore.ddp.across_steps.distributed import DistributedOptimizer
from dpcore.ddp.wrapper.parameters import trained_parameters
from dpcore.errors import Error, Unsupported


def whole_number(value: Any, least: int, what: str, who: str) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise Unsupported(f"{who}: {what}={value!r}: it must be a whole number, at least {least}")
    return int(value)


def fraction(value: Any, what: str, who: str) -> float:
    if not isinstance(value, Real) or not 0 <= float(value) <= 1:
        raise Unsupported(f"{who}: {what}={value!r} must be a number from 0 to 1")
    return float(value)


def check_module(module: Any, who: str) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"{who}: module is a {type(module).__name__}, not a torch.nn.Module")
    for part in module.modules():
        if isinstance(part, DistributedDataParallel):
            raise Unsupported(
                f"{who}: a {type(part).__name__} averages the gradients of every step already; "
                "give the bare module, and train that. To average gradients within groups of "
                "ranks and parameters between the groups, give model.module, and the ranks "
                "between as comm="
            )
    trained = trained_parameters(module, ())
    if not trained:
        raise Error(f"{who}: the module has no parameter that requires a gradient")
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise Error(f"{who}: {name} has no shape yet; run a forward of the module first")
        if parameter.is_meta or hasattr(parameter, "device_mesh"):
            parted = "a DTensor, of which each rank has a part"
            what = "without memory" if parameter.is_meta else parted
            raise Unsupported(f"{who}: {name} is {what}; a rank needs all of the parameters")
        if parameter.requires_grad and not parameter.is_floating_point():
            raise Unsupported(f"{who}: {name} is of {parameter.dtype}; only real numbers are sent")
    devices = {str(parameter.device) for _, parameter in trained}
    if len(devices) > 1:
        raise Unsupported(f"{who}: parameters are on {sorted(devices)}; one device is needed")


def check_optimizer(
    optimizer: Any, role: str, module: nn.Module, who: str, whole: bool = False
) -> None:
    """``whole``: the optimizer must have all trainable parameters."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"{who}: {role} is {type(optimizer).__name__}, not a torch.optim.Optimizer; make one "
            "of module.parameters()"
        )
    if any(isinstance(one, DistributedOptimizer) for one in wrappers(optimizer)):
        raise Unsupported(
            f"{who}: {role} is a DistributedOptimizer, which steps each bucket at another time, so "
            "a sync would send parameters of different steps; within DataParallel use "
            "schedule='bucketed', and give the optimizer as it is"
        )
    if whole and isinstance(optimizer, torch.optim.LBFGS):
        raise Unsupported(f"{who}: {role} is LBFGS, whose step() computes the loss again")
    own = {id(parameter) for parameter in module.parameters()}
    given = [inner_of(p) for group in optimizer.param_groups for p in group["params"]]
    strange = [list(parameter.shape) for parameter in given if id(parameter) not in own]
    if strange:
        raise Unsupported(
            f"{who}: {role} has {len(strange)} parameters, the first of shape {strange[0]}, that "
            "are not the module's. Make it of module.parameters(), after the module has got its "
            "final ones (.to(), a copy, or a wrapper may replace them)"
        )
    has = {id(parameter) for parameter in given}
    missing = [name for name, p in trained_parameters(module, ()) if id(p) not in has]
    if whole and missing:
        raise Unsupported(
            f"{who}: {role} lacks {', '.join(missing[:4])}, which would never be updated; make "
            "it of module.parameters()"
        )


def check_state(state: Any, names: Iterable[str], who: str) -> None:
    """``names`` are the keys of a ``state_dict()``."""
    if not isinstance(state, Mapping):
        raise TypeError(
            f"{who}: expected what state_dict() of this block gave, not a {type(state).__name__}"
        )
    if missing := [name for name in names if name not in state]:
        raise Unsupported(
            f"{who}: the state has no {', '.join(missing)}: load what state_dict() of this block "
            "gave"
        )


def unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The innermost optimizer, without the wrappers of frameworks."""
    *_, inner = wrappers(optimizer)
    return inner


def wrappers(optimizer: torch.optim.Optimizer) -> Iterator[torch.optim.Optimizer]:
    """The optimizer, the one it wraps, and so on to the innermost."""
    yield optimizer
    if isinstance(inner := vars(optimizer).get("optimizer"), torch.optim.Optimizer):
        yield from wrappers(inner)


def inner_of(parameter: Any) -> Any:
    """The module's parameter for an outer parameter, of this block or an earlier one."""
    return vars(parameter).get("_dpcore_inner", parameter)


def can_wait_later(group: Any) -> bool:
    accepted = inspect.signature(group.all_gather).parameters
    return "async_op" in accepted or any(p.kind is p.VAR_KEYWORD for p in accepted.values())
