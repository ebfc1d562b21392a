"""Mistakes that a rank sees by itself: parameters without an optimizer, and optimizers that step
tensors which are no parameters of the model any more.

Both look the same in a loop: no error, and parameters that stay what they were. An optimizer holds
the tensors it was given, so it goes on stepping old ones if the program puts new ones into the
model afterwards: a new head, a copy, ``load_state_dict(assign=True)``, adapters.

A model is looked at in its first steps, and then once more; after that a step costs a few lookups.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from dpcore.ddp.mistakes.contents import some_of

_Optimizer = torch.optim.Optimizer

_STEPS = 3  # of backward, after the first step of an optimizer: by then all should have stepped
_FRUITLESS = 2  # steps of an optimizer none of whose tensors has a gradient
_REMEDY = (
    "Make the optimizer of model.parameters() when the model is in its final form: after new "
    "layers, copies, adapters and load_state_dict(assign=True)"
)


class Steps:
    """What was seen of the optimizers of one model."""

    def __init__(self) -> None:
        self.began = -1  # after so many backwards of the model; -1: not yet
        self.is_over = False  # the looking
        self.stepped: set[int] = set()  # ids of tensors that optimizers hold
        # Of each optimizer, the ids of tensors of no model that never had a gradient.
        self.strange: weakref.WeakKeyDictionary[_Optimizer, set[int]] = weakref.WeakKeyDictionary()


_fruitless: weakref.WeakKeyDictionary[_Optimizer, int] = weakref.WeakKeyDictionary()


def before_step(
    optimizer: _Optimizer, models: Sequence[Any], all_models: Callable[[], list[Any]]
) -> None:
    """Called before each step of any optimizer. ``models``: those whose parameters it steps."""
    for model in models:
        steps = model._observer.steps
        if not steps.is_over and model._mistakes.is_on:
            _look(steps, optimizer, model, all_models)
    if not models:
        _look_for_stale(optimizer, all_models)


def _look(
    steps: Steps, optimizer: _Optimizer, model: Any, all_models: Callable[[], list[Any]]
) -> None:
    if steps.began < 0:
        steps.began = model._reducer.completed
    held = {id(tensor): tensor for tensor in _tensors_of(optimizer)}
    steps.stepped |= set(held)
    if model._across is None:  # else the optimizer steps parts of buckets
        known = {id(p) for one in all_models() for p in one.module.parameters()}
        idle = {key for key, tensor in held.items() if key not in known and tensor.grad is None}
        steps.strange[optimizer] = idle & steps.strange.get(optimizer, idle)
    if model._reducer.completed >= steps.began + _STEPS:
        steps.is_over = True
        _tell(steps, model)


def _tell(steps: Steps, model: Any) -> None:
    trained = {id(parameter) for parameter in model._parameters_by_number}
    missing = {
        name: parameter
        for name, parameter in model.module.named_parameters()
        if id(parameter) in trained - steps.stepped and parameter.requires_grad
    }
    if not missing:
        return
    names, who = some_of(list(missing)), model._model_group.name
    strange = {
        optimizer: [tensor for tensor in _tensors_of(optimizer) if id(tensor) in idle]
        for optimizer, idle in steps.strange.items()
        if idle
    }
    for optimizer, tensors in strange.items():
        have_gradients = all(parameter.grad is not None for parameter in missing.values())
        if have_gradients and _dimensions(tensors) == _dimensions(missing.values()):
            model._mistakes.warn(
                "stale optimizer",
                f"rank {model.group.rank}: {type(optimizer).__name__} holds {len(tensors)} tensors "
                f"that are no parameters of {who} any more and have had no gradient in {_STEPS} "
                f"steps, while {names} have gradients and no optimizer, so they stay what they "
                f"were. {_REMEDY}",
            )
            return
    also = "".join(
        f". {type(optimizer).__name__} holds {len(tensors)} tensors that are no parameters of the "
        "model and have no gradients"
        for optimizer, tensors in strange.items()
    )
    model._mistakes.note(
        "no optimizer",
        f"no optimizer steps {names} of {who}, whose gradients are averaged: give them to one, or "
        f"freeze them by requires_grad_(False) before wrapping{also}",
    )


def _look_for_stale(optimizer: _Optimizer, all_models: Callable[[], list[Any]]) -> None:
    """An optimizer that steps no wrapped parameter, as some do: but without gradients, while the
    gradients of a model wait for an optimizer?"""
    tensors = list(_tensors_of(optimizer))
    if not tensors or any(tensor.grad is not None for tensor in tensors):
        _fruitless.pop(optimizer, None)
        return
    count = _fruitless[optimizer] = _fruitless.get(optimizer, 0) + 1
    if count < _FRUITLESS:
        return
    shapes = {tensor.shape for tensor in tensors}
    for model in all_models():
        waits = model._reducer.completed >= _FRUITLESS and model._observer.steps.began < 0
        is_open = not getattr(model.group, "closed", False)
        if (
            waits
            and is_open
            and not shapes.isdisjoint(p.shape for p in model._parameters_by_number)
        ):
            model._mistakes.warn(
                "stale optimizer",
                f"rank {model.group.rank}: {type(optimizer).__name__} steps {len(tensors)} tensors "
                f"of which none has a gradient, and none is a parameter of "
                f"{model._model_group.name}, whose {model._reducer.completed} backwards no "
                f"optimizer has used. {_REMEDY}",
            )


def _tensors_of(optimizer: _Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _dimensions(tensors: Iterable[torch.Tensor]) -> list[int]:
    """A head of another size has as many tensors, of as many dimensions."""
    return sorted(tensor.dim() for tensor in tensors)
