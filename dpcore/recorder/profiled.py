"""What a profile shows of a rank beside its events, also as an entry of a trace file.

``profile_facts.py`` finds it in a profile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Multiplied:
    """All products of these shapes: their number, and milliseconds of a quick one, of the median
    and of all. ``flops``: of one."""

    what: str
    flops: float
    count: int
    quick_ms: float
    median_ms: float
    total_ms: float


@dataclass(frozen=True)
class ProfileFacts:
    """Spans are begin and end in nanoseconds. ``loading``: batches are made, and no GPU computes.
    ``idle``: the GPU is idle since the host waited for it, and what the host called. ``batches``:
    begin of each forward, and the shapes of its first operator."""

    loading: list[tuple[int, int]] = field(default_factory=list)
    quiet: list[tuple[int, int]] = field(default_factory=list)
    workers: bool = False  # the loader has processes
    idle: list[tuple[int, int, str]] = field(default_factory=list)
    searches: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    batches: list[tuple[int, tuple[tuple[int, ...], ...]]] = field(default_factory=list)
    compiled: bool = False
    products: list[Multiplied] = field(default_factory=list)

    def moved(self, by_ns: int) -> ProfileFacts:
        """The same at later times."""

        def later(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
            return [(begin + by_ns, end + by_ns) for begin, end in spans]

        return replace(
            self,
            loading=later(self.loading),
            quiet=later(self.quiet),
            idle=[(begin + by_ns, end + by_ns, what) for begin, end, what in self.idle],
            searches=later(self.searches),
            copies=later(self.copies),
            batches=[(begin + by_ns, shapes) for begin, shapes in self.batches],
        )


def facts_from(content: Any) -> ProfileFacts:
    """The facts of a file, which ``dataclasses.asdict`` has made entries of. ``ValueError``,
    ``TypeError`` or ``KeyError`` where they are not."""

    def span(one: Any) -> tuple[int, int]:
        begin, end = one
        if type(begin) is not int or type(end) is not int or end < begin:
            raise ValueError("not a span")
        return begin, end

    def numbers(shape: Any) -> tuple[int, ...]:
        if not all(type(size) is int for size in shape):
            raise ValueError("not a shape")
        return tuple(shape)

    return ProfileFacts(
        loading=[span(one) for one in content["loading"]],
        quiet=[span(one) for one in content["quiet"]],
        workers=bool(content["workers"]),
        idle=[(*span((begin, end)), str(what)) for begin, end, what in content["idle"]],
        searches=[span(one) for one in content["searches"]],
        copies=[span(one) for one in content["copies"]],
        batches=[
            (span((at, at))[0], tuple(numbers(shape) for shape in shapes))
            for at, shapes in content["batches"]
        ],
        compiled=bool(content["compiled"]),
        products=[
            Multiplied(
                str(one["what"]), float(one["flops"]), int(one["count"]), float(one["quick_ms"]),
                float(one["median_ms"]), float(one["total_ms"]),
            )
            for one in content["products"]
        ],
    )  # fmt: skip
