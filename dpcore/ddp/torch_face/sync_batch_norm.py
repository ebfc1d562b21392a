"""Batch normalisation over all ranks' batches where torch has none: on the CPU, which torch
refuses, and on GPUs without torch.distributed, where torch would silently normalise each rank
separately.

The mean, spread and count of all ranks are combined into those of the whole batch, so ranks may
have batches of different sizes, even empty ones. This takes one all-gather in forward and one
all-reduce in backward, of two numbers per channel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from dpcore.comm.communicators.protocol import GradientGroup
from dpcore.comm.communicators.torch_group import TorchCommunicator


class _OverRanks(torch.autograd.Function):
    """Normalises with the statistics of all ranks, and also returns these."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        group: GradientGroup,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        wide = x.double() if x.dtype == torch.float64 else x.float()
        channels = x.shape[1]
        rows = wide.transpose(0, 1).reshape(channels, -1)
        count = rows.shape[1]
        mean = rows.mean(1) if count else rows.new_zeros(channels)
        spread = (rows - mean.unsqueeze(1)).square().sum(1)
        mine = torch.cat([mean, spread, mean.new_full((1,), count)])
        gathered = mine.new_empty(group.world_size * mine.numel())
        group.all_gather(gathered, mine)
        means, spreads, counts = torch.split(
            gathered.view(group.world_size, -1), [channels, channels, 1], dim=1
        )
        total = counts.sum()
        mean = (counts * means).sum(0) / total
        spread = (spreads + counts * (means - mean).square()).sum(0)
        inverse = (spread / total + eps).rsqrt()
        shape = [1, channels] + [1] * (x.dim() - 2)
        normal = (wide - mean.view(shape)) * inverse.view(shape)
        ctx.save_for_backward(normal, weight, inverse, total)
        ctx.group, ctx.dtype = group, x.dtype
        out = normal if weight is None else normal * weight.view(shape)
        out = out if bias is None else out + bias.view(shape)
        ctx.mark_non_differentiable(mean, spread, total)
        return out.to(x.dtype), mean, spread, total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> Any:
        normal, weight, inverse, total = ctx.saved_tensors
        channels = normal.shape[1]
        shape = [1, channels] + [1] * (normal.dim() - 2)
        own = [0, *range(2, normal.dim())]
        gradient = gradient.to(normal.dtype)
        by_bias = gradient.sum(own)
        by_weight = (gradient * normal).sum(own)
        sums = torch.cat([by_bias, by_weight])
        ctx.group.all_reduce(sums, "sum", async_op=False)
        mean_gradient, mean_product = (sums / total).split(channels)
        by_input = gradient - mean_gradient.view(shape) - normal * mean_product.view(shape)
        scale = inverse if weight is None else inverse * weight
        by_input = (by_input * scale.view(shape)).to(ctx.dtype)
        if weight is None:
            return by_input, None, None, None, None
        by_shift = by_bias.to(weight.dtype) if ctx.needs_input_grad[2] else None
        return by_input, by_weight.to(weight.dtype), by_shift, None, None


class SyncBatchNorm(nn.SyncBatchNorm):
    """Replaces ``torch.nn.SyncBatchNorm`` in a DataParallel where torch's does not work."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        group: GradientGroup | None = vars(self).get("_group")
        by_batch = self.training or self.running_mean is None
        self._check_input_dim(input)
        if not self.training or group is None or group.world_size == 1:
            return self._alone(input, by_batch)
        out, mean, spread, total = _OverRanks.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.eps, group
        )
        if self.track_running_stats and self.running_mean is not None:
            self._follow(mean, spread / (total - 1))
        return out  # type: ignore[no-any-return]

    def _alone(self, input: torch.Tensor, by_batch: bool) -> torch.Tensor:
        tracked = self.training and self.track_running_stats
        factor = self._factor() if tracked else 0.0
        keeps = not self.training or self.track_running_stats
        return functional.batch_norm(
            input,
            self.running_mean if keeps else None,
            self.running_var if keeps else None,
            self.weight,
            self.bias,
            by_batch,
            factor,
            self.eps,
        )

    def _factor(self) -> float:
        """The weight of the newest batch in the running statistics. Counts the batch."""
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                return 1.0 / float(self.num_batches_tracked)
        return self.momentum or 0.0

    @torch.no_grad()
    def _follow(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        factor = self._factor()
        for running, now in ((self.running_mean, mean), (self.running_var, variance)):
            assert running is not None
            running.lerp_(now.to(running.dtype), factor)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_group"}


def torch_can(device_type: str, torch_group: Any) -> bool:
    """Whether torch's own layers normalise over all ranks of the model."""
    return device_type != "cpu" and torch_group is not None


def take_over(module: nn.Module, group: GradientGroup) -> None:
    """Replaces torch's layers in the module by ours."""
    for layer in module.modules():
        if isinstance(layer, nn.SyncBatchNorm):
            if type(layer) is nn.SyncBatchNorm:
                layer.__class__ = SyncBatchNorm
            own = layer.process_group
            vars(layer)["_group"] = group if own is None else TorchCommunicator(own)
