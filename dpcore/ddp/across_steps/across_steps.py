"""A model whose schedule continues under the next forward: "priority", "dear", "zero1", "zero2".

The optimizer's step is one of the schedule's phases (csrc/reducer/phases/phases.h), so the model
needs ``dpcore.DistributedOptimizer``, which records a step and applies it bucket by bucket. The
first synchronised forward is observed to learn which module uses which parameters first, and in
what order. Buckets are cut once, before the first backward, in rank 0's order. From then on each
module's forward waits for its parameters. Parameters that no module was seen to use are awaited
before forward. When the wrapper's forward ends, nothing is in flight.

If a module uses a parameter before its phases are over, it computes with a stale value. The first
forwards are checked for that, and with DPCORE_CHECK=1 all of them.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
from torch import nn

from dpcore.base.module_hook import ModuleHook
from dpcore.base.switch import is_on
from dpcore.comm.communicators.read_back import numbers_in
from dpcore.comm.launch import session
from dpcore.ddp.mistakes import not_finite
from dpcore.ddp.wrapper.needs import Needs, Uses
from dpcore.ddp.wrapper.parameters import comes_sparse
from dpcore.ddp.wrapper.wrapped import Wrapped
from dpcore.errors import Error, Unsupported

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from dpcore import _C

_WATCHED_FORWARDS = 3  # after the first, from which the order is learned
STEP_ADVICE = ". If another rank has left out optimizer.step(): all ranks step, or none does"


class Steps(Protocol):
    """The optimizer's side: dpcore/ddp/across_steps/."""

    def buckets_are_cut(self) -> None:
        """Called on all ranks once buckets have their final form."""

    def update(self, buckets: list[int]) -> None:
        """Applies the recorded step to these buckets, in one call of the optimizer."""

    def is_in_use(self) -> bool:
        """Whether the program still has the optimizer."""

    def is_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether ``optimizer`` is the DistributedOptimizer or the one inside it."""

    def before_forward(self) -> None:
        """Called before each forward in training."""

    def after_forward(self, output: Any) -> None:
        """Called after it. Checks that its gradients may be added to those that exist."""

    def full_gradients(self) -> dict[int, torch.Tensor]:
        """The averaged gradients by the parameter's number. All ranks call it."""

    def recorded_gradient(self, number: int) -> torch.Tensor | None:
        """What the recorded step updates a parameter with; None where a rank has only a part."""


