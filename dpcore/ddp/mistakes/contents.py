"""All that ranks have in common in data parallel training, as a list that they can compare.

Parameters, buffers, an optimizer's hyperparameters and state, and whatever further modules, state
dictionaries and tensors a program has (an average of the model, a scheduler, a gradient scaler).
Each is an ``Entry``: a name and a value, which is a tensor or a text.
"""

from __future__ import annotations

import ctypes
import hashlib
import pickle
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel.distributed import DistributedDataParallel

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))
_HYPERPARAMETERS = "hyperparameters"
_OWN_LOSS = "prev_loss"  # in the state of LBFGS: each rank's own
_REPLACED = "rank 0's value replaces it before the forward after a step"
_OF_OWN_BATCHES = "batch normalisation keeps statistics of each rank's own batches"


class Entry(NamedTuple):
    """A value that ranks compare."""

    section: str  # such as "parameters": for each, the last step after which it was equal is known
    name: str
    value: torch.Tensor | str
    may_differ: str = ""  # why it differs between ranks in right programs

    @property
    def form(self) -> str:
        """What it is without its value."""
        kind = " (may differ)" if self.may_differ else ""
        if isinstance(self.value, str):
            return self.name + kind
        return f"{self.name}: {list(self.value.shape)} {self.value.dtype}{kind}"


