"""``mixed_precision=_MixedPrecision(param_dtype, reduce_dtype, buffer_dtype)``.

Forward runs with casts of the parameters. The casts are part of autograd's graph, so gradients
arrive in the parameters' own type, and the user's code sees parameters, gradients and optimizer in
full precision. Buckets are sent in ``reduce_dtype``, by default ``param_dtype``. Buffers are cast
once. The module also has the casts during backward, where activation checkpointing runs parts of
forward again.

torch instead swaps the memory of each parameter before and after each forward and backward, on a
stream of its own. The casts are the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from dpcore.ddp.wrapper.outputs import tensors_in, when_this_backward_is_over
from dpcore.ddp.wrapper.parameters import kept_parameters


class MixedPrecision:
    """Runs one wrapped module with cast parameters."""

    def __init__(self, settings: Any, module: nn.Module, ignored: set[str]) -> None:
        self._module = module
        self._ignored = ignored
        self.param_dtype: torch.dtype | None = settings.param_dtype
        self.reduce_dtype: torch.dtype | None = settings.reduce_dtype or settings.param_dtype
        if settings.buffer_dtype is not None:
            for name, buffer in module.named_buffers():
                if name not in ignored and buffer.is_floating_point():
                    buffer.data = buffer.to(settings.buffer_dtype)
        for _, parameter in self._own():
            # Attributes that programs for torch read to see the types used in forward.
            names = vars(parameter)
            names["_fp_param"] = parameter.data
            names["_mp_param"] = torch.empty(0, dtype=self.param_dtype, device=parameter.device)
        name_of = {id(parameter): name for name, parameter in self._own()}
        self._places = [
            (part._parameters, own, parameter, name_of[id(parameter)])
            for part in module.modules()
            for own, parameter in part._parameters.items()
            if parameter is not None and id(parameter) in name_of
        ]
        self._casts: dict[str, torch.Tensor] = {}  # from the last forward, for its backward
        self._is_narrow = False

    def _own(self) -> Iterable[tuple[str, nn.Parameter]]:
        for name, parameter in kept_parameters(self._module, self._ignored):
            if parameter.is_floating_point():
                yield name, parameter

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module's forward in ``param_dtype``."""
        if self.param_dtype is None:
            return self._module(*inputs, **kwargs)
        casts = self._cast_parameters()
        inputs, kwargs = _cast((inputs, kwargs), self.param_dtype)
        output = functional_call(self._module, casts, inputs, kwargs)
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                self._casts = casts
                tensor.register_hook(self._become_narrow)  # type: ignore[no-untyped-call]
        return output

    def _cast_parameters(self) -> dict[str, torch.Tensor]:
        return {name: parameter.to(self.param_dtype) for name, parameter in self._own()}

    def _become_narrow(self, _: torch.Tensor) -> None:
        """Gives the module the casts when backward begins."""
        if self._is_narrow:
            return
        with torch.enable_grad():
            casts: dict[str, Any] = self._casts or self._cast_parameters()
        self._is_narrow = True
        when_this_backward_is_over(self._become_wide)
        for parameters, own, _parameter, name in self._places:
            parameters[own] = casts[name]

    def _become_wide(self) -> None:
        for parameters, own, parameter, _ in self._places:
            parameters[own] = parameter
        self._casts, self._is_narrow = {}, False


def _cast(values: Any, dtype: torch.dtype) -> Any:
    """Casts the floating point tensors in a structure to ``dtype``."""
    return torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, values
    )
