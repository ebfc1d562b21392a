"""The noise scale of LocalSGD and DiLoCo, from the change of each rank's parameters between two
syncs, and the mean of these changes.

With plain SGD a change is the learning rate times the sum of the gradients of these steps, so its
noise is that of gradients, as long as the parameters have not moved far. With another optimizer it
is the noise of that one's updates.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch

from dpcore.ddp.local_updates.block import LocalUpdates
from dpcore.ddp.noise_scale.estimate import (
    BATCH_UNKNOWN,
    Exchange,
    GradientNoiseScale,
    Square,
    variance_of_mean,
)


class OfLocalUpdates(GradientNoiseScale):
    """Of the block of a ``dpcore.LocalSGD`` or ``dpcore.DiLoCo``, one of ``every`` syncs."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._batches: list[int] = []  # of an interval
        self._intervals = self._landed = 0
        self._own = self._mean = 0.0
        self._measured: deque[Exchange] = deque()

    def _refused(self) -> str:
        local: LocalUpdates = self._model
        if local._model_group.world_size == 1:
            return "in a world of one there is one update, and two are needed"
        if getattr(local, "fragment_sync_delay", 0):
            return (
                "with fragment_sync_delay a rank drops the steps that it makes while a fragment "
                "travels; measure without"
            )
        return ""

    def _begin(self) -> Any:
        self._intervals = 0
        self.restarted()
        self._model._observe(self)
        return self._model.module.register_forward_pre_hook(self._before_forward, with_kwargs=True)

    def _stop(self) -> None:
        if self._hook is not None:
            self._model._observe(None)
        super()._stop()

    def _before_forward(self, module: Any, inputs: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        samples = self._samples(inputs, kwargs)
        if samples == 0:
            self._give_up(BATCH_UNKNOWN)
            return
        self._batches.append(samples)

    # ---- see block.Observer ------------------------------------------------------------------

    def restarted(self) -> None:
        self._own, self._mean, self._landed, self._batches = 0.0, 0.0, 0, []

    def sent(self, change: torch.Tensor) -> None:
        self._own += _square(change)

    def landed(self, mean: torch.Tensor) -> None:
        self._mean += _square(mean)
        self._landed += 1
        if self._landed == len(self._model._fragments):
            self._interval_ended()

    def _interval_ended(self) -> None:
        own, mean, batches = self._own, self._mean, self._batches
        self.restarted()
        self._intervals += 1
        if (self._intervals - 1) % self._every or not batches:
            return
        local: LocalUpdates = self._model
        variance = variance_of_mean(batches)
        both = torch.tensor([own, variance], dtype=torch.float64, device=local._flat.device)
        work = local._model_group.all_reduce(
            both, "mean", async_op=True, content=local._content("gradient noise")
        )
        self._measured.append(Exchange(work, both, mean))

    def _new(self) -> Iterable[tuple[Square, Square]]:
        while self._measured:
            yield self._measured.popleft().squares(self._model._model_group.world_size)


def _square(change: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(change, dtype=torch.float64)) ** 2