class AcrossSteps:
    """The part of a ``DataParallel`` whose schedule has an update among its phases."""

    def __init__(self, model: Wrapped) -> None:
        _check(model)
        self._model = weakref.ref(model)
        self._steps: Steps | None = None  # also after the program has dropped its optimizer
        before: AcrossSteps | None = model.__dict__.get("_across")
        self._is_refreshed = before is not None and before._steps is not None
        self._has_learned = False
        self._is_refused = False  # the optimizer was, by an error that the program has seen
        self._forwards = 0
        self._in_forward = False
        self._modules: list[tuple[nn.Module, list[int]]] = []  # with the parameters they use first
        self._has_begun: set[int] = set()  # numbers of modules that have begun in this forward
        self._always_checks = is_on("DPCORE_CHECK")
        self._handles: list[RemovableHandle] = []
        me = weakref.ref(self)  # else the module would keep this and an old reducer alive

        def finish_unless_inside() -> None:
            if (alive := me()) is not None:
                alive._finish_unless_inside()

        finish = ModuleHook(finish_unless_inside)
        for module in model.module.modules():
            hooked: Any = module
            self._handles.append(hooked.register_state_dict_pre_hook(finish))
            self._handles.append(hooked.register_load_state_dict_pre_hook(finish))
        self._handles.append(model.module.register_forward_pre_hook(finish, prepend=True))
        self._end: weakref.finalize[..., Wrapped] | None = None

    def serve(self, reducer: _C.Reducer) -> None:
        """Finishes the last step when the wrapper is dropped, for a module that outlives it."""
        self._end = weakref.finalize(self._wrapped(), self._model_is_gone, reducer)
        self._end.atexit = False

    def _model_is_gone(self, reducer: _C.Reducer) -> None:
        """Waits for a step in flight. Up to Python 3.11 garbage collection may run at any
        allocation, even inside a call of torch that holds a lock. Releasing the GIL there could
        deadlock with a thread that wants that lock, so it is released only if a step is in flight.
        """
        try:
            if reducer.is_in_flight and not (reducer.has_failed or self._is_refused):
                reducer.flush()
        except Error as error:
            if type(error) is not Error:
                session.ends_with_error()  # no caller can catch it here, so Python prints it
                raise
            # A schedule left out a phase; the program has had that error.
        finally:
            self._take_hooks_away(reducer)

    def leave(self) -> None:
        """Removes the hooks before another object takes over with other modules and buckets."""
        if self._end is not None:
            self._end.detach()
        self._take_hooks_away(self._wrapped()._reducer)

    def _take_hooks_away(self, reducer: _C.Reducer) -> None:
        for handle in self._handles:
            handle.remove()
        reducer.stop_listening()  # an optimizer may still hold it

    # ---- the optimizer -----------------------------------------------------------------------

    def attach(self, steps: Steps) -> None:
        """Takes the steps of a new ``DistributedOptimizer``."""
        if self._steps is not None and self._steps.is_in_use():
            raise Unsupported(
                "DistributedOptimizer: this model has one already, which steps a whole bucket at a "
                "time; give all parameters to one optimizer, as parameter groups"
            )
        self._wrapped()._reducer.flush()
        self._steps = steps
        if self._has_learned:
            steps.buckets_are_cut()

    def steps(self) -> Steps:
        """The optimizer's side. Raises if the program has made no ``DistributedOptimizer``."""
        if self._steps is None:
            raise self._without_optimizer()
        return self._steps

    def _without_optimizer(self) -> Unsupported:
        return Unsupported(_advice(self._wrapped(), self._is_refreshed))

    def refuse(self, what: str) -> None:
        """Raises for a feature that none of these schedules supports."""
        _refuse(self._wrapped(), what)

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before each step of an optimizer that trains these parameters."""
        if self._steps is None or not self._steps.is_of(optimizer):
            raise self._without_optimizer()

    def update(self, buckets: list[int]) -> None:
        """The reducer's callback. The model may be gone by the last step."""
        if (model := self._model()) is not None:
            not_finite.check(model, None)
        try:
            with torch._C.DisableTorchFunction():  # guarded gradients act as plain tensors here
                self.steps().update(buckets)
        except Unsupported:
            self._is_refused = True
            raise

    def finish(self) -> None:
        """Finishes the phases before the communicator closes. After a backward without a step
        nothing is updated. A failed reducer is left alone: its error was raised before."""
        reducer = self._wrapped()._reducer
        if reducer.is_in_flight and not reducer.has_failed:
            reducer.finish_phases()

    # ---- forward -----------------------------------------------------------------------------

    def before_forward(self, learning: bool) -> None:
        """Called at the start of each forward of the wrapper."""
        reducer = self._wrapped()._reducer
        if learning:
            steps = self.steps()
            if not steps.is_in_use():
                raise self._without_optimizer()
            steps.before_forward()
        else:
            reducer.flush()

    def run(self, run: Callable[[], Any], synchronised: bool) -> Any:
        """The module's forward."""
        output = self._watched(run, synchronised)
        if torch.is_grad_enabled():
            self.steps().after_forward(output)
        return output

    def _watched(self, run: Callable[[], Any], synchronised: bool) -> Any:
        """Runs the forward and observes the parameters it uses, in the first forwards only."""
        model = self._wrapped()
        learns = synchronised and not self._has_learned
        self._in_forward = True
        self._has_begun.clear()
        try:
            if learns:
                needs = Needs(model.module, model._parameters_by_number)
                output = needs.watch(run)
            elif self._always_checks or self._forwards < _WATCHED_FORWARDS:
                self._forwards += 1
                with Uses(model._parameters_by_number, self._check_current):
                    output = run()
            else:
                return run()
        finally:
            self._in_forward = False
        if learns:
            self._learn(model, needs)
        return output

    def _learn(self, model: Wrapped, needs: Needs) -> None:
        """Cuts the buckets by rank 0's order, since the first forwards of ranks may differ."""
        order = torch.tensor(needs.order, device=model.device)
        model._model_group.broadcast(order, 0)
        reducer = model._reducer
        reducer.rebuild(numbers_in(order, model.group)[::-1], [])
        self._modules = needs.modules
        reducer.set_modules([numbers for _, numbers in self._modules])
        self._handles += listen(model, [module for module, _ in self._modules], self._has_begun.add)
        self._has_learned = True
        self.steps().buckets_are_cut()

    def _check_current(self, number: int) -> None:
        model = self._wrapped()
        if model._reducer.is_current(number):
            return
        name, schedule = model._reducer.name_of(number), model.schedule
        for module in self._has_begun:  # the schedule has had forward_begin for these modules
            if number in self._modules[module][1]:
                raise Error(_not_awaited(model, name, module))
        raise Error(
            f"rank {model.group.rank}: forward uses {name} in a module that "
            f"did not use it in the first forward, and with schedule='{schedule}' its "
            "update is not over; call model.flush() before it, or pass "
            "schedule='bucketed'"
        )

    def _finish_unless_inside(self) -> None:
        """Finishes the step for calls that bypass the wrapper, such as ``model.module(x)``."""
        model = self._model()
        if model is not None and not self._in_forward:
            model._reducer.flush()

    def _wrapped(self) -> Wrapped:
        model = self._model()
        assert model is not None  # which owns this object
        return model


