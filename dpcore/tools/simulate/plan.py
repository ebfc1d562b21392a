"""What ranks have in common: buckets, modules, and which of their launches are one operation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from dpcore.base.own_algorithm import OwnAlgorithm, is_own
from dpcore.errors import Mismatch
from dpcore.tools.simulate.network import NetworkOperation


@dataclass(frozen=True)
class Plan:
    """``buckets``, ``modules``: the numbers of their gradients, modules in the order of forward;
    ``sizes``: bytes of each gradient."""

    sizes: Sequence[int]
    buckets: Sequence[Sequence[int]]
    modules: Sequence[Sequence[int]]

    @cached_property
    def bytes(self) -> list[int]:
        """Of each bucket."""
        return [sum(self.sizes[gradient] for gradient in bucket) for bucket in self.buckets]

    @cached_property
    def bucket_of(self) -> dict[int, int]:
        return {gradient: b for b, bucket in enumerate(self.buckets) for gradient in bucket}

    @cached_property
    def order_of_need(self) -> list[int]:
        """Buckets, as forward comes by their modules."""
        needed = (self.bucket_of[gradient] for module in self.modules for gradient in module)
        return list(dict.fromkeys(needed))

    @cached_property
    def needed_by_none(self) -> list[int]:
        """Buckets with a gradient of no module."""
        needed = {gradient for module in self.modules for gradient in module}
        return sorted({b for gradient, b in self.bucket_of.items() if gradient not in needed})


@dataclass(frozen=True)
class Hook:
    """A communication hook, such as compression, taken as one all-reduce of fewer bytes.

    ``share``: of the bytes of a bucket, what travels. ``before``, ``after``: seconds of the thread
    that runs backward, for each byte of the bucket, when it is sent and when it was awaited.
    """

    share: float = 1.0
    before: float = 0.0
    after: float = 0.0


@dataclass
class _Exchange:
    """The values of the ranks that have come, and the operation that exchanges them."""

    values: list[list[float]] = field(default_factory=list)
    operation: NetworkOperation = field(default_factory=lambda: NetworkOperation(64, []))


class Matching:
    """The n-th launch of a step is the same operation on each rank, and so is the n-th exchange of
    values."""

    def __init__(self, plan: Plan, hook: Hook | None = None) -> None:
        self.plan, self.hook = plan, hook
        self._launched: dict[tuple[int, int], tuple[str, NetworkOperation]] = {}
        self._exchanges: list[_Exchange] = []

    def operation(
        self,
        step: int,
        number: int,
        collective: str,
        buckets: tuple[int, ...],
        priority: int,
        background: bool,
        algorithm: Any,
        part: range | None,
    ) -> NetworkOperation:
        """``part``: these bytes of the bucket only."""
        said = f"{collective} of buckets {list(buckets)}"
        if part is not None:
            said += f", bytes {part.start} to {part.stop},"
        if algorithm is not None:
            said += f" by {OwnAlgorithm(algorithm).name if is_own(algorithm) else algorithm}"
        nbytes = len(part) if part else sum(self.plan.bytes[bucket] for bucket in buckets)
        if self.hook is not None:
            nbytes = round(nbytes * self.hook.share)
        operation = NetworkOperation(
            nbytes, [], priority, collective, background, algorithm=algorithm
        )
        first, operation = self._launched.setdefault((step, number), (said, operation))
        if first != said:
            raise Mismatch(
                f"launch {number} of the step: one rank sends {first}, another one {said}; ranks "
                "have to send the same buckets together"
            )
        return operation

    def exchange(self, number: int, values: Sequence[float]) -> _Exchange:
        """That with this number, which the rank's values take part in."""
        if number == len(self._exchanges):
            self._exchanges.append(_Exchange())
        self._exchanges[number].values.append(list(values))
        return self._exchanges[number]
