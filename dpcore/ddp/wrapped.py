"""What the parts of ``DataParallel`` may use of the model that they work for.

A part takes a ``Wrapped`` and never the class itself. An attribute that is not listed here belongs
to ``DataParallel`` alone; what only one part needs is kept by that part. Types that torch_face/
defines stand as ``Any``, since it comes after the parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

if TYPE_CHECKING:
    from dpcore import _C
    from dpcore.communicators.protocol import GradientGroup
    from dpcore.ddp.across_steps import AcrossSteps
    from dpcore.ddp.delayed import DelayedGradients
    from dpcore.ddp.first_steps import FirstSteps
    from dpcore.ddp.model_group import ModelGroup


class Wrapped(Protocol):
    """A model in ``DataParallel``, as its parts see it."""

    # What is trained, and where.
    module: nn.Module
    device: torch.device
    device_type: str
    is_multi_device_module: bool
    parameters_to_ignore: set[str]
    _module_parameters: list[nn.Parameter]  # all but the ignored ones
    _parameters_by_number: list[nn.Parameter]  # those whose gradients are averaged

    # With whom.
    group: GradientGroup
    _model_group: ModelGroup  # the group, with the model's tag on every operation
    _torch_group: Any  # the process group of torch behind it, or None
    _profiled_backend: str
    _has_default_group: bool

    # The arguments of the constructor.
    device_ids: list[int] | None
    output_device: int | None
    use_side_stream_for_tensor_copies: bool
    find_unused_parameters: bool
    gradient_as_bucket_view: bool
    static_graph: bool
    skip_all_reduce_unused_params: bool
    mixed_precision: Any
    forward_sync_buffers: bool
    bucket_bytes_cap: int
    _caps: list[int]
    _caps_are: str
    _deterministic: bool
    _schedule_is: str
    _first_steps: FirstSteps

    # Gradients.
    _reducer: _C.Reducer
    _delayed: DelayedGradients | None
    _across: AcrossSteps | None
    _hook_runner: Any
    _comm_hooks: list[tuple[Any, Any]]
    _first_bucket_sizes: str
    require_backward_grad_sync: bool
    require_forward_param_sync: bool
    _divide_by_initial_world_size: bool
    _join_scale: float
    _join_config: Any

    # Buffers.
    _futures_of_buffers: list[Any]
    _authoritative_rank: int

    # What is told of the model.
    logger: Any

    @property
    def backend(self) -> str: ...
    @property
    def schedule(self) -> str: ...

    def bucket_report(self) -> Any: ...
    def _raise(self, problem: Exception) -> None: ...
    def _buffers_by_name(self) -> Mapping[str, torch.Tensor]: ...
    def _syncs_buffers(self, before_forward: bool) -> bool: ...
    def _sync_module_buffers(self, authoritative_rank: int) -> None: ...
    def _rebuild_buckets(self) -> None: ...
    def _expect_gradients(self, output: Any, synchronised: bool) -> Any: ...
    def _join_group(self, comm: Any, process_group: Any, is_copy: bool = False) -> None: ...
    def _set_up(self, trained: Sequence[tuple[str, nn.Parameter]]) -> None: ...
