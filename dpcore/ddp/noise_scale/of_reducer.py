"""The noise scale of a ``DataParallel``: the reducer reads each bucket before it is sent and when
its mean is there (csrc/reducer/bucket/gradient_norms.h).

Where a rank has only a part of each mean, as under "zero1", the ranks' parts are added with the
next measured step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from dpcore.ddp.noise_scale.estimate import (
    BATCH_UNKNOWN,
    OLD_GRADIENTS,
    GradientNoiseScale,
    Square,
    has_old_gradients,
    squared_norm,
    variance_of_mean,
)
from dpcore.ddp.wrapper.parameters import comes_sparse, trained_parameters


class OfReducer(GradientNoiseScale):
    """Of a ``dpcore.DataParallel``, under every schedule that averages."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._accumulated: list[int] = []  # the batches since the last averaged step
        self._first = math.nan  # the first batch's squared norm, in a world of one
        self._of_step: dict[int, tuple[int, Square | None]] = {}  # batches, and the first of them
        self._reducer: Any = None
        self._first_step: int | None = None  # within the block, as the reducer counts

    def _refused(self) -> str:
        return why_not(self._model)

    def _begin(self) -> Any:
        self._reducer, self._first_step = self._model._reducer, None
        return self._model.register_forward_pre_hook(self._before_forward, with_kwargs=True)

    def _before_forward(self, model: Any, inputs: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if model._join_config.enable:
            self._give_up(
                "within join(), ranks without inputs have no gradient of their own; measure "
                "before, or in whole epochs"
            )
            return
        samples = self._samples(inputs, kwargs)
        if samples == 0:
            self._give_up(BATCH_UNKNOWN)
            return
        before = self._accumulated
        alone = model.group.world_size == 1
        number, is_due = self._of_this_step(model._reducer)
        # Across steps they may be in flight, and the schedule itself finds out.
        looks = not before and model._across is None
        if looks and has_old_gradients(model._parameters_by_number):
            self._give_up(OLD_GRADIENTS)
            return
        if before and is_due and alone and len(before) == 1:
            self._first = squared_norm(model._parameters_by_number)
        if not model.require_backward_grad_sync:
            before.append(samples)
            return
        batches, self._accumulated = [*before, samples], []
        if alone and len(batches) == 1:
            self._give_up(
                "in a world of one, a step has one gradient, and two batch sizes are needed. "
                "Accumulate two or more batches a step with model.no_sync(), or train on several "
                "ranks"
            )
            return
        if is_due:
            first = Square(self._first, 1 / batches[0]) if alone else None
            self._of_step[number] = (len(batches), first)
            self._reducer.measure_norms(variance_of_mean(batches))

    def _of_this_step(self, reducer: Any) -> tuple[int, bool]:
        """The step's number, and whether it is measured. The first in the block is."""
        if reducer is not self._reducer:  # refresh() was called
            self._reducer, self._first_step, self._of_step = reducer, None, {}
        number: int = reducer.completed
        if self._first_step is None:
            self._first_step = number
        return number, (number - self._first_step) % self._every == 0

    def _new(self) -> Iterable[tuple[Square, Square]]:
        for number, own, variance, mean in self._reducer.take_norms() if self._reducer else ():
            if self._first_step is None or number < self._first_step:
                continue  # of a block before this one
            batches, first = self._of_step.pop(number, (1, None))
            for forgotten in [n for n in self._of_step if n < number]:
                del self._of_step[forgotten]
            if first is not None:  # the accumulated gradient is the sum over its batches
                yield first, Square(mean / batches**2, variance)
            else:
                yield Square(own, variance), Square(mean, variance / self._model.group.world_size)


def why_not(model: Any) -> str:
    """Why this model cannot be measured; "" if it can."""
    if not model._reducer.is_exact:
        return f"schedule='{model.schedule}' averages nothing"
    if model._delayed is not None:
        return (
            "gradients of delay_all_reduce_named_params are in no bucket; measure without that "
            "argument"
        )
    sparse = comes_sparse(model.module, model._parameters_by_number)
    if any(sparse):
        trained = trained_parameters(model.module, model.parameters_to_ignore)
        name = trained[list(sparse).index(True)][0]
        return (
            f"the gradient of {name} is sparse, and in no bucket; make the layer with sparse=False"
        )
    return ""
