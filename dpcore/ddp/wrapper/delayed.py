"""``delay_all_reduce_named_params``: parameters that are averaged in one piece, at a moment that
the user chooses: when the gradient of ``param_to_hook_all_reduce`` is computed.

Their gradients are views of one flat buffer, which is sent as a whole. It must be sent after all of
them are computed. torch neither checks that nor waits for the result; here a gradient that comes
too late is an error, and backward ends when the average is complete. Buckets are faster, because
they are sent earlier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from dpcore.comm.communicators.protocol import GradientGroup
from dpcore.ddp.wrapper.outputs import at_end_of_this_backward
from dpcore.errors import Error, Unsupported


class DelayedGradients:
    """One flat buffer and the parameters whose gradients it holds."""

    def __init__(
        self, group: GradientGroup, parameters: Sequence[nn.Parameter], moment: nn.Parameter
    ) -> None:
        kinds = {(parameter.dtype, parameter.device) for parameter in parameters}
        if len(kinds) > 1:
            raise Unsupported(
                "delay_all_reduce_named_params travel in one buffer, and are of several kinds: "
                + ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
            )
        self._kind = kinds.pop()
        self._group = group
        self._parameters = list(parameters)
        self._make_flat()
        self._elsewhere: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.synchronised = True
        self._pending: Any = None
        self._version = 0  # of the buffer when it was sent; adding to any view raises it
        moment.register_post_accumulate_grad_hook(self._send)  # type: ignore[no-untyped-call]

    def _make_flat(self) -> None:
        dtype, device = self._kind
        sizes = [parameter.numel() for parameter in self._parameters]
        self.flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
        self.views = [
            part.view(parameter.shape)
            for part, parameter in zip(torch.split(self.flat, sizes), self._parameters, strict=True)
        ]

    def after_forward(self, synchronised: bool) -> None:
        """Prepares the buffer for the gradients of the next backward."""
        self._complete()
        self.synchronised = synchronised
        missing = [p.grad is None for p in self._parameters]
        if any(missing):
            self._make_flat()  # a new one, since the program may have kept the last gradients
        for parameter, view, is_missing in zip(self._parameters, self.views, missing, strict=True):
            if is_missing:
                view.zero_()
                parameter.grad = view.detach()  # so `.grad.data = x` does not change our view

    @torch.no_grad()
    def _send(self, _: torch.Tensor) -> None:
        if self.synchronised:
            self._complete()
            # Gradients that the program has moved to its own memory are averaged there.
            self._elsewhere = [
                (grad, view)
                for parameter, view in zip(self._parameters, self.views, strict=True)
                if (grad := parameter.grad) is not None and not _is_over(grad, view)
            ]
            for grad, view in self._elsewhere:
                view.copy_(grad)
            self._pending = self._group.all_reduce(self.flat, "mean", async_op=True)
            self._version = self.flat._version
            at_end_of_this_backward(self._wait)

    @torch.no_grad()
    def _wait(self) -> None:
        if self._pending is None:
            return
        too_late = self.flat._version != self._version
        self._complete()
        for grad, view in self._elsewhere:
            grad.copy_(view)
        self._elsewhere = []
        if too_late:
            raise Error(
                "a delayed parameter got its gradient after that of param_to_hook_all_reduce, when "
                "the delayed ones had been sent already; choose one that comes later in "
                "backward: the first layer's"
            )

    def _complete(self) -> None:
        """Waits for the all-reduce. After an exception in backward, the next step does this."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()


def _is_over(grad: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether a gradient has the view's memory and strides."""
    return (
        grad.layout is torch.strided
        and grad.data_ptr() == view.data_ptr()
        and grad.stride() == view.stride()
    )
