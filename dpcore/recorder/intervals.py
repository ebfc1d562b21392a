"""Unions and intersections of time spans, held as two sorted arrays: begins and ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpcore.recorder.file import Event

Times = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Intervals:
    """Spans that follow each other without touching."""

    begins: Times
    ends: Times

    @property
    def total_ns(self) -> int:
        """The time that the spans cover."""
        return int((self.ends - self.begins).sum())

    def covered_until(self, moments: Times) -> Times:
        """How much of the time before each moment the spans cover.

        >>> spans = union_of_spans([0, 10], [4, 20])
        >>> spans.covered_until(np.array([2, 6, 15])).tolist()
        [2, 4, 9]
        """
        if not len(self.begins):
            return np.zeros(len(moments), np.int64)
        before = np.concatenate([[0], np.cumsum(self.ends - self.begins)])
        at = np.searchsorted(self.begins, moments, side="right") - 1
        inside = np.minimum(moments, self.ends[np.maximum(at, 0)]) - self.begins[np.maximum(at, 0)]
        covered: Times = np.where(at < 0, 0, before[np.maximum(at, 0)] + np.maximum(inside, 0))
        return covered

    def within(self, other: Intervals) -> int:
        """Nanoseconds that both sets of spans cover."""
        return int((other.covered_until(self.ends) - other.covered_until(self.begins)).sum())

    def between(self, begin: int, end: int) -> int:
        """Nanoseconds between ``begin`` and ``end`` that the spans cover."""
        first, last = self.covered_until(np.array([begin, end]))
        return int(last - first)


def union_of_spans(begins: Sequence[int] | Times, ends: Sequence[int] | Times) -> Intervals:
    """The time that at least one of the spans covers.

    >>> union = union_of_spans([0, 5, 2], [3, 6, 4])
    >>> union.begins.tolist(), union.ends.tolist()
    ([0, 5], [4, 6])
    """
    first, last = np.asarray(begins, np.int64), np.asarray(ends, np.int64)
    if not len(first):
        return Intervals(first, last)
    order = np.argsort(first, kind="stable")
    first, reached = first[order], np.maximum.accumulate(last[order])
    opens = np.append(True, first[1:] > reached[:-1])
    closes = np.append(opens[1:], True)  # the last one before another opens
    return Intervals(first[opens], reached[closes])


def union_of(events: Sequence[Event]) -> Intervals:
    """The time that at least one of the events covers."""
    return union_of_spans([e.begin_ns for e in events], [e.end_ns for e in events])
