"""Keeps the operations of one wrapped model apart from those of other models over the same ranks.

Two models of the same shape (twin critics, the two halves of a GAN) run the same operations. If
one rank ran them in another order than its peers, the gradients of one model would be added to
those of the other. So every operation of a wrapped model carries a tag made from the model's
number, and ranks compare tags before any data is touched: a different order is a ``Mismatch`` on
every rank. Only dpcore's own communicators compare tags.

Models are numbered in the order in which they are wrapped over a communicator, and the constructor
makes the ranks agree on the number. Copies (pickle, deepcopy) are counted separately, without
communication, so a copy that only one rank makes does not change the other numbers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from dpcore.comm.communicators.protocol import GradientGroup, Pending, capabilities_of
from dpcore.ddp.wrapper.module_state import digest_of
from dpcore.errors import Mismatch

_FIRST_COPY = 1 << 32
_URGENT = 1 << 30  # a priority above that of any bucket
_SPREAD = 0x9E3779B97F4A7C15  # odd, so different numbers have different tags
_ADVICE = (
    ". If another rank was running another model here: every rank has to run the forwards and "
    "backwards of its wrapped models in the same order. Where the order cannot be the same, give "
    "each model its own communicator: comm=comm.split(0)"
)


class ModelGroup:
    """A ``GradientGroup`` for one model: its group, with the model's tag on every operation.

    Operations for which the program waits at once (buffers, batch normalisation) overtake
    gradients in flight.
    """

    def __init__(self, group: GradientGroup, module: nn.Module, is_copy: bool = False) -> None:
        self.group = group
        self.rank, self.world_size = group.rank, group.world_size
        compares = capabilities_of(group).compares_layouts
        self._comm = cast(Any, group) if compares else None
        self._kind = type(module).__name__
        self.waited_ns = 0  # time in operations for which the program waits at once
        number = 0
        if self._comm is not None and is_copy:
            self._comm._copied_models += 1
            number = _FIRST_COPY + self._comm._copied_models
        elif self._comm is not None:
            number = self._comm._wrapped_models + 1
        self.agree_on(number)

    def agree_on(self, number: int) -> None:
        """Takes the largest of the ranks' numbers, which no other model has, for the model."""
        self.number = number
        self.tag = number * _SPREAD % (1 << 64)
        if self._comm is not None and number < _FIRST_COPY:
            self._comm._wrapped_models = max(self._comm._wrapped_models, number)

    @property
    def traced_as(self) -> int:
        """The number in traces, which also tells models of different groups apart."""
        lineage = () if self._comm is None else self._comm._lineage
        if not lineage:
            return self.number
        return digest_of([repr((lineage, self.number))]) % (1 << 48)  # JSON's numbers are short

    @property
    def name(self) -> str:
        """The model's name in messages: "model 2 (Critic)"."""
        if self.number > _FIRST_COPY:
            return f"copied model {self.number - _FIRST_COPY} ({self._kind})"
        return f"model {self.number} ({self._kind})" if self.number else f"model {self._kind}"

    @property
    def advice(self) -> str:
        """What to do about a ``Mismatch``, to be appended to it."""
        return _ADVICE if self._comm is not None else ""

    def all_reduce(
        self, tensor: Any, op: str, *, async_op: bool, content: int = 0
    ) -> Pending | None:
        """See ``GradientGroup``. ``content``: a hash of the tensor's meaning, compared by ranks."""
        work: Pending | None = self._run(
            "all_reduce", tensor, op, async_op=async_op, content=content
        )
        return work

    def broadcast(self, tensor: Any, root: int, content: int = 0) -> None:
        """See ``GradientGroup``, and ``all_reduce`` for ``content``."""
        self._run("broadcast", tensor, root, content=content)

    def all_gather(
        self, output: Any, input: Any, *, content: int = 0, **options: Any
    ) -> Pending | None:
        """See ``GradientGroup``, and ``all_reduce`` for ``content``."""
        work: Pending | None = self._run("all_gather", output, input, content=content, **options)
        return work

    def all_to_all(
        self,
        output: Any,
        input: Any,
        *,
        input_sizes: Sequence[int] | None = None,
        output_sizes: Sequence[int] | None = None,
    ) -> None:
        """See ``Collectives``. It has no place for the tag."""
        cast(Any, self.group).all_to_all(
            output, input, input_sizes=input_sizes, output_sizes=output_sizes
        )

    def _run(self, name: str, *buffers: Any, content: int = 0, **options: Any) -> Any:
        if options.get("async_op"):
            return self._call(name, buffers, content, options)
        begin = time.monotonic_ns()
        try:
            return self._call(name, buffers, content, options)
        finally:
            self.waited_ns += time.monotonic_ns() - begin

    def _call(self, name: str, buffers: Any, content: int, options: dict[str, Any]) -> Any:
        operation = getattr(self.group, name)
        if self._comm is None:
            return operation(*buffers, **options)
        try:
            priority = 0 if options.get("async_op") else _URGENT
            return operation(*buffers, **options, layout=self.tag ^ content, priority=priority)
        except Mismatch as problem:
            raise Mismatch(f"{self.name}: {problem}{self.advice}") from None

    def flat(self, elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Uninitialised memory for messages: the group's own, if it has any."""
        if capabilities_of(self.group).own_memory:
            tensor: torch.Tensor = cast(Any, self.group).empty(elements, dtype=dtype)
            return tensor
        return torch.empty(elements, dtype=dtype, device=device)
