"""Gradients that a launch schedule leaves in flight: the first use of one waits for all of them.

A schedule that defines ``optimizer_step`` may return from backward while buckets are in flight.
Until they arrive, ``p.grad`` holds values that are local or half averaged, and programs read
gradients before the optimizer does: to clip them, to log a norm, to find infinities. So these
tensors temporarily get a class of their own. torch calls its ``__torch_function__`` before any
function on the tensor; it waits first, then restores the class of all of them. The tensors stay
the same objects over the same memory.

Not detected: use of a view of a gradient that was made before this backward, and C++ extensions
that read a tensor's memory without a call of torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from dpcore.errors import Error

if TYPE_CHECKING:
    from dpcore import _C


class GradientInFlight(torch.Tensor):
    """The class of a gradient until its average is complete."""

    wait: Any  # waits for all gradients of the model

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        for kind in types:
            if issubclass(kind, GradientInFlight):
                kind.wait()
        return func(*args, **(kwargs or {}))


class Guard:
    """Marks gradients in flight. The reducer calls it with True when backward ends with buckets in
    flight, and with False when the last of them is complete."""

    def __init__(self, reducer: _C.Reducer, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._deferred: list[torch.Tensor] = []
        of_reducer = weakref.ref(reducer)  # which owns this object

        def wait() -> None:
            alive = of_reducer()
            if alive is None:
                raise Error(
                    "this gradient was in flight when its DataParallel was dropped, so it may not "
                    "be averaged; keep the model until its optimizer has stepped"
                )
            alive.wait_for_gradients()

        self._kind = type("GradientInFlight", (GradientInFlight,), {"wait": staticmethod(wait)})

    def __call__(self, in_flight: bool) -> bool:
        if not in_flight:
            for gradient in self._deferred:
                gradient.__class__ = torch.Tensor
            self._deferred = []
            return True
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if any(type(gradient) is not torch.Tensor for gradient in gradients):
            return False  # the class of a tensor subclass cannot be replaced
        self._deferred = gradients
        for gradient in gradients:
            gradient.__class__ = self._kind
        return True
