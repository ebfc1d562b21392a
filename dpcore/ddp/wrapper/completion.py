"""Raises for a backward that missed parameters before its gradients are used.

torch DDP raises at the next forward: by then the optimizer has stepped with gradients that were not
averaged, and the last step of a run is never checked. Here the first of these raises: the next
forward (``DataParallel.forward``), a step of an optimizer of these parameters, before it changes
them, or ``dpcore.finalize()``. Several backwards that together reach every parameter are fine.

Before an optimizer steps, it also waits for buckets that a launch schedule left in flight.

A step costs one check of a flag: the models that an optimizer trains are cached.

A module may be wrapped again while its first wrapper lives, for example after a ``PeerLost``. Both
wrappers have hooks on its parameters, and each knows the other: gradients belong to the wrapper
whose forward ran last.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from dpcore.comm.communicators.protocol import end_for_all
from dpcore.comm.launch import session
from dpcore.ddp.mistakes import local_notes, not_finite
from dpcore.ddp.wrapper.in_flight import Guard
from dpcore.errors import Error

if TYPE_CHECKING:
    from dpcore.comm.communicators.native import Communicator
    from dpcore.ddp.wrapper.wrapped import Wrapped

_models: weakref.WeakSet[Wrapped] = weakref.WeakSet()
_models_lock = threading.Lock()  # ranks may be threads, and a set must not grow while it is read
_generation = 0  # of _models
_Trained = tuple[tuple[int, int], list["weakref.ref[Wrapped]"]]
_trained_by: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Trained] = (
    weakref.WeakKeyDictionary()
)
_listening = False


def watch(model: Wrapped) -> None:
    """Makes optimizers and ``finalize`` check the model, and links it with other wrappers of its
    parameters."""
    global _generation, _listening
    reducer = model._reducer
    reducer.defer_by(Guard(reducer, model._parameters_by_number))
    with _models_lock:
        others = [other for other in _models if other is not model]
        _models.add(model)
        _generation += 1
    mine = _ids(model)
    for other in others:
        if not mine.isdisjoint(_ids(other)):
            reducer.share_parameters_with(other._reducer)
            other._reducer.share_parameters_with(reducer)
    if not _listening:
        _listening = True
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
        session.call_before_finalize(_before_finalize)
        atexit.register(_finish_at_exit)  # after session's own, so it is called before


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    known = _trained_by.get(optimizer)
    if known is None or known[0] != (_generation, count):
        owners = [weakref.ref(model) for model in _all() if _trains(optimizer, model)]
        known = _trained_by[optimizer] = ((_generation, count), owners)
    for owner in known[1]:
        if (model := owner()) is not None and model._virtual is not None:
            model._virtual.check_complete("an optimizer steps")
        if model is not None and model._across is not None:
            model._across.check_optimizer(optimizer)
        elif model is not None:
            if torch._C._current_graph_task_id() >= 0:
                _check_averaged(optimizer, model)
            elif model._reducer.is_incomplete:
                raise_if_incomplete(model)
            if model._reducer.wants_optimizer:
                model._reducer.optimizer_steps()
        if model is not None:
            not_finite.check(model, optimizer)
            model._observer.before_step(optimizer)
        if (
            model is not None
            and model._across is None
            and model._reducer.is_recorded
            and torch._C._current_graph_task_id() < 0  # else it is a part of backward
        ):
            model._step_facts.optimizer_begins()
    models = [model for owner in known[1] if (model := owner()) is not None]
    local_notes.before_step(optimizer, models, _all)


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for owner in _trained_by[optimizer][1] if optimizer in _trained_by else ():
        model = owner()
        if model is not None:
            model._step_facts.optimizer_ends()
            if model._mistakes.is_on:
                model._observer.after_step(optimizer)


def _check_averaged(optimizer: torch.optim.Optimizer, model: Wrapped) -> None:
    """Raises if a hook on a parameter steps within backward, before its gradient is averaged.
    Communication hooks may: they step parameters whose gradients they have averaged."""
    if model._hook_runner is not None:
        return
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for number, parameter in enumerate(model._parameters_by_number):
        if id(parameter) in stepped and not model._reducer.is_averaged(number):
            raise Error(
                f"rank {model.group.rank}: an optimizer steps within backward, and its gradients "
                "are not averaged yet: ranks would drift apart. Step after backward, or attach it "
                "by torch.distributed.optim._apply_optimizer_in_backward before wrapping, which "
                "steps each bucket when it is averaged"
            )


def _trains(optimizer: torch.optim.Optimizer, model: Wrapped) -> bool:
    mine = _ids(model)
    return any(id(p) in mine for group in optimizer.param_groups for p in group["params"])


def _ids(model: Wrapped) -> set[int]:
    return {id(parameter) for parameter in model._parameters_by_number}


def _all() -> list[Wrapped]:
    with _models_lock:
        return list(_models)


def _before_finalize(communicator: Communicator) -> None:
    for model in _all():
        if model.group is communicator and model._across is not None:
            model._across.finish()
        if model.group is communicator and model._virtual is not None:
            model._virtual.check_complete("finalize() was called")
        if model.group is communicator:
            model._observer.before_finalize()
        if model.group is communicator and model._reducer.has_ended_incomplete:
            raise_if_incomplete(model)


def _finish_at_exit() -> None:
    """The last update of a schedule across steps, which a failure then names. Ranks that are
    threads would wait for each other here, and torch's groups may be gone."""
    for model in _all():
        if model._across is not None and session.closes_at_exit(model.group):
            with session.heard_at_exit():
                model._across.finish()


def raise_if_incomplete(model: Wrapped) -> None:
    """Raises if a backward was incomplete. The other ranks, which wait for its buckets, get the
    same error."""
    try:
        model._reducer.check_complete()
    except Error as problem:
        model.logger.set_error_and_log(str(problem))
        end_for_all(model.group, problem)
        raise
