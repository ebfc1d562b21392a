"""``with model.join():`` lets ranks have different numbers of inputs, by torch's join context.

A rank that has run out of inputs joins the others' communication: it follows their forward, and
sends zeros in their backward. Before each synchronised forward one small all-reduce, besides
torch's own, counts the ranks that still have inputs.

All ranks communicate in the same order: torch's count of ranks, buffers, our count, new buckets,
gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.algorithms.join import Join, JoinHook

from dpcore.ddp.torch_face.process_group import GroupForTorch
from dpcore.ddp.wrapper.module_state import broadcast_values

if TYPE_CHECKING:
    from dpcore.ddp.wrapper.wrapped import Wrapped


class JoinOverGroup(Join):
    """torch's join context, which also accepts a group that torch.distributed does not know."""

    def __enter__(self) -> None:
        self._set_joinable_configs()  # the end of a previous block switched them off

    def _extract_dist_info(self) -> None:
        groups = [joinable.join_process_group for joinable in self._joinables]
        if not isinstance(groups[0], GroupForTorch):
            super()._extract_dist_info()
            return
        if any(group is not groups[0] for group in groups):
            raise ValueError("Using join context manager with multiple process groups")
        self._process_group = groups[0]
        self._rank = groups[0].rank()
        self._device = self._joinables[0].join_device


class ModelJoin(JoinHook):
    """Takes part for a rank that has run out of inputs."""

    def __init__(self, model: Wrapped, divide_by_initial_world_size: bool) -> None:
        model.logger._set_uneven_input_join()
        model._divide_by_initial_world_size = divide_by_initial_world_size
        self.model = model

    def main_hook(self) -> None:
        """Follows one forward and backward of the other ranks."""
        model = self.model
        if model._syncs_buffers(before_forward=True):
            model._sync_module_buffers(common_rank(model, among_us=False))
        synchronised, active = count_active(model, is_active=False)
        model.require_forward_param_sync = synchronised
        if synchronised:
            take_part(model, active)
            model._first_steps.go_on(model)
            model._reducer.shadow_backward()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Broadcasts the values of a rank that had inputs to the end."""
        model = self.model
        _scale_averages(model, 1.0)
        model._join_config = model._join_config._replace(enable=False)  # torch leaves it on
        model._authoritative_rank = common_rank(model, among_us=is_last_joiner)
        buffers = list(model._buffers_by_name().values()) if model.forward_sync_buffers else []
        values = [*model._module_parameters, *buffers]
        broadcast_values(
            model._model_group, [v.detach() for v in values], model._authoritative_rank
        )


def begin_forward(model: Wrapped) -> int:
    """Tells the other ranks that this one has inputs. Returns the rank that sends its buffers."""
    Join.notify_join_context(model)  # type: ignore[arg-type]
    return common_rank(model, among_us=True) if model._syncs_buffers(before_forward=True) else 0


def count_active(model: Wrapped, is_active: bool) -> tuple[bool, int]:
    """(whether this backward is synchronised, how many ranks have inputs)."""
    synchronised = is_active and model.require_backward_grad_sync and torch.is_grad_enabled()
    facts = torch.tensor([int(synchronised), int(is_active)], device=model.device)
    model._model_group.all_reduce(facts, "sum", async_op=False)
    return bool(facts[0] > 0), int(facts[1])


def take_part(model: Wrapped, active: int) -> None:
    """Sets the divisor of averages: the ranks with inputs, or all."""
    all_ranks = model._divide_by_initial_world_size
    monitor = vars(model).get("_monitor")
    if monitor is not None and active == model.group.world_size:
        monitor._exchange_when_due(model._reducer.sums()[0])
    _scale_averages(model, 1.0 if all_ranks else model.group.world_size / active)


def _scale_averages(model: Wrapped, scale: float) -> None:
    model._reducer.set_scale(scale)
    model._join_scale = scale  # used for sparse gradients, which are in no bucket


def common_rank(model: Wrapped, among_us: bool) -> int:
    """The highest rank that passes ``among_us=True``."""
    candidate = torch.tensor([model.group.rank if among_us else -1], device=model.device)
    model._model_group.all_reduce(candidate, "max", async_op=False)
    return int(candidate)


def join_context(
    model: Wrapped, enable: bool, throw: bool, divide_by_initial_world_size: bool
) -> Any:
    return JoinOverGroup(
        [model],  # type: ignore[list-item]
        enable,
        throw,
        divide_by_initial_world_size=divide_by_initial_world_size,
    )
