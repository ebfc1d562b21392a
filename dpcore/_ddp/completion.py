"""A backward that missed parameters is an error before anybody uses its gradients.

torch DDP notices at the next forward, so the optimizer has stepped with gradients that are each
rank's own, and the last step of a run is never looked at. Here it is whatever comes first: the next
forward (``DataParallel.forward``), a step of an optimizer of these parameters, before it changes
anything, or ``dpcore.finalize()``. Several backwards that reach every parameter together are fine.

A step costs one look at a flag: which models an optimizer trains is remembered.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dpcore import session
from dpcore.errors import Error

if TYPE_CHECKING:
    from dpcore.communicator import Communicator
    from dpcore.data_parallel import DataParallel

_models: weakref.WeakSet[DataParallel] = weakref.WeakSet()
_generation = 0  # of _models
_Trained = tuple[tuple[int, int], list["weakref.ref[DataParallel]"]]
_trained_by: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Trained] = (
    weakref.WeakKeyDictionary()
)
_listening = False


def watch(model: DataParallel) -> None:
    """From now on, optimizers and ``finalize`` ask the model."""
    global _generation, _listening
    _models.add(model)
    _generation += 1
    if not _listening:
        _listening = True
        register_optimizer_step_pre_hook(_before_step)
        session.call_before_finalize(_before_finalize)


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    known = _trained_by.get(optimizer)
    if known is None or known[0] != (_generation, count):
        owners = [weakref.ref(model) for model in list(_models) if _trains(optimizer, model)]
        known = _trained_by[optimizer] = ((_generation, count), owners)
    for owner in known[1]:
        if (model := owner()) is not None:
            # Optimizers that step within backward do so for buckets that are complete.
            if model._reducer.is_incomplete and torch._C._current_graph_task_id() < 0:
                raise_if_incomplete(model)
            if model._reducer.wants_optimizer:
                model._reducer.optimizer_steps()


def _trains(optimizer: torch.optim.Optimizer, model: DataParallel) -> bool:
    mine = {id(parameter) for parameter in model._parameters_by_number}
    return any(id(p) in mine for group in optimizer.param_groups for p in group["params"])


def _before_finalize(communicator: Communicator) -> None:
    for model in list(_models):
        if model.group is communicator and model._reducer.has_ended_incomplete:
            raise_if_incomplete(model)


def raise_if_incomplete(model: DataParallel) -> None:
    """The other ranks wait for what this one will never send: they get its reason."""
    try:
        model._reducer.check_complete()
    except Error as problem:
        model.logger.set_error_and_log(str(problem))
        abort = getattr(model.group, "abort", None)
        if abort is not None:
            with contextlib.suppress(Error):
                abort(str(problem))
        raise
