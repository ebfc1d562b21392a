"""Rounds in which contenders take turns: in which order, and medians with intervals and ratios."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from dpcore.base.confidence import least_values, median_interval


def in_turn(contenders: Sequence[Any], number: int) -> list[Any]:
    """Another one begins in every round, and every other round goes the other way round: nobody
    always comes after the same one."""
    at = number // 2 % len(contenders)
    order = [*contenders[at:], *contenders[:at]]
    return order[::-1] if number % 2 else order


def turns(contenders: Sequence[Any], number: int) -> list[Any]:
    """The first contender has a turn before and after every other one's. Turns that are compared
    should be neighbours: seconds later, a shared machine may be half as fast."""
    first, *others = contenders
    return [first, *(one for other in in_turn(others, number) for one in (other, first))]


def of_slowest_rank(of_ranks: Iterable[Sequence[float]]) -> list[float]:
    """Round by round the time of the rank that took longest, from the rounds of each rank."""
    return [max(times) for times in zip(*of_ranks, strict=True)]


_DOUBT = 0.05
LEAST_ROUNDS = least_values(_DOUBT)


@dataclass(frozen=True)
class Estimate:
    """A median of rounds, and where the true one lies with a confidence of 95%. Fewer than
    ``LEAST_ROUNDS`` rounds cannot say that: ``low`` and ``high`` are then their range, and
    ``confidence`` is None.

    >>> estimate([3.0, 1.0, 2.0])
    Estimate(median=2.0, low=1.0, high=3.0, rounds=3, confidence=None)
    """

    median: float
    low: float
    high: float
    rounds: int
    confidence: float | None

    @property
    def ends(self) -> str:
        """What ``low`` and ``high`` are."""
        return ends_of(self.rounds)

    def between(self, digits: int = 3) -> str:
        """Where the median lies, for a reader."""
        low, high = f"{self.low:.{digits}f}", f"{self.high:.{digits}f}"
        if self.confidence is None:
            return f"{self.ends}: {low} to {high}"
        return f"{self.ends} between {low} and {high}"

    @property
    def is_conclusive(self) -> bool:
        """Of a ratio: whether an interval of 95% leaves out 1, so that one of the two is faster."""
        return self.confidence is not None and not self.low <= 1.0 <= self.high


def ends_of(rounds: int) -> str:
    """What the ends are between which the median of so many rounds lies.

    >>> ends_of(15), ends_of(3)
    ('95%', 'range of 3 rounds')
    """
    if rounds < LEAST_ROUNDS:
        return f"range of {rounds} round{'' if rounds == 1 else 's'}"
    return f"{1 - _DOUBT:.0%}"


def estimate(values: Sequence[float]) -> Estimate:
    rounds = len(values)
    confidence = None if rounds < LEAST_ROUNDS else 1 - _DOUBT
    return Estimate(median(values), *median_interval(values, _DOUBT), rounds, confidence)


def paired(ours: Sequence[float], others: Sequence[float]) -> Estimate:
    """The ratio of two contenders' times in the same rounds: what makes the machine slow for a
    while makes both slow."""
    return estimate([mine / other for mine, other in zip(ours, others, strict=True)])
