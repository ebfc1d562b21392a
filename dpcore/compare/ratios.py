"""Times of the same rounds: medians with their intervals, and ratios."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from dpcore.ddp.overlap import median_interval


def of_slowest_rank(of_ranks: Iterable[Sequence[float]]) -> list[float]:
    """Round by round the time of the rank that took longest, from the rounds of each rank."""
    return [max(times) for times in zip(*of_ranks, strict=True)]


@dataclass(frozen=True)
class Estimate:
    """A median, and where the true one lies with a confidence of 95% (the whole range below 6
    values, which are too few)."""

    median: float
    low: float
    high: float


def estimate(values: Sequence[float]) -> Estimate:
    return Estimate(median(values), *median_interval(values, 0.05))


def paired(ours: Sequence[float], others: Sequence[float]) -> Estimate:
    """The ratio of two contenders' times in the same rounds: what makes the machine slow for a
    while makes both slow."""
    return estimate([mine / other for mine, other in zip(ours, others, strict=True)])
