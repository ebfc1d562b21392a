"""Rounds in which contenders take turns: in which order, and medians with intervals and ratios."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from dpcore.ddp.overlap import median_interval


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
