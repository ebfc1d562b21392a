"""``delay_all_reduce_named_params``: parameters that are averaged in one piece, at a moment that
the user chooses: when the gradient of ``param_to_hook_all_reduce`` is computed.

Their gradients are parts of one flat buffer, which is all that travels. The moment must come after
their own gradients. Where it does not, torch leaves the result to chance, and nobody waits for it;
here a gradient that comes too late is an error, and backward ends when the average is complete.
Loses against buckets: nothing is sent before that moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from dpcore._ddp.outputs import at_end_of_this_backward
from dpcore.errors import Error, Unsupported
from dpcore.gradient_group import GradientGroup


class DelayedGradients:
    """One flat buffer and whose gradients it holds."""

    def __init__(
        self, group: GradientGroup, parameters: Sequence[nn.Parameter], moment: nn.Parameter
    ) -> None:
        kinds = {(parameter.dtype, parameter.device) for parameter in parameters}
        if len(kinds) > 1:
            raise Unsupported(
                "delay_all_reduce_named_params travel in one buffer, and are of several kinds: "
                + ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
            )
        dtype, device = kinds.pop()
        self._group = group
        self._parameters = list(parameters)
        sizes = [parameter.numel() for parameter in parameters]
        self.flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
        self.views = [
            part.view(parameter.shape)
            for part, parameter in zip(torch.split(self.flat, sizes), parameters, strict=True)
        ]
        self.synchronised = True
        self._pending: Any = None
        self._version = 0  # of the buffer when it was sent: adding to any of its parts counts
        moment.register_post_accumulate_grad_hook(self._send)  # type: ignore[no-untyped-call]

    def after_forward(self, synchronised: bool) -> None:
        """Backward is going to add gradients to the buffer."""
        self.synchronised = synchronised
        missing = [p.grad is None for p in self._parameters]
        if all(missing):
            self.flat.zero_()
        for parameter, view, is_missing in zip(self._parameters, self.views, missing, strict=True):
            if is_missing:
                view.zero_()
                parameter.grad = view

    def _send(self, _: torch.Tensor) -> None:
        if self.synchronised and self._pending is None:
            self._pending = self._group.all_reduce(self.flat, "mean", async_op=True)
            self._version = self.flat._version
            at_end_of_this_backward(self._wait)

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        too_late = self.flat._version != self._version
        pending.wait()
        if too_late:
            raise Error(
                "a delayed parameter got its gradient after that of param_to_hook_all_reduce, when "
                "the delayed ones were on their way already; choose one that comes later in "
                "backward: the first layer's"
            )
