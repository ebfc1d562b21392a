"""The tensors in the output of a forward, and callbacks for when backward reaches them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten


def tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """All tensors in the output of a forward."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors_in(value)
    elif isinstance(output, (list, tuple, set)):
        for value in output:
            yield from tensors_in(value)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from tensors_in(getattr(output, field.name))


def when_backward_begins(output: Any, call: Callable[[], None]) -> bool:
    """Calls ``call`` when the first gradient of an output is there, which is when the outermost
    backward begins. Returns False if no output has a gradient."""
    called = False

    def begins(_: torch.Tensor) -> None:
        nonlocal called
        if not called:
            called = True
            call()

    learning = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    for tensor in learning:
        tensor.register_hook(begins)  # type: ignore[no-untyped-call]
    return bool(learning)


def when_backward_ends(output: Any, call: Callable[[], None]) -> None:
    """Calls ``call`` at the end of the outermost backward, on the thread that runs it."""
    when_backward_begins(output, lambda: at_end_of_this_backward(call))


def at_end_of_this_backward(call: Callable[[], None]) -> None:
    """Calls ``call`` at the end of the running backward."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


class _Once:
    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call

    def __call__(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call()

    __del__ = __call__


def when_this_backward_is_over(call: Callable[[], None]) -> None:
    """As ``at_end_of_this_backward``, but also if an exception ends the backward: autograd then
    drops the callback, whose ``__del__`` calls."""
    at_end_of_this_backward(_Once(call))


class _Together(torch.autograd.Function):
    """The identity on all outputs together. Backward from one output reaches the parameters behind
    all of them; outputs that are not in the loss have no gradient."""

    @staticmethod
    def forward(ctx: Any, clone: bool, *outputs: Any) -> Any:
        ctx.set_materialize_grads(False)
        if not clone:
            return outputs
        return tuple(o.clone() if isinstance(o, torch.Tensor) else o for o in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return (None, *gradients)


def tie_outputs(output: Any, clone: bool) -> Any:
    """Ties the outputs for the search of unused parameters. Backward then also reaches parameters
    of outputs that are not in the loss, without a gradient. ``clone``: copies the outputs, so that
    the loss may change them in place."""
    leaves, structure = tree_flatten(output)
    tied = _Together.apply(clone, *leaves)  # type: ignore[no-untyped-call]
    # A tensor without a graph stays itself; as an output of the function it would get one.
    chosen = [
        leaf if isinstance(leaf, torch.Tensor) and leaf.grad_fn is None else through
        for leaf, through in zip(leaves, tied, strict=True)
    ]
    return tree_unflatten(chosen, structure)
