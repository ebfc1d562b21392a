"""What a contender trains: the model as it is wrapped, the optimizer that steps it, and the block
around both.

    dpcore zero1 4        a schedule that goes on across steps, with dp.DistributedOptimizer
    local_sgd:16          the model itself, in a block of dp.LocalSGD; diloco:64
    hook:powersgd:2       dp.DataParallel with a communication hook
    torch-hook:fp16       torch DDP with one
    torch-zero1           torch DDP with ZeroRedundancyOptimizer
    recipe mine.py:wrap   wrap(model) -> (wrapped, optimizer), a function of the user's
    anything else         what ``ranks.wrapped`` makes of it, with a plain optimizer
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

import dpcore as dp
from dpcore.base.user_code import loaded, naming_the_line, without_folders
from dpcore.ddp.torch_face.comm_hooks import check_hook
from dpcore.errors import Error, Unsupported
from dpcore.tools.compare.training.ranks import (
    TORCH,
    goes_across_steps,
    torch_ddp,
    updates_parts,
    wrapped,
)

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-3}),
    "adam": (torch.optim.Adam, {"lr": 1e-3}),
    "sgd": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
}
TORCH_ZERO1, RECIPE = "torch-zero1", "recipe"
LOCAL = {"local_sgd": 16, "diloco": 64}  # steps until the ranks agree, unless another is asked for
HOOKS = ("hook", "torch-hook")
NAMED_HOOKS = ("fp16", "bf16", "powersgd")


@dataclass(frozen=True)
class Kind:
    """What is known of a contender before it runs."""

    trains: bool = True  # it is compared with the optimizer's step in the time of all
    splits: bool = True  # whether its waiting can be told from slower computing, from outside
    sends_all: bool = True  # the bytes of an all-reduce of all gradients, in every step
    changes: str = ""  # how it differs from a mean of all gradients in every step
    every: int = 1  # steps until its ranks agree


def kind_of(inner: str) -> Kind:
    head, _, rest = inner.partition(":")
    if head in LOCAL:
        every = f"ranks agree every {rest} steps" if rest != "1" else "ranks agree in every step"
        return Kind(sends_all=False, changes=every, every=int(rest))
    if head in HOOKS:
        return Kind(sends_all=False, changes=_sent_by(rest))
    if inner.split()[0] == TORCH_ZERO1:
        return Kind(splits=False, sends_all=False)
    if inner.split()[0] == RECIPE:
        name = without_folders(inner.partition(" ")[2])
        return Kind(splits=False, sends_all=False, changes=f"{name} may change it")
    if goes_across_steps(inner):
        # A rank that steps its part alone has a shorter step whatever communication costs.
        return Kind(splits=False, sends_all=not updates_parts(inner))
    return Kind(trains=False)


def _sent_by(hook: str) -> str:
    name, _, rank = hook.partition(":")
    if name == "powersgd":
        return f"gradients are sent as matrices of rank {rank}"
    if name in NAMED_HOOKS:
        return f"gradients are sent as {name}"
    return f"gradients are what {without_folders(hook)} sends"


class Trained(NamedTuple):
    """``model``: what a step gets. ``block``: entered by now, to be left at the end."""

    model: Any
    optimizer: Any
    block: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()


def trained(
    inner: str, module: nn.Module, comm: Any, optimizer: str, options: dict[str, Any]
) -> Trained:
    """On all ranks. ``options``: those of both wrappers."""
    make, named = OPTIMIZERS[optimizer]
    head, _, rest = inner.partition(":")
    if inner.split()[0] == RECIPE:
        return _of_recipe(inner.partition(" ")[2], module)
    if inner.split()[0] == TORCH_ZERO1:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        model = torch_ddp(inner.replace(TORCH_ZERO1, TORCH, 1), module, **options)
        parts: Any = ZeroRedundancyOptimizer(module.parameters(), make, **named)
        return Trained(model, parts)
    plain = make(module.parameters(), **named)
    if head in LOCAL:
        block: Any
        if head == "local_sgd":
            block = dp.LocalSGD(module, plain, int(rest), comm=comm)
        else:
            outer = torch.optim.SGD(module.parameters(), lr=0.7, momentum=0.9, nesterov=True)
            block = dp.DiLoCo(module, plain, outer, int(rest), comm=comm)
        return Trained(module, plain, block.__enter__())
    if head == "hook":
        hooked = dp.DataParallel(module, comm=comm, **options)
        _register(hooked, rest, hooked.process_group)
        return Trained(hooked, plain)
    if head == "torch-hook":
        ddp = torch_ddp(TORCH, module, **options)
        _register(ddp, rest, None)
        return Trained(ddp, plain)
    model = wrapped(inner, module, comm, **options)
    if goes_across_steps(inner):
        return Trained(model, dp.DistributedOptimizer(plain, model))
    return Trained(model, plain)


def _register(model: Any, hook: str, group: Any) -> None:
    """``group``: what the hook sends over; None is torch's default group."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    name, _, rank = hook.partition(":")
    if name == "powersgd":
        # Two plain steps, in which buckets are cut; by default a thousand, in which nothing is.
        state = powerSGD_hook.PowerSGDState(
            group, matrix_approximation_rank=int(rank), start_powerSGD_iter=2
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif name in NAMED_HOOKS:
        found = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
        try:
            model.register_comm_hook(group, found[name])
        except TypeError as problem:  # torch DDP refuses some on the CPU
            raise Unsupported(f"torch-hook:{name}: torch DDP says: {problem}") from None
    else:
        model.register_comm_hook(group, hook_of(hook))


def hook_of(name: str) -> Callable[..., Any]:
    """The communication hook that ``file.py:my_hook`` names."""
    hook: Callable[..., Any] = loaded(name, "my_hook")
    try:
        check_hook(hook)
    except (TypeError, ValueError, KeyError) as problem:
        raise Unsupported(f"hook:{name}: {problem.args[0]}") from None
    return hook


def is_recipe(name: str) -> bool:
    """Whether ``file.py:NAME`` is a recipe and not a launch schedule; loads it."""
    found = loaded(name, "MySchedule")
    made = found() if isinstance(found, type) else found
    if isinstance(made, dp.LaunchSchedule):
        return False
    if isinstance(found, type) or not callable(found):
        kind = "the class" if isinstance(found, type) else "of"
        raise Unsupported(
            f"contender {name} is neither a dpcore.LaunchSchedule nor a function wrap(model) -> "
            f"(wrapped, optimizer), but {kind} {getattr(found, '__name__', type(found).__name__)}"
        )
    return True


def _of_recipe(name: str, module: nn.Module) -> Trained:
    with naming_the_line(name):
        returned = loaded(name, "wrap")(module)
    wanted = (
        f"{name}(model) has to return (wrapped, optimizer): what step(model) of a comparison gets, "
        "and what has step() and zero_grad()"
    )
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise Error(f"{wanted}; it returned a {type(returned).__name__}")
    model, optimizer = returned
    if not callable(model) or not all(hasattr(optimizer, it) for it in ("step", "zero_grad")):
        kinds = f"a {type(model).__name__} and a {type(optimizer).__name__}"
        raise Error(f"{wanted}; it returned {kinds}")
    return Trained(model, optimizer)
