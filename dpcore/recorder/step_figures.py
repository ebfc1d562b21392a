"""Reduces the steps of all ranks to figures and one line, and names a slow rank.

Step times do not show which rank is slow: all ranks take as long as the slowest, because they wait
for its gradients. So ranks are compared by the time in which they do not wait:

*compute*  forward and backward up to the last gradient, without waits for communication,
*between*  the rest of the step: its data, its optimizer, its logging.

A rank is named if its median is more than a tenth above that of the others, and the confidence
intervals of the medians do not overlap, so noise that all ranks have names none.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from dpcore.base.confidence import least_values, median_interval
from dpcore.base.markup import short

_SLOWER = 0.1  # a slow rank takes longer than the others by at least this share of their time
_DOUBT = 0.01  # the probability that the median of a rank lies outside its interval
LEAST_STEPS = least_values(_DOUBT)  # with fewer steps no rank is called slow
_WHERE = {
    "compute": "its forward and backward take",
    "between": "what it does between backward and forward takes",
}


class Step(NamedTuple):
    """One step of one rank, in milliseconds."""

    step_ms: float
    compute_ms: float
    exposed_ms: float
    communication_ms: float
    bytes: float

    @property
    def between_ms(self) -> float:
        return max(0.0, self.step_ms - self.compute_ms - self.exposed_ms)


class RankSteps(NamedTuple):
    """The steps of one rank: medians, and confidence intervals for two. Ranks exchange these."""

    steps: float = 0.0
    step_ms: float = 0.0
    compute_ms: float = 0.0
    least_compute_ms: float = 0.0
    most_compute_ms: float = 0.0
    between_ms: float = 0.0
    least_between_ms: float = 0.0
    most_between_ms: float = 0.0
    exposed_ms: float = 0.0
    communication_ms: float = 0.0
    bytes: float = 0.0


class Slow(NamedTuple):
    """A slow rank, the part of the step in which it is slow, and by how much."""

    rank: int
    where: str  # "compute" or "between"
    more_ms: float
    share: float  # of the others' time there, or for "between", of their compute and between time

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is slow: {_WHERE[self.where]} {short(self.more_ms)} ms longer"
            f" than on the others ({self.share:.0%})"
        )


def summary(steps: Sequence[Step]) -> RankSteps:
    """The medians of one rank's steps.

    >>> summary([Step(10, 8, 1, 2, 4000)] * 7).between_ms
    1.0
    """
    if not steps:
        return RankSteps()

    step, compute, exposed, communication, size = zip(*steps, strict=True)
    between = [float(each.between_ms) for each in steps]
    median = statistics.median
    return RankSteps(
        len(steps),
        median(step),
        median(compute),
        *median_interval(compute, _DOUBT),
        median(between),
        *median_interval(between, _DOUBT),
        median(exposed),
        median(communication),
        median(size),
    )


def skew_of(ranks: Sequence[RankSteps]) -> float:
    """The share by which the slowest rank's compute exceeds the median of the others'.

    >>> skew_of([RankSteps(9, 10.0, 8.0), RankSteps(9, 10.0, 10.0)])
    0.25
    """
    slowest = max(range(len(ranks)), key=lambda rank: ranks[rank].compute_ms)
    usual = _of_others(ranks, slowest, "compute_ms")
    return ranks[slowest].compute_ms / usual - 1 if usual > 0 else 0.0


def slow_rank(ranks: Sequence[RankSteps]) -> Slow | None:
    """The rank that keeps the others waiting, or None if the difference may be noise."""
    if len(ranks) < 2 or min(rank.steps for rank in ranks) < LEAST_STEPS:
        return None
    for where in ("compute", "between"):
        rank = max(range(len(ranks)), key=lambda rank: getattr(ranks[rank], f"{where}_ms"))
        usual = _of_others(ranks, rank, f"{where}_ms")
        compared_with = usual
        if where == "between":
            compared_with = usual + _of_others(ranks, rank, "compute_ms")
        more = getattr(ranks[rank], f"{where}_ms") - usual
        is_apart = getattr(ranks[rank], f"least_{where}_ms") > _of_others(
            ranks, rank, f"most_{where}_ms"
        )
        if is_apart and compared_with > 0 and more > _SLOWER * compared_with:
            return Slow(rank, where, more, more / compared_with)
    return None


def _of_others(ranks: Sequence[RankSteps], rank: int, name: str) -> float:
    """The median of a figure over the other ranks."""
    others = [float(getattr(other, name)) for r, other in enumerate(ranks) if r != rank]
    return statistics.median(others) if others else 0.0


def figures_of(step: int, ranks: Sequence[RankSteps], notes: Sequence[str] = ()) -> dict[str, Any]:
    """The argument of the monitor's ``to``; docs/monitor.md explains each entry. Times are medians
    over the steps, then over the ranks."""
    active = [rank for rank in ranks if rank.steps > 0]

    def median(name: str) -> float:
        return statistics.median(getattr(rank, name) for rank in active) if active else 0.0

    communication, exposed = median("communication_ms"), median("exposed_ms")
    slow = slow_rank(ranks)
    return {
        "step": step,
        "steps": int(min((rank.steps for rank in active), default=0)),
        "step_ms": median("step_ms"),
        "compute_ms": median("compute_ms"),
        "exposed_ms": exposed,
        "communication_ms": communication,
        "overlap": max(0.0, 1 - exposed / communication) if communication > 0 else None,
        "bytes": int(median("bytes")),
        "skew": skew_of(ranks) if len(active) == len(ranks) > 1 else 0.0,
        "slow_rank": None if slow is None else slow.rank,
        "slow": "" if slow is None else str(slow),
        "ranks": [rank._asdict() for rank in ranks],
        "notes": list(notes),
    }


def line_of(figures: dict[str, Any]) -> str:
    """The figures as one line of text.

    >>> steps = [Step(12, 8, 2, 4, 1 << 20), Step(12, 10, 0, 4, 1 << 20)]
    >>> for part in line_of(figures_of(50, [summary([s] * 9) for s in steps])).split("; "):
    ...     print(part)
    step 50: 12.0 ms, exposed 1.00 of 4.00 ms of communication, overlap 75%, 1.0 MiB
    rank 1 is slow: its forward and backward take 2.00 ms longer than on the others (25%)
    """
    text = f"step {figures['step']}: {short(figures['step_ms'])} ms"
    if figures["overlap"] is not None:
        text += (
            f", exposed {short(figures['exposed_ms'])} of {short(figures['communication_ms'])} ms "
            f"of communication, overlap {figures['overlap']:.0%}, "
            f"{_size(figures['bytes'])}"
        )
    if figures["slow"]:
        text += f"; {figures['slow']}"
    elif len(figures["ranks"]) > 1 and figures["compute_ms"] > 0:
        text += f"; compute differs by {figures['skew']:.0%}, no rank is slow"
    return "; note: ".join([text, *figures["notes"]])


def _size(count: float) -> str:
    """
    >>> _size(16), _size(2000), _size(1 << 21)
    ('16 B', '2.0 KiB', '2.0 MiB')
    """
    if count < 2**10 / 10:
        return f"{count:.0f} B"
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 / 10 else f"{count / 2**10:.1f} KiB"


def numbers_of(figures: dict[str, Any]) -> dict[str, float]:
    """The figures for a logger of scalars, by name. ``slow_rank`` is -1 if no rank is slow."""
    slow = figures["slow_rank"]
    names = ("step_ms", "compute_ms", "exposed_ms", "communication_ms", "overlap", "bytes", "skew")
    found = {f"dpcore/{name}": float(figures[name]) for name in names if figures[name] is not None}
    found["dpcore/slow_rank"] = -1.0 if slow is None else float(slow)
    return {name: value for name, value in found.items() if math.isfinite(value)}
