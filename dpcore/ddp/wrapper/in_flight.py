"""Gradients that a launch schedule leaves in flight: whoever uses one first waits for all of them.

A schedule that defines ``optimizer_step`` may return from backward while buckets are on their way.
Until then ``p.grad`` holds numbers that are this rank's own or half averaged, and programs read
gradients before the optimizer does: to clip them, to log a norm, to look for infinities. So these
tensors get a class of their own until they are final. torch asks the class of a tensor before it
calls a function on it, and this one waits first, then gives all of them their class back. The
tensors stay the same objects over the same memory.

Not seen: a view of a gradient that was made before this backward, and C++ extensions that take a
tensor and read its memory without a call of torch in between.
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
    """What a gradient is until its average is there."""

    wait: Any  # of the model that it belongs to

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        for kind in types:
            if issubclass(kind, GradientInFlight):
                kind.wait()
        return func(*args, **(kwargs or {}))


class Guard:
    """Called by the reducer: with True when backward ends with buckets in flight, with False when
    the last of them is complete."""

    def __init__(self, reducer: _C.Reducer, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._deferred: list[torch.Tensor] = []
        of_reducer = weakref.ref(reducer)  # which owns this object

        def wait() -> None:
            alive = of_reducer()
            if alive is None:
                raise Error(
                    "this gradient was in flight when its DataParallel was dropped, so nobody "
                    "knows whether it is averaged; keep the model until its optimizer has stepped"
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
            return False  # a class of the program's own can't be replaced
        self._deferred = gradients
        for gradient in gradients:
            gradient.__class__ = self._kind
        return True
