"""Nested wrappers may average different parameters, but never the same ones.

Two wrappers of the same parameters would send every gradient twice, by hooks that do not know of
each other. torch DDP does that silently. Here it raises ``Unsupported``: in the constructor if the
other wrapper is inside, else at the first forward within the outer one.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel.distributed import DistributedDataParallel

from dpcore.ddp.wrapper.parameters import kept_parameters, trained_parameters
from dpcore.errors import Unsupported

if TYPE_CHECKING:
    from dpcore.ddp.wrapper.wrapped import Wrapped

_NAMES_IN_MESSAGES = 4
_ADVICE = (
    "Wrap the model once: give the outer wrapper (or accelerate's prepare(), Lightning, ...) the "
    "bare module, or leave it out and use dpcore.DataParallel alone. Wrappers of different "
    "parameters may be nested: list the inner one's names in _ddp_params_and_buffers_to_ignore of "
    "the module that the outer one wraps"
)


def check_inside(module: nn.Module, trained: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Raises if a wrapper within ``module`` averages some of the parameters too."""
    for part in module.modules():
        if isinstance(part, DistributedDataParallel):
            twice = _common(_reduced_by(part), trained)
            if twice:
                raise Unsupported(
                    f"DataParallel: a {type(part).__name__} inside the module averages "
                    f"{_listed(twice)} already. {_ADVICE}"
                )


def check_around(model: Wrapped, outer: Any) -> None:
    """Raises if ``outer``, whose forward is running, averages some of the model's parameters."""
    names: dict[str, Any] = vars(model)
    known = names.get("_outer_wrapper")
    if known is not None and known() is outer:
        return
    left_out = getattr(model.module, "_ddp_params_and_buffers_to_ignore", ())
    averaged = trained_parameters(model.module, left_out)  # delayed or not
    twice = _common(_reduced_by(outer), averaged) if outer is not model else []
    if twice:
        raise Unsupported(
            f"DataParallel: a {type(outer).__name__} around this wrapper averages "
            f"{_listed(twice)} again. {_ADVICE}"
        )
    names["_outer_wrapper"] = weakref.ref(outer)


def _reduced_by(wrapper: Any) -> set[int]:
    return {id(p) for _, p in kept_parameters(wrapper.module, wrapper.parameters_to_ignore)}


def _common(reduced: set[int], trained: Sequence[tuple[str, torch.Tensor]]) -> list[str]:
    return [name for name, parameter in trained if id(parameter) in reduced]


def _listed(names: list[str]) -> str:
    more = ", ..." if names[_NAMES_IN_MESSAGES:] else ""
    return ", ".join(names[:_NAMES_IN_MESSAGES]) + more