class Contents:
    """The entries of some objects, in the same order on all ranks."""

    def __init__(self, things: Iterable[Any]) -> None:
        self.entries: list[Entry] = []
        self.notes: list[str] = []  # about what is left out
        self._names: dict[int, str] = {}  # of parameters, by id
        self._kinds: dict[str, int] = {}
        for number, thing in enumerate(things):
            self._add(thing, number)
        # A cause comes before its effects.
        self.entries.sort(key=lambda entry: not entry.section.startswith(_HYPERPARAMETERS))

    def _add(self, thing: Any, number: int) -> None:
        if isinstance(thing, nn.Module):
            label = self._numbered(thing)
            self._add_module(thing, "" if number == 0 else f"{label} ")
        elif isinstance(thing, torch.optim.Optimizer):
            self._add_optimizer(thing, self._numbered(thing))
        elif isinstance(thing, torch.Tensor | Mapping | list | tuple):
            label = self._numbered(thing)
            self._add_value(label, label, thing)
        elif callable(getattr(thing, "state_dict", None)):
            label = self._numbered(thing)
            self._add_value(label, label, thing.state_dict())
        elif thing is not None:
            raise TypeError(
                f"check: argument {number + 1} is a {type(thing).__name__}; ranks can compare "
                "modules, optimizers, tensors, and what has a state_dict() or is one"
            )

    def _numbered(self, thing: Any) -> str:
        """The name of its class, with a number from the second of this class on."""
        is_wrapped = isinstance(thing, DistributedDataParallel)
        kind = type(thing.module if is_wrapped else thing).__name__
        count = self._kinds[kind] = self._kinds.get(kind, 0) + 1
        return kind if count == 1 else f"{kind} {count}"

    def _add_module(self, given: nn.Module, label: str) -> None:
        module, ignored, is_replaced = given, frozenset[str](), False
        if isinstance(given, DistributedDataParallel):
            wrapped: Any = given
            module, ignored = wrapped.module, frozenset(wrapped.parameters_to_ignore)
            is_replaced = wrapped.broadcast_buffers
        for name, parameter in module.named_parameters():
            self._names.setdefault(id(parameter), f"{label}{name}")
            if name not in ignored:
                self._add_tensor(f"{label}parameters", f"{label}parameter {name}", parameter)
        for path, part in module.named_modules():
            for name, buffer in part.named_buffers(recurse=False):
                full = f"{path}.{name}" if path else name
                if full in ignored:
                    continue
                is_own = isinstance(part, _BatchNorm) and not isinstance(part, nn.SyncBatchNorm)
                reason = _REPLACED if is_replaced else _OF_OWN_BATCHES if is_own else ""
                self._add_tensor(f"{label}buffers", f"{label}buffer {full}", buffer, reason)
        if ignored:
            self.notes.append(f"left out, as DataParallel ignores them: {some_of(sorted(ignored))}")

    def _add_optimizer(self, optimizer: torch.optim.Optimizer, label: str) -> None:
        names = {}
        for number, group in enumerate(optimizer.param_groups):
            where = f"{label}, group {number}"
            for at, parameter in enumerate(group["params"]):
                names[parameter] = self._names.get(id(parameter), f"group {number}, parameter {at}")
            options = {name: value for name, value in group.items() if name != "params"}
            options["number of parameters"] = len(group["params"])
            self._add_value(f"{_HYPERPARAMETERS} of {label}", where, options)
        if _keeps_parts(optimizer):
            self.notes.append(f"left out: the state of {label}, of which each rank keeps a part")
            return
        for parameter, name in names.items():
            state = optimizer.state.get(parameter, {})
            kept = {key: value for key, value in state.items() if key != _OWN_LOSS}
            self._add_value(f"state of {label}", f"{label}, state of {name}", kept)

    def _add_value(self, section: str, name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._add_tensor(section, name, value)
        elif isinstance(value, Mapping):
            for key in sorted(value, key=str):
                self._add_value(section, f"{name}: {key}", value[key])
        elif isinstance(value, list | tuple) and not all(isinstance(v, _PLAIN) for v in value):
            for number, one in enumerate(value):
                self._add_value(section, f"{name}[{number}]", one)
        elif isinstance(value, (list, tuple, *_PLAIN)):
            self.entries.append(Entry(section, name, repr(value)))

    def _add_tensor(
        self, section: str, name: str, tensor: torch.Tensor, may_differ: str = ""
    ) -> None:
        if torch.nn.parameter.is_lazy(tensor):
            self.notes.append(f"left out: {name}, which has no shape yet")
        elif hasattr(tensor, "device_mesh"):
            self.notes.append(f"left out: {name}, a DTensor, of which each rank has a part")
        elif tensor.layout == torch.sparse_coo:
            rows = tensor.detach().coalesce()
            self._add_tensor(section, f"{name}, indices", rows.indices(), may_differ)
            self._add_tensor(section, f"{name}, values", rows.values(), may_differ)
        elif tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
            self.notes.append(f"left out: {name}, {tensor.dtype} in the form {tensor.layout}")
        else:
            self.entries.append(Entry(section, name, tensor.detach(), may_differ))


def _keeps_parts(optimizer: Any) -> bool:
    kinds = {kind.__name__ for kind in type(optimizer).__mro__}
    is_in_parts = type(vars(optimizer).get("_steps")).__name__ == "PartSteps"
    return "ZeroRedundancyOptimizer" in kinds or ("DistributedOptimizer" in kinds and is_in_parts)


def some_of(names: list[str]) -> str:
    """The first of the names, for a message."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def bytes_of(value: torch.Tensor | str) -> torch.Tensor:
    """The value as bytes on the host."""
    if isinstance(value, str):
        return torch.frombuffer(bytearray(value.encode() or b"\0"), dtype=torch.uint8)
    plain = value.resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8)


def digest_of_value(value: torch.Tensor | str) -> int:
    """A hash of 56 bits of all of its bytes."""
    data = bytes_of(value)
    # Not by numpy(), after which the memory of a buffer could not be resized any more.
    memory = (ctypes.c_char * len(data)).from_address(data.data_ptr()) if len(data) else b""
    return _short(memory)


def _short(data: Any) -> int:
    return int.from_bytes(hashlib.sha256(data).digest()[:7], "big")


def random_states() -> Iterator[tuple[str, int]]:
    """The generators of random numbers of this process, with a hash of each one's state; 0 where
    there is none."""
    yield "torch's", _short(torch.get_rng_state().numpy())
    yield "Python's", _short(repr(random.getstate()).encode())
    numpy: Any = sys.modules.get("numpy")
    yield "numpy's", 0 if numpy is None else _short(pickle.dumps(numpy.random.get_state()))
    cuda: Any = torch.cuda
    yield "the GPU's", _short(cuda.get_rng_state().numpy()) if cuda.is_initialized() else 0
