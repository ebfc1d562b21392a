"""NaN and Inf: in a gradient that an optimizer is about to step with, and in a broadcast buffer.

The kernels that add gradients look at every result while it is in a register
(csrc/comm/reduce/not_finite.h), and a rank that finds one remembers whose gradient it came from.
It is told when an optimizer steps, and not before: a program may skip the step or repair the
gradient. Each rank sees the part of a bucket that it adds. Where they share memory they also see
what the others have found, so all tell the same; between hosts, often one rank tells alone.

Groups whose sums are made elsewhere (NCCL, MPI, groups of torch, communication hooks) have no such
look, nor has a single rank, which adds nothing. There DPCORE_CHECK_FINITE=1 or mistakes="all"
reads the averages once before each step, which is a pass over all of them; it does not tell the
rank, and it sees no gradients under "zero1" and "zero2".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import nn

from dpcore import _C
from dpcore.comm.communicators.protocol import end_for_all
from dpcore.ddp.mistakes.comparisons import ranks_in_words
from dpcore.errors import Error

if TYPE_CHECKING:
    from dpcore.ddp.mistakes.reports import Reports

_KIND = "not finite"
_TYPES_OF_BUFFERS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_REMEDY = (
    "torch.autograd.set_detect_anomaly(True) names the operation that makes a NaN. To skip such a "
    "step, skip it on all ranks alike, as torch.amp.GradScaler does"
)


class Averaged(Protocol):
    """A wrapped model, as far as it matters here."""

    module: nn.Module
    group: Any
    _reducer: _C.Reducer
    _mistakes: Reports
    _parameters_by_number: list[nn.Parameter]

    @property
    def _across(self) -> Any: ...


class Found(NamedTuple):
    """The first gradient of a step with NaN or Inf, as ``_C.Reducer.not_finite`` has it."""

    number: int  # of the gradient
    name: str
    rank: int  # whose it was; -1: no rank's, the sum overflowed
    ranks: list[int]  # those with one in the same few elements
    element: int  # the first one
    nans: int  # in the average, or in this rank's part of it
    infs: int
    elements: int  # of that; 0 where this rank has no average of the first one
    step: int
    narrowed_to: str  # the type in which it travels, if that is not its own


# ---- gradients -------------------------------------------------------------------------------


def check(model: Averaged, optimizer: torch.optim.Optimizer | None) -> None:
    """Called before an optimizer of the model changes anything. None: that of the phase "update",
    whose gradients may not be readable."""
    reducer = model._reducer
    record = reducer.not_finite
    if record is None and (reducer.finds_not_finite or not model._mistakes.looks_at_all_gradients):
        return
    if getattr(optimizer, "found_inf", None) is not None:
        return  # it skips the step itself: a scaler of gradients has told it to
    if record is not None and optimizer is not None and model._across is not None:
        return  # this is for the update of a bucket to tell
    if record is not None:
        found = Found(*record)
        if _is_there(model, optimizer, found.number):
            _tell(model, _in_words(model, found))
    elif optimizer is not None and (text := _look(model, optimizer)):
        _tell(model, text)


def _is_there(model: Averaged, optimizer: torch.optim.Optimizer | None, number: int) -> bool:
    """Whether the optimizer steps with this gradient, and the program has not repaired it."""
    if optimizer is None:
        gradient = model._across.steps().recorded_gradient(number)
        return gradient is None or not _is_finite(gradient)
    parameter = model._parameters_by_number[number]
    if not any(parameter is other for group in optimizer.param_groups for other in group["params"]):
        return False
    return parameter.grad is not None and not _is_finite(parameter.grad)


def _is_finite(gradient: torch.Tensor) -> bool:
    return bool(torch.isfinite(gradient).all())


def _tell(model: Averaged, text: str) -> None:
    """If it is an error, the ranks that saw nothing end with it as well."""
    try:
        model._mistakes.warn(_KIND, text)
    except Error as problem:
        end_for_all(model.group, problem)
        raise


def _in_words(model: Averaged, found: Found) -> str:
    narrowed = f" (which travels as {found.narrowed_to})" if found.narrowed_to else ""
    what = f"{found.name}{narrowed}"
    average = "the average goes to every rank"
    if found.elements > 0:
        is_all = found.elements == model._parameters_by_number[found.number].numel()
        where = "which goes to every rank" if is_all else "of which this rank has a part"
        average = (
            f"the average, {where}, has {_counts(found.nans, found.infs)} among {found.elements} "
            "elements"
        )
    if found.rank < 0:
        said = (
            f"the gradients of {what} are finite, and their sum overflows at element "
            f"{found.element}: {average}. Scale the loss down, or let gradients travel in a wider "
            "type"
        )
    else:
        ranks = found.ranks or [found.rank]
        if len(ranks) == 1:
            whose = f"rank {found.rank}'s gradient of {what} is not finite"
            look = f"Look at the loss and the inputs of rank {found.rank} in step {found.step}"
        elif len(ranks) == model.group.world_size:
            whose = f"the gradients of {what} are not finite on any rank"
            look = "Where training diverges, lower the learning rate or clip gradients"
        else:
            whose = f"the gradients of {what} on {ranks_in_words(ranks)} are not finite"
            look = f"Look at the loss and the inputs of these ranks in step {found.step}"
        said = f"{whose}, first at element {found.element}; {average}. {look}. {_REMEDY}"
    return f"rank {model.group.rank}: step {found.step}: {said}"


def _counts(nans: int, infs: int) -> str:
    both = ((nans, "NaN"), (infs, "Inf"))
    return " and ".join(f"{count} {what}" for count, what in both if count)


def _look(model: Averaged, optimizer: torch.optim.Optimizer) -> str:
    """One pass over the averages; what is wrong with them, or nothing."""
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    averages = {
        number: _values(parameter.grad)
        for number, parameter in enumerate(model._parameters_by_number)
        if id(parameter) in stepped and parameter.grad is not None
    }
    if _are_finite(averages.values()):
        return ""
    number, average = next((n, a) for n, a in averages.items() if not _is_finite(a))
    wanted = model._parameters_by_number[number]
    name = next(name for name, p in model.module.named_parameters() if p is wanted)
    nans, infs = int(average.isnan().sum()), int(average.isinf().sum())
    first = int(torch.isfinite(average).logical_not().flatten().nonzero()[0])
    step = model._reducer.completed + model._reducer.is_in_flight
    return (
        f"rank {model.group.rank}: step {step}: the averaged gradient of {name} "
        f"has {_counts(nans, infs)} among {average.numel()} elements, first at element "
        f"{first}. Look at the loss and the inputs of each rank in that step. {_REMEDY}"
    )


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient._values() if gradient.is_sparse else gradient


def _are_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """One wait for each device."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(torch.isfinite(tensor).all())
    return all(bool(torch.stack(each).all()) for each in by_device.values())


