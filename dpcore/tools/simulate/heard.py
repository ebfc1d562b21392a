"""A launch schedule of one simulated rank: what it says of itself, and the events that it hears."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

from dpcore.base.user_code import naming_the_line
from dpcore.errors import Error


def name_of(schedule: Any) -> str:
    return str((schedule if isinstance(schedule, type) else type(schedule)).__name__)


def copies_for(schedule: Any, ranks: int) -> list[Any]:
    """One for each rank, from a class or an object."""
    with naming_the_line(f"schedule {name_of(schedule)!r}"):
        if isinstance(schedule, type):
            return [schedule() for _ in range(ranks)]
        return [copy.deepcopy(schedule) for _ in range(ranks)]


class Slice(NamedTuple):
    """What is launched by itself: bytes ``begin`` to ``end`` of a bucket, or all of them.
    ``number``: in its bucket."""

    bucket: int
    begin: int
    end: int
    number: int = 0


class HeardSchedule:
    """``schedule``: a ``dpcore.LaunchSchedule``, or a twin of ``dpcore.reference.launches``;
    ``sizes``: bytes of each bucket."""

    def __init__(self, schedule: Any, sizes: Sequence[int]) -> None:
        buckets = len(sizes)
        self._schedule = schedule
        self._in_words = f"schedule {name_of(schedule)!r}"
        with naming_the_line(self._in_words):
            self.listens = frozenset(schedule.listens_to())
            self.phases = list(schedule.phases())
            self.whole_buckets = int(schedule.whole_buckets())
            self.is_exact = bool(schedule.is_exact())
            self.order = list(schedule.order(buckets))
            named = [Slice(*each) for each in schedule.slices(list(sizes))]
        if sorted(self.order) != list(range(buckets)):
            raise self.error(f"has an order() without each of {buckets} buckets once")
        self.cuts = bool(named)
        if self.cuts:
            self._check(named, sizes)
        self.slices: list[Slice] = []
        self.slices_of: list[list[int]] = [[] for _ in sizes]
        for each in named or [Slice(bucket, 0, sizes[bucket]) for bucket in self.order]:
            of_bucket = self.slices_of[each.bucket]
            self.slices.append(each._replace(number=len(of_bucket)))
            of_bucket.append(len(self.slices) - 1)

    def _check(self, slices: Sequence[Slice], sizes: Sequence[int]) -> None:
        """As csrc/reducer/launch/slices.cpp does."""
        if self.phases[0] != "all_reduce":
            raise self.error(
                "has slices(), which is for phases that begin with all_reduce; in halves, each "
                "bucket is scattered whole"
            )
        ends = [0] * len(sizes)
        for bucket, of_bucket in groupby(sorted(slices), lambda each: each.bucket):
            if not 0 <= bucket < len(sizes):
                raise self.error(
                    f"names bucket {bucket} in slices(); there are {len(sizes)}, numbered from 0"
                )
            for _, begin, end, _ in of_bucket:
                where = f"bytes {begin} to {end} of bucket {bucket}"
                if not begin < end <= sizes[bucket]:
                    raise self.error(f"has {where} in slices(), which has {sizes[bucket]}")
                if begin < ends[bucket]:
                    raise self.error(
                        f"has {where} in slices(), of which another slice has the bytes up to "
                        f"{ends[bucket]}"
                    )
                if begin > ends[bucket]:
                    break
                ends[bucket] = end
        for bucket, end in enumerate(ends):
            if end < sizes[bucket]:
                raise self.error(
                    f"leaves out bytes of bucket {bucket} in slices(), from byte {end} on"
                )

    @property
    def has_update(self) -> bool:
        return "update" in self.phases

    @property
    def updates_parts(self) -> bool:
        """Each rank steps its part of the parameters, which are gathered."""
        return self.has_update and self.phases[-1] == "all_gather"

    def tell(self, event: str, *arguments: Any) -> None:
        if event in self.listens:
            with naming_the_line(f"{self._in_words} in {event}"):
                getattr(self._schedule, event)(*arguments)

    def error(self, what: str) -> Error:
        return Error(f"{self._in_words} {what}")
