"""A step that is recorded now and done later, a few parameters at a time; and what both kinds of
steps have in common: an optimizer, its face, and the model that it steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from dpcore.errors import Error, Unsupported

if TYPE_CHECKING:
    from dpcore.ddp.wrapper.wrapped import Wrapped

Groups = list[dict[str, Any]]


class StepsOfModel:
    """Owned by the model and by its ``DistributedOptimizer``, and owns neither."""

    def __init__(self, face: Any, model: Wrapped) -> None:
        self._face, self._of_model = weakref.ref(face), weakref.ref(model)
        self._reducer, self._parameters = model._reducer, model._parameters_by_number
        self._optimizer: torch.optim.Optimizer = face.optimizer

    @property
    def _model(self) -> Wrapped:
        model = self._of_model()
        if model is None:
            raise Error(
                "DistributedOptimizer: the DataParallel model whose parameters it steps has been "
                "deleted; keep a reference to the model as long as the optimizer is used"
            )
        return model

    def finish(self) -> None:
        """Finishes a recorded step."""
        self._reducer.flush()

    def inner_has_loaded(self) -> None:
        """The program has called ``load_state_dict()`` of the optimizer inside."""

    def recorded_gradient(self, number: int) -> torch.Tensor | None:
        """See ``Steps``."""
        return None

    def is_in_use(self) -> bool:
        """See ``Steps``."""
        return self._face() is not None

    def is_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """See ``Steps``."""
        return optimizer is self._face() or optimizer is self._optimizer


def hyperparameters_of(optimizer: Optimizer) -> Groups:
    """The current hyperparameters of each parameter group. They are copied, because a scheduler may
    change them before they are used."""
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
    """Steps the given parameters of each group, with the recorded hyperparameters."""
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
                    "param_groups, which would be lost: step() is called several times, each time "
                    "for a few parameters and with a copy of the groups. Keep it in the state of "
                    "each parameter, or use schedule='bucketed' with the plain optimizer"
                )


def _is_changed(before: Any, after: Any) -> bool:
    if isinstance(after, torch.Tensor):
        return after is not before or after._version > 0  # it was cloned to be recorded
    return after is not before and bool(after != before)
