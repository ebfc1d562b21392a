"""Observes which module of a forward needs which parameters, and in what order.

A module may use parameters that are not its own: ``nn.MultiheadAttention`` reads the weight of its
``out_proj`` and never calls it, tied weights are read in two places, and ``F.linear(x,
other.weight)`` reads another module's. So the first forward runs under a ``TorchFunctionMode``,
which sees every function call with its arguments. The forward of the module in which a parameter
is used first has to wait for that parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

# Functions whose result does not depend on the values in a tensor.
_READ_NO_NUMBER = {
    *("__len__", "dim", "element_size", "is_complex", "is_contiguous", "is_floating_point"),
    *("nelement", "ndimension", "numel", "requires_grad_", "size", "storage_offset", "stride"),
}
PROPERTIES_WITH_NUMBERS = {"H", "T", "data", "imag", "mH", "mT", "real"}


class Uses(TorchFunctionMode):
    """Calls ``used(number)`` for each parameter that is passed to a function of torch."""

    def __init__(self, parameters: Sequence[torch.Tensor], used: Callable[[int], None]) -> None:
        super().__init__()
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._used = used

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _reads_numbers(func):
            for tensor in _tensors_in((*args, *kwargs.values())):
                number = self._numbers.get(id(tensor))
                if number is not None:
                    self._used(number)
        return func(*args, **kwargs)


def _reads_numbers(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(func.__self__, "__name__", "") in PROPERTIES_WITH_NUMBERS
    return name not in _READ_NO_NUMBER


def _tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(value)
        elif isinstance(value, Mapping):
            yield from _tensors_in(value.values())


class Needs:
    """The parameters that one forward used, by module, in the order of first use."""

    def __init__(self, root: nn.Module, parameters: Sequence[torch.Tensor]) -> None:
        self._root = root
        self._parameters = parameters
        self._running: list[nn.Module] = []
        self._first: dict[int, nn.Module] = {}  # parameter's number -> module, in order of use

    def watch(self, run: Callable[[], Any]) -> Any:
        """Runs a forward and records the parameters it uses."""
        handles = []
        for module in self._root.modules():
            handles.append(module.register_forward_pre_hook(self._begins, prepend=True))
            handles.append(module.register_forward_hook(self._ends, always_call=True))
        try:
            with Uses(self._parameters, self._used):
                return run()
        finally:
            for handle in handles:
                handle.remove()

    def _begins(self, module: nn.Module, _: Any) -> None:
        self._running.append(module)

    def _ends(self, *_: Any) -> None:
        self._running.pop()

    def _used(self, number: int) -> None:
        module = self._running[-1] if self._running else self._root
        self._first.setdefault(number, module)

    @property
    def order(self) -> list[int]:
        """The parameters' numbers in the order of first use. Unused ones come before all others,
        since any module might need them."""
        unused = [n for n in range(len(self._parameters)) if n not in self._first]
        return [*unused, *self._first]

    @property
    def modules(self) -> list[tuple[nn.Module, list[int]]]:
        """Each module that was the first to use some parameters, with their numbers."""
        numbers: dict[nn.Module, list[int]] = {}
        for number, module in self._first.items():
            numbers.setdefault(module, []).append(number)
        return list(numbers.items())
