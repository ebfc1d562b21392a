"""``parameter.grad`` under "zero1" and "zero2": a gradient of which this rank has only a part.

It may be zeroed or dropped, and its shape may be read. Reading its values raises an error that
says what to call instead.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from dpcore.ddp.wrapper.needs import PROPERTIES_WITH_NUMBERS
from dpcore.errors import Unsupported

if TYPE_CHECKING:
    from dpcore import _C

_OVERWRITES = {"zero_", "_foreach_zero_"}
_TELLS_NO_NUMBER = {
    *("detach_", "dim", "element_size", "is_complex", "is_contiguous"),
    *("is_floating_point", "nelement", "numel", "requires_grad_", "size", "stride"),
    "_has_compatible_shallow_copy_type",
    # What dynamo asks of a parameter's gradient, which it looks at when it compiles.
    *("_is_view", "_is_zerotensor", "is_conj", "is_inference", "is_neg", "storage_offset"),
    "untyped_storage",
}
_CONVERTS = {"bfloat16", "cpu", "double", "float", "half", "to"}  # or returns the tensor itself


class GradientInParts(torch.Tensor):
    """A gradient that refuses to be read. It gets its own class back when it is zeroed."""

    wait: Any  # waits until no operation reads or writes its memory
    is_lent: bool  # under "zero2": its memory is reused for other gradients

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _OVERWRITES:
            for gradient in args[0] if isinstance(args[0], (list, tuple)) else args[:1]:
                if isinstance(gradient, GradientInParts):
                    gradient.wait()
                    own_class: Any = torch.Tensor
                    is_lent = gradient.is_lent
                    gradient.__class__ = own_class
                    if is_lent:
                        gradient.data = gradient.new_zeros(gradient.shape)
            return func(*args, **(kwargs or {}))
        if name in _TELLS_NO_NUMBER or (name == "__get__" and not _has_numbers(func.__self__)):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if name in _CONVERTS:
            with torch._C.DisableTorchFunctionSubclass():
                converted = func(*args, **(kwargs or {}))
            if converted is args[0]:
                return converted
        if name == "__set__" and args[0] is args[1]:
            return None  # the last step of module.to()
        raise Unsupported(
            "this gradient's average is spread over the ranks, by schedule='zero1' or 'zero2', so "
            ".grad can't be read. To clip, call optimizer.clip_grad_norm_(max_norm); to look at "
            "gradients, call model.full_gradients() on all ranks between backward and step(); to "
            "convert the module, call optimizer.zero_grad() before"
        )


def _has_numbers(attribute: Any) -> bool:
    """Whether an attribute of a tensor gives its values, as ``.data`` does and ``.shape`` not."""
    return getattr(attribute, "__name__", "") in PROPERTIES_WITH_NUMBERS


class Guard:
    """Turns gradients into ``GradientInParts``: the reducer calls it with True when backward ends.
    See ``dpcore.ddp.wrapper.in_flight.Guard``."""

    def __init__(self, reducer: _C.Reducer, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        of_reducer = weakref.ref(reducer)  # which owns this object

        def wait() -> None:
            if (alive := of_reducer()) is not None:
                alive.wait_for_gradients()

        members = {"wait": staticmethod(wait), "is_lent": reducer.whole_buckets > 0}
        self._kind = type("GradientInParts", (GradientInParts,), members)
        # By number: a tensor that is held here would be copied before the next backward fills its
        # part of the bucket.
        self._deferred: set[int] = set()

    def __call__(self, in_flight: bool) -> bool:
        if in_flight:
            self._deferred = set()
            for number, parameter in enumerate(self._parameters):
                if parameter.grad is not None:
                    self._deferred.add(number)
                    parameter.grad.__class__ = self._kind
        return True

    def has(self, number: int) -> bool:
        """Whether any rank had a gradient of this parameter in the last backward."""
        return number in self._deferred

    def is_kept(self) -> bool:
        """Whether a gradient of the last backward is still in ``.grad``, so that the next backward
        would add to it."""
        return any(
            isinstance(self._parameters[number].grad, GradientInParts) for number in self._deferred
        )
