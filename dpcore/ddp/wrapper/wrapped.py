"""``Wrapped``: the attributes of a ``DataParallel`` that its parts may use.

A part takes a ``Wrapped`` and never the class itself. Attributes that are not listed here are
private to ``DataParallel``; state that only one part needs is in that part. Types of torch_face/
are ``Any`` here, since that folder imports this one.
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
    from dpcore.recorder.step_facts import StepFacts


class Choices(Protocol):
    """The view that parts have of ``FirstSteps``."""

    chooses_caps: bool
    schedule: Any  # as the program gave it, or the first one that is tried
    why: dict[str, str]  # the reason for each choice, shown to the user
    cut: Any  # the measurements by which sizes were chosen
    measured_in_vain: int  # steps whose measurements were implausible

    def were_compiling(self, model: Wrapped) -> bool:
        """Whether dynamo has compiled a graph of the model in the last step, on this rank."""

    def go_on(self, model: Wrapped) -> None:
        """All ranks call it before each synchronised forward, until the model is settled."""


class UpdatesAcrossSteps(Protocol):
    """The view that parts have of ``AcrossSteps``, if the schedule ends under the next forward."""

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises for an optimizer that would step parameters before their averages are there."""

    def finish(self) -> None:
        """Finishes the phases in flight."""


class Shards(Protocol):
    """The view that parts have of ``VirtualRanks``, if the batch is cut into shards."""

    def check_complete(self, what: str) -> None:
        """Raises if the last loop over shards was left before its end."""


class Wrapped(Protocol):
    """A ``DataParallel`` as its parts see it."""

    # The module and its parameters.
    module: nn.Module
    device: torch.device
    device_type: str
    is_multi_device_module: bool
    parameters_to_ignore: set[str]
    _module_parameters: list[nn.Parameter]  # all but the ignored ones
    _parameters_by_number: list[nn.Parameter]  # those whose gradients are averaged

    # The ranks.
    group: GradientGroup
    _model_group: ModelGroup  # the group, with the model's tag on every operation
    _torch_group: Any  # the process group of torch behind it, or None
    _profiled_backend: str
    _has_default_group: bool

    _graphs: Any  # what dynamo has compiled of the model: compiled/tracing.py
    _is_seen_by_dynamo: bool

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
    _weight: float | None
    virtual_ranks: int | None

    # Buffers.
    _futures_of_buffers: list[Any]
    _authoritative_rank: int

    # Reports.
    logger: Any
    _mistakes: Any  # Reports and Observer of mistakes/
    _observer: Any
    _step_facts: StepFacts

    @property
    def _first_steps(self) -> Choices: ...
    @property
    def _virtual(self) -> Shards | None: ...
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
    """The name of an operation in torch's profiler, such as "gloo:all_reduce": by the requested
    group, even if dpcore moves the bytes. "" for torch's groups, which report their operations."""
    if not capabilities_of(model.group).silent_in_profiler:
        return ""
    return f"{model._profiled_backend}:{operation}"
