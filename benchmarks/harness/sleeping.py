"""Models whose layers sleep: they take time and no processor, so that on few cores many ranks can
compute at once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from dpcore.tools.compare.training.models import Step


class Nap(torch.autograd.Function):
    """Takes time and no processor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.seconds = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        time.sleep(ctx.seconds)
        return gradients[0], None, None


class SleepingLayer(nn.Module):
    """Needs its weights first, and has their gradient last."""

    def __init__(self, elements: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(elements))
        self.seconds = forward_s, backward_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = Nap.apply(x + self.weight.mean(), *self.seconds)  # type: ignore[no-untyped-call]
        return made


def layers(sizes: Sequence[int], forward_s: float, backward_s: float) -> tuple[nn.Module, Step]:
    made = [SleepingLayer(elements, forward_s, backward_s) for elements in sizes]
    return nn.Sequential(*made), lambda model: model(torch.ones(4)).sum()


def sleeping(forward_s: float = 0.008) -> tuple[nn.Module, Step]:
    """12 layers of 1.6 MB that sleep 8 ms in forward and 8 ms in backward."""
    return layers([390_000] * 12, forward_s, 0.008)


def sleeping_short() -> tuple[nn.Module, Step]:
    """4 ms in forward: at 1 Gbit/s, half of the communication takes longer than that."""
    return sleeping(0.004)


def sleeping_light() -> tuple[nn.Module, Step]:
    """12 layers of 0.39 MB that sleep 8 ms in forward and 8 ms in backward: for eight ranks on two
    cores, which an optimizer would keep busy else, and for slow links."""
    return layers([97_500] * 12, 0.008, 0.008)


RESNET18 = (
    9_408, *[36_864] * 4, 73_728, 147_456, 8_192, *[147_456] * 2, 294_912, 589_824, 32_768,
    *[589_824] * 2, 1_179_648, 2_359_296, 131_072, *[2_359_296] * 2, 513_000,
)  # fmt: skip


def resnet18_shapes() -> tuple[nn.Module, Step]:
    """The 21 weights of ResNet-18, 46.8 MB, each after 3 ms in forward and 6 ms in backward."""
    return layers(RESNET18, 0.003, 0.006)


SLEEPING = {
    "sleeping": sleeping, "sleeping_short": sleeping_short, "sleeping_light": sleeping_light,
    "resnet18_shapes": resnet18_shapes,
}  # fmt: skip
