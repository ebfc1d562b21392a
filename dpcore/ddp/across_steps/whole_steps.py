"""Steps under "priority" and "dear": every rank has the whole averages, and steps a bucket when the
forward of a module needs it.

A recorded step keeps its gradients. If the program changes ``parameter.grad`` between ``step()``
and the update, for example by ``zero_grad()``, that affects only the next step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from dpcore.ddp.across_steps.deferred_step import (
    Groups,
    StepsOfModel,
    hyperparameters_of,
    step_with,
)
from dpcore.ddp.across_steps.kinds import is_element_wise
from dpcore.ddp.across_steps.layout import BucketLayout, layouts_of
from dpcore.ddp.across_steps.saved import check_whole
from dpcore.ddp.wrapper.in_flight import GradientInFlight
from dpcore.errors import Error

if TYPE_CHECKING:
    from dpcore.ddp.wrapper.wrapped import Wrapped


class WholeSteps(StepsOfModel):
    """The steps of one ``DistributedOptimizer`` and its model. See ``across_steps.Steps``."""

    def __init__(self, face: Any, model: Wrapped) -> None:
        super().__init__(face, model)
        numbers = {id(p): n for n, p in enumerate(model._parameters_by_number)}
        group_of = {}
        self._elsewhere: list[list[torch.Tensor]] = []  # parameters in no bucket, by group
        for at, group in enumerate(face.optimizer.param_groups):
            self._elsewhere.append([p for p in group["params"] if id(p) not in numbers])
            group_of.update({numbers[id(p)]: at for p in group["params"] if id(p) in numbers})
        self._group_of = group_of
        self._layouts: list[BucketLayout] = []
        self._recorded: Groups = []
        self._gradients: dict[int, torch.Tensor | None] = {}

    def buckets_are_cut(self) -> None:
        """See ``Steps``."""
        self._layouts = layouts_of(self._reducer)

    def before_forward(self) -> None:
        """See ``Steps``. Parameters may lie anywhere."""

    def after_forward(self, output: Any) -> None:
        """See ``Steps``. Gradients may stay: their sum with new ones is averaged again."""

    def step(self) -> None:
        """Records the step. If nothing is in flight, the optimizer steps at once."""
        self._reducer.flush()  # finishes a previous step that no forward followed
        self._recorded = hyperparameters_of(self._optimizer)
        self._gradients = self._gradients_now()
        step_with(self._optimizer, self._recorded, self._elsewhere.__getitem__)
        if not self._reducer.update_steps():
            self._step(sorted(self._group_of))

    def _gradients_now(self) -> dict[int, torch.Tensor | None]:
        """Gradients by number. For one in flight, its view of the bucket."""
        found = {number: self._parameters[number].grad for number in self._group_of}
        for bucket, layout in enumerate(self._layouts):
            parts = layout.views(self._reducer.flat_of(bucket))
            for number, part in zip(layout.numbers, parts, strict=True):
                if isinstance(self._parameters[number].grad, GradientInFlight):
                    found[number] = part
        return found

    def update(self, buckets: list[int]) -> None:
        """See ``Steps``."""
        self._step([n for bucket in buckets for n in self._layouts[bucket].numbers])

    def _step(self, numbers: list[int]) -> None:
        mine = [n for n in numbers if n in self._group_of]
        now = [self._parameters[n].grad for n in mine]
        try:
            for n in mine:
                self._parameters[n].grad = self._gradients[n]
        except RuntimeError as error:
            raise Error(
                "parameters were converted while a step of their optimizer was still to be done; "
                "call flush() of the wrapped model before you convert it, and refresh() after that"
            ) from error
        by_group: list[list[torch.Tensor]] = [[] for _ in self._recorded]
        for n in mine:
            by_group[self._group_of[n]].append(self._parameters[n])
        try:
            step_with(self._optimizer, self._recorded, by_group.__getitem__)
        finally:
            for n, gradient in zip(mine, now, strict=True):
                self._parameters[n].grad = gradient

    def keep_gradients(self) -> None:
        """Finishes the recorded step before its gradients are overwritten."""
        self._reducer.flush()

    def clip(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """See ``DistributedOptimizer.clip_grad_norm_``."""
        parameters = [self._parameters[n] for n in sorted(self._group_of)]
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def recorded_gradient(self, number: int) -> torch.Tensor | None:
        """See ``Steps``."""
        return self._gradients.get(number)

    def full_gradients(self) -> dict[int, torch.Tensor]:
        """See ``Steps``."""
        self._reducer.wait_for_gradients()
        named = enumerate(self._parameters)
        return {n: p.grad.clone() for n, p in named if p.grad is not None}

    def state_dict(self) -> dict[str, Any]:
        """See ``DistributedOptimizer``."""
        self._reducer.flush()
        state: dict[str, Any] = self._optimizer.state_dict()
        return state

    full_state_dict = state_dict

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See ``DistributedOptimizer``."""
        self._reducer.flush()
        self._optimizer.load_state_dict(dict(state_dict))
        if is_element_wise(self._optimizer):  # others may have state of any shape
            check_whole(self._optimizer)
