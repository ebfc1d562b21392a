"""``DataParallel``: one model on several ranks, each with its own part of the batch.

    model = dpcore.DataParallel(model)
    for inputs, targets in loader:               # each rank reads different ones
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()  # afterwards every rank has the average gradient
        optimizer.step()

Here is what happens around forward. What happens during backward, without Python, is in
csrc/reducer; when it happens is decided by a schedule (csrc/reducer/launch_schedule.h).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dpcore import _C, trace_facts
from dpcore.bucket_report import BucketReport
from dpcore.communicator import Communicator
from dpcore.errors import Error, Unsupported
from dpcore.gradient_group import GradientGroup, choose_group
from dpcore.launch_schedule import LaunchSchedule
from dpcore.module_state import BufferSync, broadcast_values, check_same_model
from dpcore.sparse_gradients import average_sparse

_FIRST_BUCKET_MB = 1.0
_BUCKET_MB = 25.0


class DataParallel(nn.Module):
    """Wraps ``module`` so that backward leaves the gradients' average over all ranks in ``.grad``.

    Arguments with the names of ``torch.nn.parallel.DistributedDataParallel`` mean the same.

    ``process_group``   a group of torch, by default that of ``dpcore.init()``, else torch's own.
                        In the place of Gloo or MPI on one host, dpcore's communicator is used.
    ``comm``            a ``dpcore.Communicator`` or an mpi4py one, instead.
    ``bucket_cap_mb``   gradients travel together up to this size; by default 25 MiB, the first
                        bucket 1 MiB.
    ``broadcast_buffers``  rank 0's buffers (running means) everywhere before each forward.
    ``init_sync``       check that all ranks wrap the same model, and start from rank 0's values.
    ``find_unused_parameters``  when forward does not always use all parameters.
    ``gradient_as_bucket_view``  ``.grad`` is memory of the bucket, overwritten by the next
                        backward; False: a tensor of its own, for one more copy.
    ``schedule``        when buckets are sent: "bucketed", "sequential", "per_parameter", "flat",
                        "oracle", or a ``dpcore.LaunchSchedule`` of your own. "auto" is bucketed
                        where a processor is free for it, else sequential.
    ``deterministic``   only algorithms that add in rank order: the same bits for any bucket size.

    >>> import torch, dpcore
    >>> comm = dpcore.init(rank=0, world_size=1)
    >>> model = dpcore.DataParallel(torch.nn.Linear(2, 1))
    >>> model(torch.ones(3, 2)).sum().backward()
    >>> model.module.weight.grad
    tensor([[3., 3.]])
    >>> dpcore.finalize()
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = True,
        comm: Any = None,
        schedule: str | LaunchSchedule = "auto",
        deterministic: bool = False,
    ) -> None:
        super().__init__()
        trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        _check_parameters(trained)
        self.module = module
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self.group: GradientGroup = choose_group(comm, process_group, trained[0][1].device)
        if deterministic and not isinstance(self.group, Communicator):
            raise Unsupported(
                f"deterministic=True needs dpcore's communicator; in what order {self.backend} "
                "adds is not known. Pass comm=dpcore.init()"
            )
        buffers = [buffer for buffer in module.buffers() if buffer.numel() > 0]
        if init_sync:
            options = {
                "bucket_cap_mb": bucket_cap_mb,
                "find_unused_parameters": find_unused_parameters,
                "broadcast_buffers": broadcast_buffers,
            }
            check_same_model(self.group, trained, options)
            everything = [*module.parameters(), *buffers]
            broadcast_values(self.group, [tensor.detach() for tensor in everything])
        self._sync_buffers = BufferSync(self.group, buffers) if broadcast_buffers else None
        self._parameters_by_number = [parameter for _, parameter in trained]
        modules = _modules_with_parameters(module, self._parameters_by_number)
        self._reducer = _C.Reducer(
            self._parameters_by_number,
            [name for name, _ in trained],
            _comes_sparse(module, self._parameters_by_number),
            [numbers for _, numbers in modules],
            self.group._native if isinstance(self.group, Communicator) else self.group,
            _automatic(self.group) if schedule == "auto" else schedule,
            _caps(bucket_cap_mb),
            find_unused_parameters,
            gradient_as_bucket_view,
            deterministic,
            self._average_sparse,
        )
        self._listen([part for part, _ in modules])
        trace_facts.know(self)

    # ---- around forward ----------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward. What it does before: buffers; after: expects gradients."""
        reducer = self._reducer
        learning = torch.is_grad_enabled()
        synchronised = learning and self.require_backward_grad_sync
        if learning:
            reducer.begin_forward()
        if synchronised and reducer.wants_rebuild:
            self._rebuild_buckets()
        if self._sync_buffers is not None and self.require_forward_param_sync:
            self._sync_buffers()
        begin = time.monotonic_ns() if reducer.is_recorded else 0
        output = self.module(*inputs, **kwargs)
        if begin:
            reducer.note_forward(begin)
            _call_when_backward_begins(output, reducer.backward_begins)
        if learning:
            needed = synchronised and self.find_unused_parameters
            reducer.end_forward(synchronised, list(_tensors_in(output)) if needed else ())
            self.require_forward_param_sync = synchronised
        return output

    def _rebuild_buckets(self) -> None:
        """Buckets in the order in which gradients really came, on rank 0, for all."""
        device = self._parameters_by_number[0].device
        order = torch.tensor(self._reducer.arrival_order, device=device)
        self.group.broadcast(order, 0)
        self._reducer.rebuild(order.tolist())

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of forwards within are only added up on each rank. The next forward outside
        averages the sum.

        >>> with model.no_sync():                              # doctest: +SKIP
        ...     loss(model(first_half)).backward()
        >>> loss(model(second_half)).backward()                # doctest: +SKIP
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    # ---- what can be seen --------------------------------------------------------------------

    @property
    def backend(self) -> str:
        """Who moves the bytes: "native", "torch gloo", "mpi", ..."""
        return str(getattr(self.group, "backend", type(self.group).__name__))

    @property
    def schedule(self) -> str:
        """The name of the schedule of launches."""
        return self._reducer.schedule

    @property
    def is_exact(self) -> bool:
        """False when the schedule leaves out communication, for bounds: results are wrong then."""
        return self._reducer.is_exact

    def stats(self) -> dict[str, Any]:
        """Counters of the communicator, see ``Communicator.stats``; of others only their name."""
        counters = self.group.stats() if isinstance(self.group, Communicator) else {}
        return {"backend": self.backend, "schedule": self.schedule, **counters}

    def bucket_report(self) -> BucketReport:
        """Which gradients travel together, and when the last backward had, sent and received
        each bucket."""
        return BucketReport(self._reducer.report(), self.schedule, self._reducer.has_rebuilt)

    # ---- parts -------------------------------------------------------------------------------

    def _average_sparse(self, which: Sequence[int]) -> None:
        for number in which:
            average_sparse(self.group, self._parameters_by_number[number])

    def _listen(self, modules: Sequence[nn.Module]) -> None:
        """Passes on the events outside of backward, when the schedule wants them."""
        me = weakref.ref(self)
        if self._reducer.wants_forward:
            for number, module in enumerate(modules):

                def begins(*_: Any, number: int = number) -> None:
                    if (model := me()) is not None:
                        model._reducer.forward_of_module_begins(number)

                module.register_forward_pre_hook(begins)
        if self._reducer.wants_optimizer:

            def steps(optimizer: torch.optim.Optimizer, *_: Any) -> None:
                model = me()
                if model is not None and model._is_trained_by(optimizer):
                    model._reducer.optimizer_steps()

            handle = register_optimizer_step_pre_hook(steps)
            weakref.finalize(self, handle.remove)

    def _is_trained_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """The event comes for every optimizer of the process."""
        mine = {id(parameter) for parameter in self._parameters_by_number}
        return any(id(p) in mine for group in optimizer.param_groups for p in group["params"])


