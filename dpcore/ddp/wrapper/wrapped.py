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

from dpcore.comm.communicators.protocol import GradientGroup, capabilities_of

if TYPE_CHECKING:
    from dpcore import _C
    from dpcore.ddp.wrapper.delayed import DelayedGradients
    from dpcore.ddp.wrapper.model_group import ModelGroup


class Choices(Protocol):
    """What may be chosen by measurement, and what was: of ``FirstSteps``."""

    chooses_caps: bool
    schedule: Any  # as the program gave it, or the first one that is tried
    why: dict[str, str]  # of each choice, for the program's user
    cut: Any  # by which sizes were chosen
    measured_in_vain: int  # steps whose measurements were implausible

    def go_on(self, model: Wrapped) -> None:
        """All ranks call it before each synchronised forward, until the model is settled."""


class UpdatesAcrossSteps(Protocol):
    """Of ``AcrossSteps``: a schedule that goes on under the next forward."""

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises for one that steps parameters before their gradients are averages."""

    def finish(self) -> None:
        """Waits for what is in flight."""


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

    # Gradients.
    _reducer: _C.Reducer
    _delayed: DelayedGradients | None
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
    def _first_steps(self) -> Choices: ...
    @property
    def _across(self) -> UpdatesAcrossSteps | None: ...
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


def profiled_as(model: Wrapped, operation: str) -> str:
    """Of an operation in torch's profiler: "gloo:all_reduce" when that is the group that was asked
    for, whoever moves the bytes. Groups of torch tell the profiler themselves."""
    if not capabilities_of(model.group).silent_in_profiler:
        return ""
    return f"{model._profiled_backend}:{operation}"
