"""The methods of torch's class that few programs call.

Each has torch's name and meaning, but uses our reducer instead of torch's. The remaining methods
of torch's class raise, so that none half works (tests/data_parallel/test_surface.py lists those
that are inherited).
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import DistributedDataParallel

from dpcore.comm.communicators.protocol import GradientGroup
from dpcore.ddp.torch_face.comm_hooks import HookRunner, check_hook, name_of, step_in_backward
from dpcore.ddp.torch_face.join import ModelJoin, join_context
from dpcore.ddp.torch_face.logging_data import Logger, logging_data
from dpcore.ddp.torch_face.process_group import GroupForTorch
from dpcore.ddp.wrapper.arguments import refuse_virtual
from dpcore.ddp.wrapper.buffer_methods import BufferMethods
from dpcore.ddp.wrapper.completion import raise_if_incomplete
from dpcore.ddp.wrapper.gradient_group import backend_of, choose_group, is_default, torch_group_of
from dpcore.ddp.wrapper.model_group import ModelGroup
from dpcore.ddp.wrapper.parameters import comes_sparse, ignore_by_name, trained_parameters
from dpcore.errors import Error, Unsupported

if TYPE_CHECKING:
    from dpcore import _C
    from dpcore.ddp.across_steps.across_steps import AcrossSteps

# The methods that DataParallel inherits: they use only attributes that it sets.
INHERITED = ("_get_active_ddp_module", "_get_parameters", "gather", "scatter", "to_kwargs")
_Class = TypeVar("_Class")
_Batch = TypeVar("_Batch")
_HookType: Any = vars(dist)["BuiltinCommHookType"]


class TorchSurface(BufferMethods):
    """A subclass of torch's class whose inherited ``__init__`` never runs."""

    module: nn.Module
    # Read by properties of torch 2.15: a backward is finished when it returns.
    _require_manual_backward_finalization = False
    _ddp_sink_clone = True
    _divide_by_initial_world_size = True
    _join_scale = 1.0  # a factor of averages, which join() may restrict to fewer ranks
    group: GradientGroup
    _model_group: ModelGroup
    logger: Logger
    _reducer: _C.Reducer
    _hook_runner: HookRunner | None
    _across: AcrossSteps | None
    _parameters_by_number: list[nn.Parameter]
    _torch_group: Any
    _profiled_backend: str
    _group_for_torch: Any
    _set_up: Callable[[Sequence[tuple[str, nn.Parameter]]], None]

    # ---- communication hooks -----------------------------------------------------------------

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        """Replaces each bucket's all-reduce by ``hook(state, bucket) -> Future``, see
        dpcore/ddp/torch_face/comm_hooks.py. A hook whose state is a process group gets the model's
        group in place of None if torch.distributed has no default group."""
        self._check_comm_hook(hook)
        self._take_hook_place(name_of(hook))
        self._comm_hooks.append((hook, state))
        if state is None and not torch.distributed.is_initialized():
            state = self.process_group
        for part, _ in ((state, hook), *getattr(hook, "parts", ())):
            self._give_group(part)
        self._hook_runner = HookRunner(self._reducer, self._parameters_by_number, state, hook)
        self._reducer.use_hook(self._hook_runner)

    def _give_group(self, state: Any) -> None:
        """Replaces the state's group by ours if it is the model's, on the CPU. There torch's groups
        run callbacks on their own threads. PowerSGD's callbacks communicate and wait: each rank
        would run them in another order, and deadlock once all those threads wait. Our operations
        are complete when the call returns."""
        if self.device.type != "cpu" or not hasattr(state, "process_group"):
            return
        default = dist.group.WORLD if dist.is_initialized() else None
        if (state.process_group or default) is self._torch_group:
            with contextlib.suppress(AttributeError):  # it may be read-only
                state.process_group = self._group_of_own()

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """Registers ``dist.BuiltinCommHookType.ALLREDUCE``, which changes nothing, or
        ``FP16_COMPRESS``, which runs in C++."""
        self._take_hook_place(str(comm_hook_type))
        if comm_hook_type == _HookType.FP16_COMPRESS:
            self._reducer.reduce_as(torch.float16)

    def _use_hooks_again(self) -> None:
        """Registers the hooks again on a new reducer."""
        name = self.logger.facts.pop("comm_hook", "")
        hooks, self._comm_hooks = self._comm_hooks, []
        for hook, state in hooks:
            if hook is not step_in_backward:  # the next forward registers that one again
                self.register_comm_hook(state, hook)
        if name and not hooks:
            kinds = _HookType
            self._register_builtin_comm_hook(
                next(k for k in kinds.__members__.values() if str(k) == name)
            )

    def _take_hook_place(self, name: str) -> None:
        refuse_virtual(self, "a communication hook")
        if self._across is not None:
            self._across.refuse("communication hooks")
        if self._comm_hooks or "comm_hook" in self.logger.facts:
            self._raise(
                Error(
                    f"register_comm_hook or register_builtin_comm_hook can only be called once: "
                    f"{self.logger.facts.get('comm_hook')} is registered. For several, register "
                    "dpcore.compose_comm_hooks((state, hook), ...)"
                )
            )
        self.logger._set_comm_hook_name(name)

    def _check_comm_hook(self, hook: Any) -> None:
        try:
            check_hook(hook)
        except (TypeError, ValueError) as problem:
            self._raise(problem)

    def _register_fused_optim(
        self, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any
    ) -> None:
        """Registers an optimizer that steps each bucket as soon as its gradients are averaged."""
        from torch.distributed.algorithms import _optimizer_overlap

        fused: Any = _optimizer_overlap._as_overlapped_optim(  # type: ignore[attr-defined]
            optim, optim_params, *args, **kwargs
        )
        try:
            fused.register_ddp(self)
        except NotImplementedError as problem:
            raise Error(f"{optim} has no variant that steps single buckets") from problem

    def _setup_in_backward_optimizers(self) -> None:
        """Supports ``torch.distributed.optim._apply_optimizer_in_backward``: the optimizer steps
        when a bucket is averaged, not when a gradient arrives. The first forward calls this."""
        self._looked_for_optimizers = True
        if not any(hasattr(p, "_in_backward_optimizers") for p in self._parameters_by_number):
            return
        # Imported late: it takes time, and keeps the program's group from being destroyed.
        from torch.distributed.optim.apply_optimizer_in_backward import (
            param_to_optim_hook_handle_map,
        )

        handles: Any = param_to_optim_hook_handle_map
        for parameter in self._parameters_by_number:
            for handle in handles.get(parameter, ()):
                handle.remove()
        self.register_comm_hook(weakref.ref(self), step_in_backward)

    @property
    def process_group(self) -> Any:  # type: ignore[override]
        """torch's group, or ours in the form of one, for hooks and ``join``."""
        if self._torch_group is not None:
            return self._torch_group
        return self._group_of_own()

    def _group_of_own(self) -> GroupForTorch:
        if self._group_for_torch is None:
            self._group_for_torch = GroupForTorch(self._model_group, self.device)
        return cast(GroupForTorch, self._group_for_torch)

    # ---- static graphs, logging --------------------------------------------------------------

    def _set_static_graph(self) -> None:
        """The same as the constructor's ``static_graph=True``. Call it before the first step."""
        if self.static_graph:
            warnings.warn("static_graph is set already", stacklevel=2)
            return
        try:
            self._reducer.set_static_graph()
        except Error as problem:
            self._raise(problem)
        self.static_graph = True
        self.logger._set_static_graph()
        if self.find_unused_parameters:
            warnings.warn(
                "static_graph=True finds unused parameters in the first step; "
                "find_unused_parameters=True has no effect beside it",
                stacklevel=2,
            )

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """See dpcore/ddp/torch_face/logging_data.py."""
        return logging_data(self)  # type: ignore[arg-type]

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        if sample_rate < 1:
            self._raise(
                Unsupported("DDP runtime logging sample rate should be equal or greater than 1")
            )
        self._reducer.sample_every(sample_rate)

    def _log_and_throw(self, err_type: type[Exception], err_msg: str) -> None:
        self._raise(err_type(err_msg))

    def _raise(self, problem: Exception) -> None:
        self.logger.set_error_and_log(str(problem))
        raise problem

    def _join_group(self, comm: Any, process_group: Any, is_copy: bool = False) -> None:
        self.group = choose_group(comm, process_group, self.device)
        self._model_group = ModelGroup(self.group, self.module, is_copy)
        self._torch_group = torch_group_of(comm, process_group)
        # Looked up once: the program may destroy torch's group before ours.
        group = self._torch_group
        self._profiled_backend = backend_of(group, self.device) if group else "dpcore"
        self._has_default_group = comm is None and is_default(process_group)
        self._group_for_torch = None

    def _update_process_group(self, new_process_group: Any) -> None:
        """Switches to another group that contains this rank, after ranks were lost or added. The
        buckets start over."""
        if new_process_group is dist.GroupMember.NON_GROUP_MEMBER:
            return
        with contextlib.suppress(Error):  # the old group may have failed
            self._reducer.wait_for_gradients()
        self._join_group(None, new_process_group)
        self._set_up(trained_parameters(self.module, self.parameters_to_ignore))
        self._use_hooks_again()

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """With False, outputs are not copied when unused parameters are searched, so the loss must
        not change them in place."""
        self._ddp_sink_clone = val

    def _check_reducer_finalized(self) -> None:
        raise_if_incomplete(self)  # type: ignore[arg-type]

    def _remove_autograd_hooks(self) -> None:
        self._reducer.stop_listening()

    def _set_sparse_metadata(self, global_unique_ids: Any) -> None:
        """Does nothing: ranks exchange the rows of sparse gradients in each step."""

    # ---- join --------------------------------------------------------------------------------

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Any:
        """A context in which ranks may have different numbers of inputs. A rank without inputs
        contributes zeros. At the end all ranks get the model of one that had inputs longest.

        ``divide_by_initial_world_size``  False: averages over the ranks that still have inputs.
        ``throw_on_early_termination``    all ranks raise when the first one has no more inputs.
        """
        return join_context(
            self,  # type: ignore[arg-type]
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size,
        )

    def until_all_end(self, loader: Iterable[_Batch]) -> Iterator[_Batch]:
        """Yields the batches of ``loader`` within ``join()``: a rank whose loader has ended
        contributes zeros until the loaders of all ranks have ended. Each rank must read its loader
        to the end; if one breaks out of the loop, the others wait for it, as in ``join()``.

        >>> for batch in model.until_all_end(loader):          # doctest: +SKIP
        ...     optimizer.zero_grad()
        ...     loss(model(batch)).backward()
        ...     optimizer.step()
        """
        with self.join():
            yield from loader

    def join_hook(self, **kwargs: Any) -> ModelJoin:
        refuse_virtual(self, "join()")
        if self._across is not None:
            self._across.refuse("join")
        divide = kwargs.get("divide_by_initial_world_size", True)
        return ModelJoin(self, divide)  # type: ignore[arg-type]

    @property
    def join_device(self) -> torch.device:
        return torch.device(self.device)

    @property
    def join_process_group(self) -> Any:
        return self.process_group

    @property
    def _distributed_rank(self) -> int:
        return self.group.rank

    # ---- parameters ------------------------------------------------------------------------

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Sequence[str]
    ) -> None:
        """Excludes these names from averages and broadcasts. Call it before wrapping ``module``."""
        ignore_by_name(module, params_and_buffers_to_ignore)

    @staticmethod
    def _get_data_parallel_params(module: nn.Module, named_params: bool = False) -> Iterator[Any]:
        for name, parameter in module.named_parameters():
            if not hasattr(parameter, "_ddp_ignored"):
                yield (name, parameter) if named_params else parameter

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        parameters = [p for _, p in trained_parameters(self.module, self.parameters_to_ignore)]
        return parameters, comes_sparse(self.module, parameters)

    def _build_debug_param_to_name_mapping(
        self, parameters: Sequence[torch.Tensor]
    ) -> dict[int, str]:
        number_of = {id(parameter): number for number, parameter in enumerate(parameters)}
        names = {}
        for name, parameter in trained_parameters(self.module, self.parameters_to_ignore):
            if id(parameter) not in number_of:
                self._raise(
                    Unsupported(f"Param with name {name} is not among the parameters given")
                )
            names[number_of[id(parameter)]] = name
        if len(names) != len(number_of):
            self._raise(
                Unsupported(
                    f"Expected param to name mapping of {len(number_of)} parameters; the module "
                    f"has {len(names)} of them"
                )
            )
        return names


def without_torchs_machinery(cls: type[_Class]) -> type[_Class]:
    """Makes those methods of torch's class raise that ``cls`` neither overrides nor may inherit."""
    torchs = vars(DistributedDataParallel)
    for name, value in torchs.items():
        own = getattr(cls, name) is not getattr(DistributedDataParallel, name)
        if inspect.isfunction(value) and not own and name not in INHERITED:
            setattr(cls, name, _closed(name))
    return cls


def _closed(name: str) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise Unsupported(
            f"{name} is an internal method of torch's DistributedDataParallel and "
            "means nothing for dpcore.DataParallel, which works differently inside"
        )

    method.__name__ = method.__qualname__ = name
    return method
