"""The noise scale of torch's DistributedDataParallel, by hooks on its parameters.

A hook runs when a gradient of this rank is whole, before the reducer reads it; what backward leaves
is the mean. In a measured step the ranks exchange two numbers at the end of backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from dpcore.ddp.noise_scale.estimate import (
    BATCH_UNKNOWN,
    OLD_GRADIENTS,
    Exchange,
    GradientNoiseScale,
    Square,
    has_old_gradients,
    squared_norm,
    variance_of_mean,
)
from dpcore.ddp.torch_face import dynamo
from dpcore.ddp.wrapper.outputs import at_end_of_this_backward


class OfTorch(GradientNoiseScale):
    """Of a ``torch.nn.parallel.DistributedDataParallel``."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._accumulated: list[int] = []
        self._number = 0  # of the averaged step in the block
        self._hooks: list[Any] = []
        self._own: list[torch.Tensor] = []
        self._variance = 0.0
        self._measured: deque[Exchange] = deque()

    def _refused(self) -> str:
        model = self._model
        if dist.get_world_size(model.process_group) == 1:
            return "in a world of one, a step has one gradient, and two batch sizes are needed"
        if hook := model._get_ddp_logging_data().get("comm_hook"):
            return f"the communication hook {hook} may leave something other than the mean"
        if any(p.grad is not None and p.grad.is_sparse for p in model.parameters()):
            return "a gradient is sparse; make the layer with sparse=False"
        return ""

    def _begin(self) -> Any:
        self._parameters = [p for p in self._model.module.parameters() if p.requires_grad]
        self._number = 0
        return self._model.register_forward_pre_hook(self._before_forward, with_kwargs=True)

    def _stop(self) -> None:
        super()._stop()
        self._unhook()

    @dynamo.left_alone
    def _before_forward(self, model: Any, inputs: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        samples = self._samples(inputs, kwargs)
        if samples == 0:
            self._give_up(BATCH_UNKNOWN)
            return
        if not self._accumulated and has_old_gradients(self._parameters):
            self._give_up(OLD_GRADIENTS)
            return
        self._accumulated.append(samples)
        if not model.require_backward_grad_sync:
            return
        batches, self._accumulated = self._accumulated, []
        self._unhook()  # no backward followed the last forward
        self._number += 1
        if (self._number - 1) % self._every == 0:
            self._variance, self._own = variance_of_mean(batches), []
            self._hooks = [
                p.register_post_accumulate_grad_hook(self._seen) for p in self._parameters
            ]

    def _seen(self, parameter: torch.Tensor) -> None:
        if not self._own:
            # Behind what DDP does at the end of backward, which it has announced by then.
            at_end_of_this_backward(lambda: at_end_of_this_backward(self._backward_ended))
        gradient = parameter.grad
        assert gradient is not None
        self._own.append(torch.linalg.vector_norm(gradient.detach(), dtype=torch.float64))

    def _backward_ended(self) -> None:
        self._unhook()
        own = torch.stack(self._own).square().sum()
        both = torch.stack([own, torch.full_like(own, self._variance)])
        mean = squared_norm(self._parameters)
        group = self._model.process_group
        both /= dist.get_world_size(group)
        self._measured.append(
            Exchange(dist.all_reduce(both, group=group, async_op=True), both, mean)
        )

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _new(self) -> Iterable[tuple[Square, Square]]:
        while self._measured:
            yield self._measured.popleft().squares(dist.get_world_size(self._model.process_group))
