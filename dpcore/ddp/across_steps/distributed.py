"""``DistributedOptimizer``: the one line that "priority", "dear" and "zero1" need.

    model = dpcore.DataParallel(model, schedule="zero1")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = dpcore.DistributedOptimizer(optimizer, model)

``step()`` records the current hyperparameters. The wrapped optimizer then steps one bucket at a
time, with ``param_groups`` narrowed to that bucket. Under "priority" and "dear" that happens when
the forward of a module that needs the bucket begins (whole_steps.py), under "zero1" within
``step()``, for this rank's part of each bucket (part_steps.py).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from dpcore.comm.communicators.checks import check_is
from dpcore.ddp.across_steps.across_steps import FlushedBefore
from dpcore.ddp.across_steps.kinds import check_kind
from dpcore.ddp.across_steps.part_steps import PartSteps
from dpcore.ddp.across_steps.whole_steps import WholeSteps
from dpcore.errors import Unsupported


class DistributedOptimizer(Optimizer):
    """Wraps ``optimizer``, which trains parameters of ``model``, a ``dpcore.DataParallel`` with
    schedule "priority", "dear", "zero1" or "zero2".

    It is an ``Optimizer`` with the same ``param_groups``, so learning rate schedulers and
    frameworks accept it. ``step()`` may return before the parameters are updated; a forward, or a
    read through ``model``, sees them updated.

    Most of torch's optimizers are element-wise; Adafactor and Muon need whole parameters. For a
    class of your own set ``element_wise = True``, or ``per_parameter = True``, which works only
    under "priority" and "dear".
    """

    records_steps = True  # for others to be done: the one inside does them, a few at a time

    def __init__(self, optimizer: Optimizer, model: Any) -> None:
        is_wrapped = isinstance(model, FlushedBefore)
        if not is_wrapped or model._across is None:
            given = f"schedule='{model.schedule}'" if is_wrapped else f"a {type(model).__name__}"
            raise Unsupported(
                "DistributedOptimizer is for a dpcore.DataParallel with schedule='priority', "
                f"'dear', 'zero1' or 'zero2', and this is {given}; use the plain optimizer "
                "with it"
            )
        if not isinstance(optimizer, Optimizer) or isinstance(optimizer, DistributedOptimizer):
            raise Unsupported(
                "DistributedOptimizer(optimizer, model): the first is an optimizer of torch, made "
                f"of model.parameters(), and not a {type(optimizer).__name__}"
            )
        phases = model._reducer.phases
        in_parts = phases[-1] == "all_gather"
        check_kind(optimizer, in_parts, model.schedule)
        self.optimizer = optimizer
        self._is_made = False
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._is_made = True
        self._steps: PartSteps | WholeSteps = (
            PartSteps(self, model) if in_parts else WholeSteps(self, model)
        )
        self._share_state()
        _watch(optimizer, weakref.ref(self))
        model._across.attach(self._steps)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Records a step with the gradients of the last backward. All ranks call it."""
        if closure is not None:
            raise Unsupported(
                "DistributedOptimizer.step(closure): the closure would run forward and backward "
                "within the step, which begins under the next forward; call step() without one"
            )
        self._steps.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch. A recorded step keeps its gradients."""
        check_is("True or False", set_to_none=set_to_none)
        if not set_to_none:
            self._steps.keep_gradients()
        super().zero_grad(set_to_none)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales the averaged gradients so that their norm is at most ``max_norm``, and returns the
        norm before that: ``torch.nn.utils.clip_grad_norm_`` for gradients of which each rank has a
        part. Between backward and ``step()``; all ranks call it."""
        check_is("a number", max_norm=max_norm)
        wanted: Any = norm_type  # torch takes "inf" as well
        if not (isinstance(wanted, str) and wanted == "inf"):
            check_is("a number", norm_type=wanted)
        order = float(wanted)
        if not order > 0:
            raise Unsupported(f"clip_grad_norm_: norm_type={norm_type} must be positive")
        return self._steps.clip(float(max_norm), order)

    def state_dict(self) -> dict[str, Any]:
        """The state, without communication: in torch's format under "priority" and "dear"; under
        "zero1" only this rank's part, for the same rank in a world of the same size."""
        return self._steps.state_dict()

    def full_state_dict(self) -> dict[str, Any]:
        """The whole state in torch's format, for any number of ranks, any schedule, and the plain
        optimizer. All ranks call it and get it; under "zero1" on the CPU, since it may not fit on
        a GPU."""
        return self._steps.full_state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a state of ``state_dict()``, ``full_state_dict()`` or the plain optimizer."""
        self._steps.load_state_dict(state_dict)
        self._share_state()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises: parameter groups cannot be added after construction."""
        if self._is_made:
            raise Unsupported(
                "DistributedOptimizer.add_param_group: the parts of the parameters are laid out "
                "already. Make the model and its optimizer anew, and load_state_dict() of "
                "full_state_dict()"
            )
        super().add_param_group(param_group)

    def _share_state(self) -> None:
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state

    def __getstate__(self) -> dict[str, Any]:
        raise Unsupported("DistributedOptimizer can't be pickled or copied; save its state_dict()")

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r})"


def _watch(inner: Optimizer, face: weakref.ref[DistributedOptimizer]) -> None:
    """Programs that had the optimizer before it was wrapped may go on to save and load by it."""

    def before_load(_: Optimizer, state_dict: dict[str, Any]) -> None:
        if (alive := face()) is not None:
            alive._steps.finish()

    def after_load(_: Optimizer) -> None:
        if (alive := face()) is not None:
            alive._steps.inner_has_loaded()
            alive._share_state()

    with contextlib.suppress(AttributeError):  # it does without the constructor of torch's class
        inner.register_load_state_dict_pre_hook(before_load)
        inner.register_load_state_dict_post_hook(after_load)
        inner.register_state_dict_pre_hook(_refuse_pieces)


def _refuse_pieces(inner: Optimizer) -> None:
    whole = {parameter for group in inner.param_groups for parameter in group["params"]}
    if any(isinstance(key, torch.Tensor) and key not in whole for key in inner.state):
        raise Unsupported(
            f"this {type(inner).__name__} was inside a DistributedOptimizer under 'zero1' or "
            "'zero2', so each rank has its part of the state only. Save full_state_dict() of the "
            "DistributedOptimizer, and load it into the next one, around a new optimizer"
        )
