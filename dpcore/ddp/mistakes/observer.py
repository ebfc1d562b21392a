"""Watches one wrapped model on this rank, for its word of each step and for steps of an optimizer
over gradients that were never averaged.

A word is written in every synchronised forward and travels with the first bucket
(csrc/reducer/backward/step_words.h). Where words differ, ``verdicts`` says what that means.

A gradient that came outside a synchronised backward is a mistake once an optimizer uses it, unless
the program averages gradients or parameters itself. If it does not, its ranks drift apart, which
the next word proves. Without a next word there are only signs: the program changed neither the
gradients before the step nor the parameters after it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from dpcore.base.module_hook import ModuleHook
from dpcore.ddp.mistakes import local_notes, verdicts
from dpcore.ddp.mistakes.reports import Reports

# Steps without any averaging after which a warning comes. Programs that average parameters
# themselves do so every few steps.
_PATIENCE = 16
_PATIENCE_WITHOUT_FORWARD = 2  # where no forward has ever gone through the wrapper

# Optimizers whose steps are averaged by a block of ``LocalSGD`` or ``DiLoCo``, each with the block.
in_blocks: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[Any]] = (
    weakref.WeakKeyDictionary()
)


class _Stepping:
    """An optimizer of a model, and how many backwards were completed at its last step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.last = 0


class Observer:
    """The mistakes of one wrapped model, as this rank can see them."""

    def __init__(self, model: Any, reports: Reports) -> None:
        self._model = weakref.ref(model)
        self._reports = reports
        self.compares = reports.is_on and model.group.world_size > 1
        self._steps_under_forward = model._across is not None
        self._modules = list(model.module.modules()) if reports.is_on else []
        self._stepping: list[_Stepping] = []  # in the order of their first steps
        self.steps = local_notes.Steps()
        self._loads = 0
        self._forwards = 0  # in training, through the wrapper
        self._unaveraged = 0  # steps in a row
        self._leaves_ranks_equal = False  # such a step was followed by a word that shows it
        self._averages_itself = False
        self.first_unaveraged = ""  # in words
        if reports.is_on and (handle := self._count_loads_of(model.module)) is not None:
            weakref.finalize(self, handle.remove).atexit = False

    # ---- around forward ----------------------------------------------------------------------

    def before_forward(self) -> None:
        """Before each forward in training."""
        self._forwards += 1

    def after_forward(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        """After a synchronised one, before its backward is expected: writes the word."""
        groups = [o.param_groups for one in self._stepping if (o := one.optimizer()) is not None]
        self._wrapped()._reducer.say(groups, self._modules, self._loads, inputs, named)

    # ---- around an optimizer's step ----------------------------------------------------------

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Before an optimizer of these parameters steps."""
        if self._unaveraged:
            self._look_for_averaging()
        completed = self._wrapped()._reducer.completed
        for known in self._stepping:
            if known.optimizer() is optimizer:
                known.last = completed
                return
        if not self._is_inside(optimizer):
            self._stepping = [known for known in self._stepping if known.optimizer() is not None]
            self._stepping.append(_Stepping(optimizer))
            self._stepping[-1].last = completed
            self._loads += 1 if optimizer.state else 0
            self._count_loads_of(optimizer)

    def optimizers_of(self, since: int = -1) -> list[torch.optim.Optimizer]:
        """Those that stepped when more than ``since`` backwards were completed, in the order of
        their first steps."""
        recent = (known.optimizer() for known in self._stepping if known.last > since)
        return [optimizer for optimizer in recent if optimizer is not None]

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """After it. A closure may have run forward and backward within the step."""
        model = self._wrapped()
        reducer = model._reducer
        if torch._C._current_graph_task_id() >= 0 or self._is_inside(optimizer):
            return  # within backward, for one parameter or a few
        if reducer.has_local_gradients and optimizer not in in_blocks:
            self._judge_local_gradients(model, optimizer)
        else:
            self._unaveraged = 0
        reducer.optimizer_stepped()

    def _judge_local_gradients(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
        reducer = model._reducer
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        used = [
            number
            for number in reducer.local_gradients()
            if id(parameter := model._parameters_by_number[number]) in stepped
            and parameter.grad is not None
            and bool(parameter.grad.any())
        ]
        if not used:
            return
        is_first = reducer.add_unaveraged_step() == 1  # since all ranks had the same parameters
        self._leaves_ranks_equal |= is_first and self._unaveraged > 0
        self._unaveraged = 1 if is_first else self._unaveraged + 1
        if self._unaveraged == 1:
            self.first_unaveraged = _in_words(model, used)
        if reducer.has_edited_local_gradients:
            self._averages_itself = True  # as far as can be seen
        patience = _PATIENCE if self._forwards else _PATIENCE_WITHOUT_FORWARD
        if self._unaveraged > patience:
            self._warn_of_unaveraged()

    def _look_for_averaging(self) -> None:
        """Notices that the program has changed the parameters since an optimizer did."""
        if not self._averages_itself:
            self._averages_itself = self._wrapped()._reducer.has_changed_since_digest

    def before_finalize(self) -> None:
        """No word can tell of the last steps any more."""
        if self._unaveraged and not self._leaves_ranks_equal:
            self._look_for_averaging()
            self._warn_of_unaveraged()

    def _warn_of_unaveraged(self) -> None:
        if not self._averages_itself:
            rank, steps = self._wrapped().group.rank, self._unaveraged
            count = "step" if steps == 1 else f"{steps} steps"
            self._reports.warn(
                "never averaged",
                f"rank {rank}: the last {count} of an optimizer used gradients that were never "
                f"averaged: {self.first_unaveraged}",
            )

    # ---- between ranks -----------------------------------------------------------------------

    def differ(self, findings: int, words: list[tuple[Any, ...]]) -> None:
        """The reducer's callback at the end of a step in which the ranks' words differ, or are
        equal where they should not be. It is called on all ranks."""
        if (model := self._model()) is not None:  # else its last step was finished as it went
            first, optimizers = self.first_unaveraged, self.optimizers_of()
            verdicts.judge(model, findings, words, self._reports, first, optimizers)

    def _wrapped(self) -> Any:
        model = self._model()
        assert model is not None
        return model

    def _is_inside(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it steps for a ``DistributedOptimizer``, a few parameters at a time."""
        return self._steps_under_forward and not hasattr(optimizer, "records_steps")

    def _count_loads_of(self, of: Any) -> Any:
        """The handle of a hook. None where there are no such hooks: of TorchScript, and of an
        optimizer that does without the constructor of torch's class."""
        me = weakref.ref(self)

        def count() -> None:
            if (alive := me()) is not None:
                alive._loads += 1

        try:
            return of.register_load_state_dict_post_hook(ModuleHook(count))
        except (AttributeError, RuntimeError):
            return None


def _in_words(model: Any, used: list[int]) -> str:
    name = model._reducer.name_of(used[-1])
    more = f" and {len(used) - 1} more" if len(used) > 1 else ""
    if model._reducer.local_forwards:
        return (
            f"the last backward before the step, which made the gradient of {name}{more}, belongs "
            "to a forward within no_sync(). Leave the last micro-batch before each step outside "
            "no_sync(), forward and backward, and the last short group of an epoch too"
        )
    return (
        f"the gradient of {name}{more} came from a call of model.module, which averages nothing. "
        "Call the wrapped model in training: model(x), not model.module(x)"
    )
