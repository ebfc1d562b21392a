"""``with model.weighted(count):`` the mean over all samples, of which ranks have different numbers.

On rank r of R, a loss that is a mean over ``n_r`` samples has the gradient ``g_r``. Averaging gives
``sum(g_r) / R``, in which a sample of a small batch counts more. The mean over all samples is
``sum(n_r * g_r) / N`` with ``N = sum(n_r)``, which is the average of ``g_r * (n_r * R / N)``. By
linearity that factor may be applied wherever the whole gradient passes. The cheapest place is where
it enters the outputs of the wrapper.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

from dpcore.comm.communicators.read_back import numbers_in
from dpcore.ddp.wrapper.arguments import refuse_virtual
from dpcore.ddp.wrapper.module_state import digest_of
from dpcore.ddp.wrapper.outputs import tensors_in
from dpcore.errors import Error, Unsupported

if TYPE_CHECKING:
    from dpcore.ddp.wrapper.wrapped import Wrapped

_CONTENT = digest_of(["DataParallel.weighted"])


@contextlib.contextmanager
def weighted(model: Wrapped, count: Any) -> Iterator[None]:
    """The block of ``DataParallel.weighted``."""
    refuse_virtual(model, "weighted(): shards() weighs samples, and it")
    if model._weight is not None:
        raise Error("weighted(): the model is in a block of weighted() already")
    if model._join_config.enable:
        raise Unsupported(
            "weighted() does not work within join(); let a rank without samples run a forward and "
            "a backward with any batch, in a block of weighted(0)"
        )
    model._weight = _factor(model, _number(count))
    try:
        yield
    finally:
        model._weight = None


def _number(count: Any) -> float:
    if isinstance(count, torch.Tensor) and count.numel() == 1:
        count = count.item()
    if isinstance(count, bool) or not isinstance(count, Real):
        kind = type(count).__name__
        raise TypeError(f"weighted(count): expected a number of samples or tokens, not a {kind}")
    return float(count)


def _factor(model: Wrapped, count: float) -> float:
    """The factor of this rank's gradients. All ranks call it."""
    group = model._model_group
    mine = torch.tensor([count], dtype=torch.float64, device=model.device)
    gathered = mine.new_empty(group.world_size)
    group.all_gather(gathered, mine, content=_CONTENT)
    counts = numbers_in(gathered, group)
    wrong = {rank: n for rank, n in enumerate(counts) if not 0 <= n < math.inf}
    if wrong:
        rank, its = next(iter(wrong.items()))
        raise Unsupported(
            f"rank {group.rank}: weighted(count): rank {rank} gave {its:g}; a count is a number of "
            "samples or tokens, at least 0"
        )
    total = math.fsum(counts)
    if total == 0:
        raise Unsupported(
            f"rank {group.rank}: weighted(count): the counts of all ranks are 0, and there is no "
            "mean over nothing; leave out this step on all ranks"
        )
    return count * group.world_size / total


class _Scaled(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, factor: float, clone: bool, tensor: torch.Tensor) -> torch.Tensor:
        ctx.factor = factor
        return tensor.clone() if clone else tensor

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        # The mean over no samples is NaN, and so is its gradient.
        scaled = torch.zeros_like(gradient) if ctx.factor == 0 else gradient * ctx.factor
        return None, None, scaled


def scale_gradients(output: Any, factor: float, clone: bool) -> Any:
    """The output of a forward, whose gradients are multiplied by ``factor`` on their way into the
    module. Each tensor gets a node of its own: a loss that the module has computed of its logits,
    and returns beside them, must be scaled once. ``clone``: see ``tie_outputs``."""
    if not any(tensor.requires_grad for tensor in tensors_in(output)):
        raise Unsupported(
            f"weighted(): the output of this forward, a {type(output).__name__}, has no tensor "
            "with a gradient that dpcore can find, so its gradients would not be weighted; return "
            "tensors, in tuples, lists, mappings or dataclasses"
        )
    if factor == 1:
        return output  # as many samples as on average: the same bits as without weighted()
    done: dict[int, torch.Tensor] = {}  # a tensor that is returned twice stays one

    def scaled(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad:
            return tensor
        if id(tensor) not in done:
            done[id(tensor)] = _Scaled.apply(factor, clone, tensor)  # type: ignore[no-untyped-call]
        return done[id(tensor)]

    return _map_tensors(output, scaled)


def _map_tensors(output: Any, call: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A copy of the output with ``call(tensor)`` for each tensor that ``tensors_in`` finds."""

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return call(leaf)
        if isinstance(leaf, set):
            return {of_leaf(value) for value in leaf}
        if isinstance(leaf, MutableMapping):
            changed: Any = copy.copy(leaf)
            for name, value in leaf.items():
                changed[name] = _map_tensors(value, call)
            return changed
        if isinstance(leaf, Mapping):
            return type(leaf)({n: _map_tensors(v, call) for n, v in leaf.items()})  # type: ignore[call-arg]
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            changed = copy.copy(leaf)
            for field in dataclasses.fields(leaf):
                value = _map_tensors(getattr(leaf, field.name), call)
                object.__setattr__(changed, field.name, value)
            return changed
        return leaf

    return tree_map(of_leaf, output)
