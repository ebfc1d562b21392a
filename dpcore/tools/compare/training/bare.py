"""What steps are measured against: communication with nothing beside it, and the last gradient."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dpcore.tools.compare.training.clock import Clock

BY_TORCH, BY_DPCORE = "all_reduce torch", "all_reduce dpcore"
_BUCKET_BYTES = 25 << 20  # as both wrappers cut gradients without an argument


def on_gradient(parameter: nn.Parameter, told: Callable[[torch.Tensor], None]) -> Any:
    return parameter.register_post_accumulate_grad_hook(told)  # type: ignore[no-untyped-call]


class Bare:
    """A turn of its own: all gradients averaged, while nothing is computed."""

    unused: tuple[str, ...] = ()
    taken = sys.maxsize  # it learns nothing, so its number of steps does not matter

    def __init__(self, name: str, nbytes: int, comm: Any, device: torch.device) -> None:
        self.name, self.gradient_bytes = name, nbytes
        self._comm = comm
        elements, most = nbytes // 4, _BUCKET_BYTES // 4
        sizes = [min(most, elements - at) for at in range(0, elements, most)]
        self._by_torch = name == BY_TORCH
        self._buckets = [
            torch.zeros(size, device=device) if self._by_torch else comm.empty(size).zero_()
            for size in sizes
        ]

    @staticmethod
    def is_one(name: str) -> bool:
        return name in (BY_TORCH, BY_DPCORE)

    def step(self) -> float:
        works: list[Any]
        if self._by_torch:
            works = [dist.all_reduce(bucket, async_op=True) for bucket in self._buckets]
        else:
            works = [self._comm.all_reduce(b, "mean", async_op=True) for b in self._buckets]
        for work in works:
            work.wait()
        return 0.0

    def settle(self) -> None:
        """Nothing to settle."""

    def finish(self) -> None:
        """Nothing is in flight."""

    def close(self) -> None:
        """Nothing to leave."""

    def choice(self) -> None:
        """Nothing is chosen."""

    def last_gradient(self) -> None:
        """No gradient comes."""

    @property
    def uncounted_bytes(self) -> int:
        return 0


class LastGradient:
    """When the last gradient of a step was there. Hooks on all parameters find out in the warm-up
    which comes last; then one hook is left, so that all contenders pay for one call. They are made
    before a wrapper makes its own, and so run before it sends anything."""

    def __init__(self, module: nn.Module, clock: Clock) -> None:
        self._mark = clock.mark
        self._at: Any = None
        self._last: Any = None
        self._hooks = {
            parameter: on_gradient(parameter, self._seen)
            for parameter in module.parameters()
            if parameter.requires_grad
        }

    def settle(self) -> None:
        for parameter, hook in self._hooks.items():
            if parameter is not self._last:
                hook.remove()

    def taken(self) -> Any:
        """The clock's mark, once per step; None where the parameter that came last in the warm-up
        has got no gradient in it."""
        at, self._at = self._at, None
        return at

    def _seen(self, parameter: torch.Tensor) -> None:
        self._last = parameter
        self._at = self._mark()
