"""What averaging gradients needs of a communicator, whoever carries the bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable


class Pending(Protocol):
    """An operation that somebody will wait for."""

    def wait(self) -> Any:
        """Returns when it is complete."""


@runtime_checkable
class GradientGroup(Protocol):
    """Ranks that average gradients. All methods work in place on flat, contiguous tensors."""

    rank: int
    world_size: int

    def all_reduce(self, tensor: Any, op: str, *, async_op: bool) -> Pending | None:
        """``op``: "mean", "sum" or "max"."""

    def broadcast(self, tensor: Any, root: int) -> Any:
        """From ``root`` to all."""

    def all_gather(self, output: Any, input: Any, *, sizes: Sequence[int] | None = None) -> Any:
        """Everybody's input, one after the other; ``sizes`` when they differ."""
