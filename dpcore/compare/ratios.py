"""Times of the same rounds, and what can be said of their ratio."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from dpcore.ddp.overlap import median_interval


def of_slowest_rank(of_ranks: Iterable[Sequence[float]]) -> list[float]:
    """Round by round the time of the rank that took longest, from the rounds of each rank."""
    return [max(times) for times in zip(*of_ranks, strict=True)]


@dataclass(frozen=True)
class Ratio:
    """The median of the ratios of two contenders' rounds, and where the true one lies with a
    confidence of 95% (the whole range below 6 rounds, which are too few)."""

    median: float
    low: float
    high: float


def paired(ours: Sequence[float], others: Sequence[float]) -> Ratio:
    """Of times in the same rounds: what makes the machine slow for a while makes both slow."""
    ratios = [mine / other for mine, other in zip(ours, others, strict=True)]
    return Ratio(median(ratios), *median_interval(ratios, 0.05))