def _automatic(group: GradientGroup) -> str:
    """Communication in the background of backward needs a processor. When each rank computes with
    one thread and there is a rank for every processor, it would only take turns with backward, and
    doing it at the end, on the thread that waits anyway, costs less (docs/decisions/0011)."""
    processors = len(os.sched_getaffinity(0))
    busy = torch.get_num_threads() == 1 and group.world_size >= processors
    return "sequential" if busy and isinstance(group, Communicator) else "bucketed"


def _call_when_backward_begins(output: Any, call: Callable[[], None]) -> None:
    """For traces: the gradient of an output is the first thing that backward computes."""

    def begins(_: torch.Tensor) -> None:
        call()

    for tensor in _tensors_in(output):
        if tensor.requires_grad:
            tensor.register_hook(begins)  # type: ignore[no-untyped-call]
            return


def _check_parameters(trained: Sequence[tuple[str, torch.Tensor]]) -> None:
    if not trained:
        raise Error("DataParallel: the module has no parameter that requires a gradient")
    for name, parameter in trained:
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise Error(
                f"DataParallel: {name} has no shape yet; run a forward of the module first, so "
                "that its lazy layers are made"
            )
    kinds = {parameter.device.type for _, parameter in trained}
    if len(kinds) > 1:
        raise Unsupported(f"DataParallel: parameters are on {sorted(kinds)}; one kind is needed")


def _caps(bucket_cap_mb: float | None) -> list[int]:
    sizes = [_FIRST_BUCKET_MB, _BUCKET_MB] if bucket_cap_mb is None else [bucket_cap_mb]
    return [int(size * 1024 * 1024) for size in sizes]


def _comes_sparse(module: nn.Module, parameters: Sequence[torch.Tensor]) -> list[bool]:
    sparse = {
        id(part.weight)
        for part in module.modules()
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse
    }
    return [id(parameter) in sparse for parameter in parameters]


def _modules_with_parameters(
    module: nn.Module, parameters: Sequence[torch.Tensor]
) -> list[tuple[nn.Module, list[int]]]:
    """Each module with trained parameters of its own, and their numbers."""
    number_of = {id(parameter): number for number, parameter in enumerate(parameters)}
    found = []
    for part in module.modules():
        own = [number_of[id(p)] for p in part.parameters(recurse=False) if id(p) in number_of]
        if own:
            found.append((part, own))
    return found


def _tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """All tensors of what a forward has returned."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors_in(value)
    elif isinstance(output, (list, tuple, set)):
        for value in output:
            yield from _tensors_in(value)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from _tensors_in(getattr(output, field.name))
