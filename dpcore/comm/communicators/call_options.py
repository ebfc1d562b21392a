"""The keywords of the collectives besides ``async_op``; protocol.py says what they mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

Sizes = Sequence[int] | None
Algorithm = Any  # str | (int) -> moves | dpcore.Schedule | None


class Meeting(TypedDict, total=False):
    timeout: float


class Message(Meeting, total=False):
    tag: int


class Options(Meeting, total=False):
    algorithm: Algorithm
    priority: int


class Whole(Options, total=False):
    layout: int


class Combining(Options, total=False):
    factor: float


class CombiningWhole(Combining, Whole, total=False):
    pass


class Parts(Options, total=False):
    sizes: Sizes


class GatheringParts(Parts, Whole, total=False):
    pass


class CombiningParts(Parts, Combining, total=False):
    pass


class Exchanging(Options, total=False):
    output_sizes: Sizes
    input_sizes: Sizes