# ---- buffers ---------------------------------------------------------------------------------


class FiniteBuffers:
    """The broadcast buffers of a model that have had no NaN so far. One that gets a NaN is told, on
    every rank. A buffer that begins with one may mean it, and so may any buffer with an Inf: masks
    and the extremes of observers are made of them."""

    def __init__(self, reports: Reports, rank: int) -> None:
        self._reports, self._rank = reports, rank
        self._known: set[str] = set()  # names of those that had no NaN in some forward
        self._names: list[str] = []
        self._parts: list[torch.Tensor] = []
        self._is_new = False

    def watch(self, parts: Mapping[str, torch.Tensor]) -> None:
        """Takes the memory through which buffers are sent, by their names."""
        can_have = {
            name: part
            for name, part in parts.items()
            if part.dtype in _TYPES_OF_BUFFERS and part.device.type == "cpu"
        }
        self._names, self._parts = list(can_have), list(can_have.values())
        self._is_new = True

    def check(self, forward: int, root: int) -> None:
        """Called when buffers have come from rank ``root``."""
        if not self._reports.is_on:
            return
        while (at := _C.first_with_nan(self._parts)) is not None:
            name, part = self._names.pop(at), self._parts.pop(at)
            if name in self._known:
                self._known.remove(name)
                self._reports.warn(
                    "buffer not finite",
                    f"rank {self._rank}: forward {forward}: rank {root}'s buffer {name}, which "
                    f"goes to every rank, has {int(part.isnan().sum())} NaN among {part.numel()} "
                    f"elements, and had none before. Look at the inputs of rank {root} in the "
                    "forward before it. A running statistic keeps a NaN: go on from the buffers of "
                    "a checkpoint",
                )
        if self._is_new:
            self._known.update(self._names)
            self._is_new = False
