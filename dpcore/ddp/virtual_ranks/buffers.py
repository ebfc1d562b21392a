"""Buffers of a model whose batch is cut into shards: all ranks leave a step with equal ones.

Each shard begins with the buffers that the step has begun with. Afterwards

* the running statistics of batch normalisation are those of a rank that has seen all shards, one
  after the other. What a shard adds to them follows from what it began and ended with, so ranks
  only exchange these.
* every other buffer is what the last shard has left.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from dpcore.comm.communicators.protocol import GradientGroup
from dpcore.ddp.wrapper.module_state import broadcast_values
from dpcore.errors import Unsupported


class _Kept:
    """A buffer, and its value at the start of the step."""

    def __init__(self, part: nn.Module, name: str, full_name: str) -> None:
        self._part, self._name, self.full_name = part, name, full_name
        # Kernels of normalisation write running statistics past the counter of versions.
        self._is_counted = not isinstance(part, nn.modules.batchnorm._NormBase)
        self.tensor = torch.empty(0)
        self._value, self._version = self.tensor, -1

    def _now(self) -> Any:
        return getattr(self._part, self._name, None)

    @property
    def _is_unchanged(self) -> bool:
        if self._now() is not self.tensor or self._version != self.tensor._version:
            return False
        return self._is_counted or torch.equal(self.tensor, self._value)

    def take(self) -> None:
        if not self._is_unchanged:
            self.tensor = self._now()
            self._value, self._version = self.tensor.detach().clone(), self.tensor._version

    def restore(self) -> torch.Tensor | None:
        """Returns the value that it had until now, if that is another one."""
        if self._is_unchanged:
            return None
        value = self._now()
        if not isinstance(value, torch.Tensor) or value.shape != self._value.shape:
            raise Unsupported(
                f"virtual_ranks: the buffer {self.full_name} was removed or changed its size in a "
                "shard; do that before the loop over shards"
            )
        value = value.detach().clone()
        setattr(self._part, self._name, self.tensor)
        self.put(self._value)
        self._version = self.tensor._version
        return value

    def put(self, value: torch.Tensor) -> None:
        self.tensor.copy_(value)

    def has_come(self) -> None:
        """Another value was received, which counts as no version."""
        self._version = -1


class Buffers:
    """Those of one module."""

    def __init__(self, module: nn.Module, ignored: Collection[str]) -> None:
        self._norms: list[Any] = []  # modules of batch normalisation with running statistics
        self._of_norms: list[_Kept] = []
        self._others: list[_Kept] = []
        seen: set[int] = set()
        for prefix, part in module.named_modules():
            kept = []
            for name, buffer in part.named_buffers(recurse=False):
                full = f"{prefix}.{name}" if prefix else name
                if buffer.numel() and id(buffer) not in seen and full not in ignored:
                    seen.add(id(buffer))
                    kept.append(_Kept(part, name, full))
            is_norm = isinstance(part, nn.modules.batchnorm._BatchNorm) and len(kept) == 3
            (self._of_norms if is_norm else self._others).extend(kept)
            if is_norm:
                self._norms.append(part)
        self._left: dict[int, torch.Tensor] = {}  # by other buffers: what the last shard has left
        self.length = len(self._statistics())
        self.flags = len(self._others)

    def _statistics(self) -> torch.Tensor:
        """Means and variances of all modules, then the batches that each has counted."""
        norms = self._norms
        running = [
            t for one in norms for t in (one.running_mean.flatten(), one.running_var.flatten())
        ]
        counts = [one.num_batches_tracked.view(1) for one in norms]
        return torch.cat([tensor.double() for tensor in (*running, *counts)] or [torch.empty(0)])

    def begin_step(self) -> None:
        for kept in (*self._of_norms, *self._others):
            kept.take()

    def end_shard(self, has_run: bool) -> torch.Tensor:
        """Goes back to the start of the step. Returns the statistics that the shard has left."""
        statistics = self._statistics()
        for kept in self._of_norms:
            kept.restore()
        left = {number: kept.restore() for number, kept in enumerate(self._others)}
        if has_run:
            self._left = {number: value for number, value in left.items() if value is not None}
        return statistics

    def changed(self) -> torch.Tensor:
        """Which of the other buffers the last shard of this rank has changed."""
        flags = torch.zeros(self.flags, dtype=torch.float64)
        flags[list(self._left)] = 1
        return flags

    def end_step(
        self,
        group: GradientGroup,
        statistics: Sequence[torch.Tensor],
        changed: torch.Tensor,
        last: int,
    ) -> None:
        """``statistics``: of all shards, in order. ``changed``: on rank ``last``, which had the
        last shard."""
        if self._norms:
            self._apply(statistics)
        numbers = changed.nonzero().flatten().tolist()
        if group.rank == last:
            for number in numbers:
                self._others[number].put(self._left[number])
        if numbers and group.world_size > 1:
            broadcast_values(group, [self._others[number].tensor for number in numbers], last)
        for number in numbers:
            self._others[number].has_come()
        self._left = {}

    def _apply(self, statistics: Sequence[torch.Tensor]) -> None:
        widths = torch.tensor([2 * one.running_mean.numel() for one in self._norms])
        momenta = [one.momentum for one in self._norms]
        found = after_shards(self._statistics(), widths, momenta, statistics)
        means, counts = found[: -len(self._norms)], found[-len(self._norms) :]
        for norm, both, count in zip(
            self._norms, torch.split(means, widths.tolist()), counts, strict=True
        ):
            mean, variance = both.chunk(2)
            norm.running_mean.copy_(mean.view_as(norm.running_mean))
            norm.running_var.copy_(variance.view_as(norm.running_var))
            norm.num_batches_tracked.copy_(count)


def after_shards(
    start: torch.Tensor,
    widths: torch.Tensor,
    momenta: Sequence[float | None],
    shards: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Running statistics after all shards, from what each has left when it began with ``start``.
    Of each module ``widths`` numbers, then their counts.

    An exponential average that was ``r`` is ``a r + x`` after a shard, with ``a`` the momentum's
    complement to the power of the shard's batches. So ``x`` is ``left - a start``. The average over
    all batches (momentum None) has ``a = n / (n + batches)``, and ``x`` weighs the less the more
    batches were before.

    >>> start = torch.tensor([10.0, 0.0], dtype=torch.float64)  # one number, no batches yet
    >>> shards = [torch.tensor([left, 1.0], dtype=torch.float64) for left in (11.0, 12.0)]
    >>> after_shards(start, torch.tensor([1]), [0.5], shards).tolist()
    [12.5, 2.0]
    """
    modules = len(widths)
    begin, counts = start[:-modules], start[-modules:]
    averages_all = torch.tensor([momentum is None for momentum in momenta])
    complements = torch.tensor([1 - (momentum or 0.0) for momentum in momenta], dtype=torch.float64)
    running, so_far = begin.clone(), counts.clone()
    for left in shards:
        batches = left[-modules:] - counts
        decay = complements**batches
        of_all = (counts + batches).clamp(min=1)
        now = (so_far + batches).clamp(min=1)
        counted = averages_all & (batches > 0)
        of_start = torch.where(counted, counts / of_all, decay)
        of_running = torch.where(counted, so_far / now, decay)
        weight = torch.where(counted, of_all / now, torch.ones_like(decay))
        own = left[:-modules] - of_start.repeat_interleave(widths) * begin
        running = of_running.repeat_interleave(widths) * running
        running += weight.repeat_interleave(widths) * own
        so_far += batches
    return torch.cat([running, so_far])
