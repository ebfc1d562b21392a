"""``DataParallel``: one model on several ranks, each with its own part of the batch.

    model = dpcore.DataParallel(model)
    for inputs, targets in loader:               # each rank reads different batches
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()  # afterwards every rank has the average gradient
        optimizer.step()

This file has the code around forward. Backward runs in C++, in csrc/reducer, and a schedule decides
when buckets are sent (csrc/reducer/launch/launch_schedule.h). Each rarely used feature is a module
in wrapper/, or in torch_face/ if torch's class has it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel.distributed import DistributedDataParallel

from dpcore import _C
from dpcore.comm.communicators.protocol import capabilities_of, check_open, core_of
from dpcore.ddp.across_steps.across_steps import STEP_ADVICE, AcrossSteps, FlushedBefore, listen
from dpcore.ddp.check import every_from_variable
from dpcore.ddp.compiled import tracing
from dpcore.ddp.mistakes.not_finite import FiniteBuffers
from dpcore.ddp.mistakes.observer import Observer
from dpcore.ddp.mistakes.reports import Reports, mode_of
from dpcore.ddp.torch_face import dynamo, join, pickling, sync_batch_norm
from dpcore.ddp.torch_face.logging_data import Logger, bucket_sizes
from dpcore.ddp.torch_face.reducer_face import ReducerFace
from dpcore.ddp.torch_face.torch_surface import TorchSurface, without_torchs_machinery
from dpcore.ddp.virtual_ranks.virtual_ranks import VirtualRanks
from dpcore.ddp.wrapper import arguments, completion, nesting, parameters, weighted
from dpcore.ddp.wrapper.bucket_report import BucketReport
from dpcore.ddp.wrapper.buffer_sync import BufferSync
from dpcore.ddp.wrapper.delayed import DelayedGradients
from dpcore.ddp.wrapper.first_steps import FirstSteps
from dpcore.ddp.wrapper.launch_schedule import asked_for, checked, goes_across_steps
from dpcore.ddp.wrapper.mixed_precision import MixedPrecision
from dpcore.ddp.wrapper.outputs import (
    tensors_in,
    tie_outputs,
    when_backward_begins,
    when_backward_ends,
)
from dpcore.ddp.wrapper.rebuilding import rebuild
from dpcore.ddp.wrapper.sparse_gradients import average_sparse
from dpcore.ddp.wrapper.wrapped import profiled_as
from dpcore.errors import Unsupported
from dpcore.recorder import facts as trace_facts
from dpcore.recorder.step_facts import StepFacts
from dpcore.reference.launch_schedule import LaunchSchedule


@without_torchs_machinery
class DataParallel(FlushedBefore, TorchSurface):
    """Wraps ``module`` so that backward leaves the gradients' average over all ranks in ``.grad``.

    It passes ``isinstance`` for ``torch.nn.parallel.DistributedDataParallel`` and has its
    arguments and methods; docs/data_parallel.md lists them and the differences. The most used:

    ``process_group``   a group of torch; by default that of ``dpcore.init()``, else torch's
                        default. dpcore's communicator replaces Gloo and MPI.
    ``comm``            a ``dpcore.Communicator`` or an mpi4py one, instead of a group.
    ``bucket_cap_mb``   the size at which a bucket is closed. By default chosen after the first
                        step, from the arrival of gradients and the speed of communication, if no
                        bit of the result depends on it; else 1, then 25 MiB.
    ``forward_sync_buffers``  broadcast rank 0's buffers (running means) before each forward.
    ``init_sync``       check that all ranks wrap the same model, and start from rank 0's values.
    ``find_unused_parameters``  for models whose forward does not always use all parameters.
    ``gradient_as_bucket_view``  ``.grad`` is a view of the bucket; a gradient that is kept over
                        the next backward is copied. False: separate memory, for one more copy.
    ``schedule``        when buckets are sent: "bucketed", "sequential", "per_parameter", "flat",
                        "oracle", or a ``dpcore.LaunchSchedule`` of your own. "auto":
                        DPCORE_SCHEDULE, else the faster of "bucketed" and "sequential" in the
                        first steps. "priority", "dear", "zero1", "zero2" continue under the next
                        forward and need ``dpcore.DistributedOptimizer`` (docs/across_steps.md).
    ``deterministic``   only algorithms that add in rank order: the same bits for any bucket size.
    ``mistakes``        how mistakes that no error shows are told: "warn" (a ``MistakeWarning``, and
                        an error where one is proved), "all", "raise", "ignore" (docs/mistakes.md).
    ``virtual_ranks``   cut each batch into so many shards (``shards()``), so that no bit of the
                        result depends on the number of ranks (docs/virtual_ranks.md).
    ``gradients``       on the CPU: "born" lets backward make large ones in their buckets, in memory
                        that stays warm (``dp.warm_memory``); "copied" does not. By default
                        DPCORE_GRADIENTS, else "born".

    >>> import torch, dpcore
    >>> comm = dpcore.init(rank=0, world_size=1)
    >>> model = dpcore.DataParallel(torch.nn.Linear(2, 1))
    >>> model(torch.ones(3, 2)).sum().backward()
    >>> model.module.weight.grad
    tensor([[3., 3.]])
    >>> dpcore.finalize()
    """

    _weight: float | None = None  # a factor of gradients, in a block of weighted()
    _virtual: VirtualRanks | None = None

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | str | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
        *,
        comm: Any = None,
        schedule: str | LaunchSchedule = "auto",
        deterministic: bool = False,
        mistakes: str | None = None,
        gradients: str | None = None,
        virtual_ranks: int | None = None,
    ) -> None:
        arguments.check_kinds(locals())
        nn.Module.__init__(self)
        Joinable.__init__(self)
        self.logger = Logger()
        process_group = arguments.check_together(
            delay_all_reduce_named_params,
            param_to_hook_all_reduce,
            process_group,
            device_mesh,
            module,
        )
        delayed = list(delay_all_reduce_named_params or ())
        self.parameters_to_ignore = parameters.names_to_ignore(module, delayed)
        trained = parameters.trained_parameters(module, self.parameters_to_ignore)
        wanted = [p for _, p in delayed] or [p for _, p in trained]
        arguments.check_parameters(trained or delayed, module, self.parameters_to_ignore)
        arguments.warn_of_no_effect(check_reduction, lazy_bucket_allocation)
        self.forward_sync_buffers, buffers_at_init = arguments.buffer_options(
            broadcast_buffers, forward_sync_buffers
        )
        self._module_parameters = [
            p for _, p in parameters.kept_parameters(module, self.parameters_to_ignore)
        ]
        self.device_ids, self.output_device = arguments.devices(
            device_ids, output_device, self._module_parameters or wanted
        )
        self.module, self.dim = module, dim
        self.device = wanted[0].device
        self.device_type = self.device.type
        self.is_multi_device_module = len({p.device for p in self._module_parameters}) > 1
        self.use_side_stream_for_tensor_copies = True
        self.broadcast_bucket_size = 250 * 2**20
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.batched_grad_copy = batched_grad_copy
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.static_graph, self.lazy_bucket_allocation = static_graph, lazy_bucket_allocation
        self.mixed_precision = mixed_precision
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self._wanted_schedule, self._schedule_is = checked(schedule), asked_for(schedule)
        caps, self._caps_are = arguments.bucket_caps(
            bucket_cap_mb, bucket_cap_mb_list, find_unused_parameters and not static_graph,
            goes_across_steps(self._wanted_schedule),
        )  # fmt: skip
        self.bucket_bytes_cap = max(caps) if bucket_cap_mb_list else caps[-1]
        self.bucket_bytes_cap_list = caps if bucket_cap_mb_list else []
        self._caps, self._deterministic = caps, deterministic
        self.virtual_ranks = virtual_ranks
        # With virtual ranks no gradient reaches the reducer, which looks for most mistakes.
        self._mistakes = Reports(mode_of(mistakes if virtual_ranks is None else "ignore"))
        self._gradients = arguments.gradients_of(gradients)
        is_warm = self._gradients == "born"
        if virtual_ranks is not None:
            self._gradients = "copied"
        self._comm_hooks: list[tuple[Any, Any]] = []
        self._join_group(comm, process_group)
        if deterministic and not capabilities_of(self.group).ordered:
            raise Unsupported(
                f"deterministic=True needs dpcore's communicator; in what order {self.backend} "
                "adds is not known. Pass comm=dpcore.init()"
            )
        if init_sync:
            arguments.make_equal(self, trained, delayed, buffers_at_init)
        self._delayed = (
            DelayedGradients(self._model_group, [p for _, p in delayed], param_to_hook_all_reduce)
            if param_to_hook_all_reduce is not None
            else None
        )
        self._set_up(trained)
        if virtual_ranks is not None:
            self._virtual = VirtualRanks(self, virtual_ranks, schedule, is_warm)
            self._reducer.stop_listening()

    def _set_up(self, trained: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Builds all that depends on the parameters; again after they have changed."""
        self._parameters_by_number = [parameter for _, parameter in trained]
        group, ignored = self._model_group, self.parameters_to_ignore
        self._watch = parameters.ParameterWatch(self.module, trained, ignored)
        self._buffers_of_module = BufferSync(
            group, self.module, ignored, self.device, FiniteBuffers(self._mistakes, group.rank)
        )
        modules = parameters.modules_with_parameters(self.module, self._parameters_by_number)
        self._step_facts = StepFacts(self.module, modules)
        steps = FirstSteps(self.group, self._caps_are, self._wanted_schedule)
        self._first_steps = steps
        goes_on = goes_across_steps(steps.schedule)
        if (before := self.__dict__.get("_across")) is not None:
            before.leave()
        self._across = AcrossSteps(self) if goes_on else None
        self._observer = Observer(self, self._mistakes)
        self._reducer = _C.Reducer(
            self._parameters_by_number,
            [name for name, _ in trained],
            parameters.comes_sparse(self.module, self._parameters_by_number),
            [numbers for _, numbers in modules],
            core_of(self.group),
            steps.schedule,
            self._caps,
            find_unused=self.find_unused_parameters and not self.static_graph,
            grad_is_part=self.gradient_as_bucket_view,
            skip_unused=self.skip_all_reduce_unused_params,
            static_graph=self.static_graph,
            born=self._gradients == "born",
            finds_mistakes=self._mistakes.is_on,
            ordered=self._deterministic or steps.adds_in_order,
            deterministic=self._deterministic,
            profiled_as=profiled_as(self, "all_reduce"),
            reduce_sparse=self._average_sparse,
            update=self._across.update if self._across is not None else self._no_update,
            differ=self._observer.differ,
            tag=group.tag,
            traced_as=group.traced_as,
            model=group.name,
            advice=group.advice + (STEP_ADVICE if goes_on else ""),
        )
        if self._across is not None:
            self._across.serve(self._reducer)
        if self._virtual is not None:
            self._virtual.join(self)
            self._reducer.stop_listening()
        self.reducer: Any = ReducerFace(self)
        if self.static_graph:
            self.logger._set_static_graph()
        self._first_bucket_sizes = bucket_sizes(self)
        self._hook_runner = None
        self._futures_of_buffers: list[Any] = []
        self._looked_for_optimizers = False
        self._check_every = every_from_variable()
        # Ranks that are threads share torch's class, and would see each other's models there.
        self._is_seen_by_dynamo = getattr(self.group, "transport", "") != "inproc"
        self._graphs = tracing.Graphs()
        self._mixed: MixedPrecision | None = None
        if self.mixed_precision is not None:
            self._mixed = MixedPrecision(
                self.mixed_precision, self.module, self.parameters_to_ignore
            )
            if self._mixed.reduce_dtype is not None:
                self._reducer.reduce_as(self._mixed.reduce_dtype)
        if not sync_batch_norm.torch_can(self.device_type, self._torch_group):
            sync_batch_norm.take_over(self.module, group)
        completion.watch(self)
        for handle in self.__dict__.get("_listening", ()):
            handle.remove()
        hears = self._reducer.wants_forward and not goes_on
        self._listening = listen(self, [part for part, _ in modules]) if hears else []
        trace_facts.know(self)

    def refresh(self) -> None:
        """Takes up changes of the parameters: call it on all ranks after some were added, replaced,
        frozen or unfrozen. Like the constructor it broadcasts rank 0's values. The program must
        add new parameters to its optimizer."""
        self._reducer.wait_for_gradients()
        self._module_parameters = [
            p for _, p in parameters.kept_parameters(self.module, self.parameters_to_ignore)
        ]
        trained = parameters.trained_parameters(self.module, self.parameters_to_ignore)
        arguments.check_parameters(trained, self.module, self.parameters_to_ignore)
        arguments.make_equal(self, trained, (), self.forward_sync_buffers)
        self._set_up(trained)
        self._use_hooks_again()

    # ---- around forward ----------------------------------------------------------------------

    @dynamo.left_alone
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module's forward. Broadcasts buffers before it, and prepares backward after."""
        if not dynamo.knows_us and "torch._dynamo" in sys.modules:
            dynamo.introduce()
        if (outer := DistributedDataParallel._active_ddp_module) is not None:
            nesting.check_around(self, outer)
        reducer = self._reducer
        learning = torch.is_grad_enabled()
        synchronised = learning and self.require_backward_grad_sync
        if synchronised:
            check_open(self.group)
        if self._watch.check(learning):
            self._buffers_of_module.find_again()
        if self._virtual is not None:
            self._virtual.check_forward()
            return self._run(False, inputs, kwargs)
        if self._across is not None:
            self._across.before_forward(learning)
        if learning:
            if reducer.is_incomplete:
                completion.raise_if_incomplete(self)
            reducer.begin_forward()
            self._observer.before_forward()
            if not self._looked_for_optimizers:
                self._setup_in_backward_optimizers()
        joins = self._join_config.enable
        root = join.begin_forward(self) if joins else 0
        if self._syncs_buffers(before_forward=True):
            self._sync_module_buffers(root)
        if synchronised and self._check_every is not None:
            self._check_every.before_forward(self)
        if joins:
            _, active = join.count_active(self, is_active=True)
            join.take_part(self, active)
        if synchronised and not self._first_steps.is_settled:
            self._first_steps.go_on(self)
        if self.device_ids:
            inputs, kwargs = arguments.moved(self, inputs, kwargs)
        if recorded := reducer.is_recorded:
            reducer.forward_begins()
            self._step_facts.forward_begins()
        prepared = self.reducer.prepared
        output = self._run(synchronised, inputs, kwargs)
        if recorded:
            self._step_facts.forward_ends()
            reducer.forward_ends()
            when_backward_begins(output, reducer.backward_begins)
            when_backward_ends(output, self._step_facts.backward_ends)
        if self._syncs_buffers(before_forward=False):
            self._sync_module_buffers(root)
        if not learning:
            self.require_forward_param_sync = False  # ranks may run different numbers of these
        elif not self.reducer.was_prepared_since(prepared):
            if synchronised and self._observer.compares:
                self._observer.after_forward(inputs, kwargs)
            output = self._expect_gradients(output, synchronised)
        if learning and self._weight is not None:
            output = weighted.scale_gradients(output, self._weight, self._ddp_sink_clone)
        return output

    def _run(self, synchronised: bool, inputs: Any, kwargs: Any) -> Any:
        run = self._mixed or self.module
        if self._across is not None:
            return self._across.run(lambda: run(*inputs, **kwargs), synchronised)
        if not self._is_seen_by_dynamo:
            return run(*inputs, **kwargs)
        if dynamo.knows_us:
            run = tracing.seen_by_dynamo(run)
        # dynamo asks for it when it compiles: compiled/tracing.py.
        before = DistributedDataParallel._active_ddp_module
        if before is not None and self not in list(before.modules())[1:]:
            before = None  # not around this model, but in another thread, and may end first
        DistributedDataParallel._active_ddp_module = self
        try:
            return run(*inputs, **kwargs)
        finally:
            DistributedDataParallel._active_ddp_module = before

    def _expect_gradients(self, output: Any, synchronised: bool) -> Any:
        reducer = self._reducer
        self.require_forward_param_sync = synchronised
        outputs = list(tensors_in(output)) if synchronised else []
        if synchronised and self.static_graph:
            if reducer.completed == 0:
                when_backward_begins(output, reducer.outermost_backward_begins)
        elif synchronised and self.find_unused_parameters:
            output = tie_outputs(output, clone=self._ddp_sink_clone)
        reducer.end_forward(synchronised, outputs)
        if self._futures_of_buffers:
            when_backward_ends(output, self._wait_for_buffers)
        if self._delayed is not None:
            self._delayed.after_forward(synchronised)
        return output

    def _rebuild_buckets(self) -> None:
        rebuild(self)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of forwards in this block are only summed on each rank. The backward of the
        next forward outside averages the sums.

        >>> with model.no_sync():                              # doctest: +SKIP
        ...     loss(model(first_half)).backward()
        >>> loss(model(second_half)).backward()                # doctest: +SKIP
        """
        arguments.refuse_virtual(self, "no_sync()")
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def weighted(self, count: float | torch.Tensor) -> contextlib.AbstractContextManager[None]:
        """In this block a loss is a mean over ``count`` samples or tokens of this rank, and
        gradients become the mean over those of all ranks, whose counts may differ. All ranks call
        it, also one that has none (0). With gradient accumulation one block holds all micro-batches
        of a step, and each loss is a sum divided by the rank's count for the step.

        >>> with model.weighted(len(targets)):                 # doctest: +SKIP
        ...     loss(model(inputs), targets).backward()
        """
        return weighted.weighted(self, count)

    def shards(self, batch: Any, total: int | None = None) -> Iterator[Any]:
        """With ``virtual_ranks``: a loop over this rank's shards of a batch, each of which takes a
        forward and a backward. After the loop, every rank has the average gradient over the batch.

        Each rank passes the whole batch: tensors whose first dimension is the sample's, or tuples,
        lists and mappings of them. Or, with ``total``, the number of samples in the whole batch,
        it passes its own part (``model.virtual.part``). A loss is a mean over the shard's samples.

        >>> for inputs, targets in model.shards(batch):        # doctest: +SKIP
        ...     loss(model(inputs), targets).backward()
        """
        return self.virtual.shards(batch, total)

    # ---- what can be seen --------------------------------------------------------------------

    @property
    def backend(self) -> str:
        """The library that moves the bytes: "native", "torch gloo", "mpi", ..."""
        return str(getattr(self.group, "backend", type(self.group).__name__))

    @property
    def schedule(self) -> str:
        """The name of the launch schedule."""
        return self._reducer.schedule

    @property
    def virtual(self) -> VirtualRanks:
        """With ``virtual_ranks``: its seed, step and shards, and its ``state_dict()``."""
        if self._virtual is None:
            raise Unsupported("the model was wrapped without virtual_ranks=, and has no shards")
        return self._virtual

    @property
    def is_exact(self) -> bool:
        """False if the schedule skips communication to measure a bound; results are then wrong."""
        return self._reducer.is_exact

    def stats(self) -> dict[str, Any]:
        """The choices of the first steps with their reasons, how gradients were copied
        (docs/gpu.md), and the communicator's counters, if any."""
        group: Any = self.group
        counters = group.stats() if capabilities_of(group).counts else {}
        facts = {
            "backend": self.backend,
            "schedule": self.schedule,
            "copies": self._reducer.copies(),
        }
        return {**facts, "chosen": dict(self._first_steps.why), **counters}

    def bucket_report(self) -> BucketReport:
        """The gradients in each bucket, and the times at which the last backward filled, sent and
        completed it; then how gradients came into them, and notes about mistakes."""
        reducer, why = self._reducer, self._first_steps.why
        notes = [*self._graphs.in_words(self), *self._mistakes.notes]
        lines, ways = reducer.report(), reducer.births() or ()
        return BucketReport(lines, self.schedule, reducer.has_rebuilt, why, notes, ways)

    @property
    def _has_rebuilt_buckets(self) -> bool:  # type: ignore[override]
        return self._reducer.has_rebuilt

    def __getstate__(self) -> dict[str, Any]:
        return pickling.state_of(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        pickling.restore(self, state)

    # ---- parts -------------------------------------------------------------------------------

    def _average_sparse(self, which: Sequence[int]) -> None:
        for number in which:
            average_sparse(self._model_group, self._parameters_by_number[number], self._join_scale)