def listen(
    model: Wrapped, modules: list[nn.Module], also: Callable[[int], None] = lambda _: None
) -> list[RemovableHandle]:
    """Tells the reducer when the forward of each module begins, by its number."""
    me = weakref.ref(model)
    handles = []
    for number, module in enumerate(modules):

        def begins(number: int = number) -> None:
            if (alive := me()) is not None:
                also(number)
                alive._reducer.forward_of_module_begins(number)

        handles.append(module.register_forward_pre_hook(ModuleHook(begins), prepend=True))
    return handles


class FlushedBefore(nn.Module):
    """The methods of a wrapped model that expose its parameters. They finish the step first."""

    _across: AcrossSteps | None
    _reducer: _C.Reducer

    def flush(self) -> None:
        """Finishes a step that is in flight under "priority", "dear", "zero1" or "zero2"; does
        nothing under other schedules. All ranks should call it after the same steps, but it does
        not wait for them to."""
        if self.__dict__.get("_across") is not None:
            self._reducer.flush()

    def full_gradients(self) -> dict[str, torch.Tensor]:
        """The averaged gradients by parameter name, as copies; between backward and the next
        forward. All ranks call it: with schedule="zero1" each rank holds only its part of them."""
        named: Any = self
        parameters = named._parameters_by_number
        across = self.__dict__.get("_across")
        if across is None:
            self._reducer.wait_for_gradients()
            found = {n: p.grad.clone() for n, p in enumerate(parameters) if p.grad is not None}
        else:
            found = across.steps().full_gradients()
        name_of = self._reducer.name_of
        return {name_of(number): gradient for number, gradient in found.items()}

    def _no_update(self, buckets: list[int]) -> None:
        raise AssertionError(f"buckets {buckets} have no update: it is the program that steps")

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """As in torch, for ``to()``, ``double()`` and the like. Finishes a step in flight first."""
        self.flush()
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def train(self, mode: bool = True) -> Any:
        """As in torch. Evaluation uses the parameters of the last step."""
        if not mode:
            self.flush()
        return super().train(mode)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As in torch. ``flush()`` comes first."""
        self.flush()
        return super().named_parameters(*args, **kwargs)


def _not_awaited(model: Wrapped, name: str, module: int) -> str:
    """The error for a user's schedule that lacks a wait."""
    report = enumerate(model.bucket_report())
    bucket = next(number for number, line in report if name in line.parameters)
    phases = model._reducer.phases
    calls = "control.wait(bucket)"
    if phases[-1] == "update":
        calls += " and control.update(bucket)"
    return (
        f"rank {model.group.rank}: the forward of module {module} uses {name}, and schedule "
        f"'{model.schedule}' has not waited for its bucket {bucket}, whose phases "
        f"({', '.join(phases)}) are not over. Let forward_begin call {calls} for the bucket of "
        "each of control.gradients_of_module(module)"
    )


def _advice(model: Wrapped, is_refreshed: bool) -> str:
    """The error for a program that lacks the optimizer its schedule needs."""
    if is_refreshed:
        return (
            "refresh() has ended the DistributedOptimizer that this model had; make another one:\n"
            "    optimizer = dpcore.DistributedOptimizer(optimizer, model)\nIt can load what "
            "full_state_dict() of the old one gave before refresh()"
        )
    return (
        f"schedule='{model.schedule}' steps while the next forward runs, so it needs an optimizer "
        "that can wait:\n    optimizer = dpcore.DistributedOptimizer(optimizer, model)\nafter the "
        "line that makes your optimizer. Schedules that need no such line are 'bucketed' and "
        "'sequential'"
    )


def _check(model: Wrapped) -> None:
    """Raises for options that these schedules do not support."""
    kinds: tuple[type, ...] = (torch.jit.ScriptModule,)
    if (dynamo := sys.modules.get("torch._dynamo.eval_frame")) is not None:
        kinds += (dynamo.OptimizedModule,)
    is_compiled = any(isinstance(part, kinds) for part in model.module.modules())
    refused = {
        "gradient_as_bucket_view=False": not model.gradient_as_bucket_view,
        "mixed_precision=": model.mixed_precision is not None,
        "delay_all_reduce_named_params=": model._delayed is not None,
        "sparse gradients": any(comes_sparse(model.module, model._parameters_by_number)),
        "torch.compile or torch.jit of the module": is_compiled,
    }
    for what, is_there in refused.items():
        if is_there:
            _refuse(model, what)


def _refuse(model: Wrapped, what: str) -> NoReturn:
    wanted = model._first_steps.schedule  # there is no reducer yet to ask for the name
    name = wanted if isinstance(wanted, str) else type(wanted).__name__
    raise Unsupported(f"schedule='{name}' does not work with {what}; use 'bucketed' or 'auto'")
