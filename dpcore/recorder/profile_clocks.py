"""Puts the ranks of one run on one clock.

Processes of one host share a clock, but hosts do not: NTP leaves a millisecond between them, which
is more than many buckets take. An all-reduce, or another collective to which every rank
contributes, completes on all ranks at about the same time, and on none before the last has entered.
So a host's clock is shifted by the median difference between the ends of the same collectives. If
two ranks share a host, or the host is unknown, clocks are shifted only when they contradict each
other: an operation would have ended before another rank entered it.
"""

from __future__ import annotations

import bisect
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from dpcore.recorder.file import Event
from dpcore.recorder.profile_events import RankProfile

_TOGETHER = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"}
_TO_ENTER = "every rank to enter"
_SOME = 0.05  # of the collectives may contradict a clock
_SLACK_NS = 100_000  # clocks of one host that are this close are one clock

Key = tuple[object, ...]


@dataclass(frozen=True)
class Shifts:
    """``shifts``: nanoseconds to add to the times of each rank, in the order of the argument.
    ``matched``: the number of collectives that all ranks have in common."""

    shifts: list[int]
    matched: int

    @property
    def sentence(self) -> str:
        """The shift in words, or "" if the ranks share a clock."""
        if not any(self.shifts):
            return ""
        largest = max(map(abs, self.shifts)) * 1e-6
        return f"clocks aligned on {self.matched} collectives, by up to {largest:.3g} ms"


def align(ranks: Sequence[RankProfile]) -> Shifts:
    """Finds the shifts that put ranks of the same run on one clock."""
    keyed = [_keyed(rank) for rank in ranks]
    common = set.intersection(*(set(found) for found in keyed)) if keyed else set()
    shifts = [0] * len(ranks)
    by_host: dict[str, int] = {}
    for index in range(1, len(ranks)):
        host = ranks[index].host
        shared = set(keyed[0]) & set(keyed[index])
        if host in by_host:
            shifts[index] = by_host[host]
        elif shared:
            may_share = not host or host == ranks[0].host
            shifts[index] = _shift(keyed[0], keyed[index], shared, may_share)
            if not may_share:
                by_host[host] = shifts[index]
    return Shifts(shifts, len(common))


def wait_for_the_last(ranks: Sequence[RankProfile]) -> list[RankProfile]:
    """Adds to each rank its waits for the last rank to enter a collective, which no single rank's
    file can show."""
    keyed = [_keyed(rank) for rank in ranks]
    added: list[list[Event]] = [[] for _ in ranks]
    for key in keyed[0]:
        if not all(key in found for found in keyed):
            continue
        operations = [found[key] for found in keyed]
        last = max(operations, key=lambda event: event.begin_ns)
        for index, mine in enumerate(operations):
            if mine.begin_ns < last.begin_ns < mine.end_ns:
                peer = ranks[operations.index(last)].rank
                until = last.begin_ns
                wait = mine._replace(name=_TO_ENTER, kind="wait", peer=peer, end_ns=until, path="")
                added[index].append(wait)
    return [
        replace(rank, events=sorted([*rank.events, *more], key=lambda e: (e.begin_ns, -e.end_ns)))
        for rank, more in zip(ranks, added, strict=True)
    ]


def _shift(
    first: dict[Key, Event], other: dict[Key, Event], shared: Iterable[Key], may_share: bool
) -> int:
    pairs = [(first[key], other[key]) for key in shared]
    impossible = sum(
        a.end_ns + _SLACK_NS < b.begin_ns or b.end_ns + _SLACK_NS < a.begin_ns for a, b in pairs
    )
    if may_share and impossible <= _SOME * len(pairs):
        return 0
    return round(statistics.median(a.end_ns - b.end_ns for a, b in pairs))


def _keyed(rank: RankProfile) -> dict[Key, Event]:
    """The collectives by step, name and number within the step. If the profiler marked steps, this
    matches ranks whose recordings began at different times."""
    begins = [step.begin_ns for step in rank.steps]
    counts: Counter[Key] = Counter()
    found: dict[Key, Event] = {}
    for event in rank.operations:
        if event.name not in _TOGETHER:
            continue
        at = bisect.bisect_right(begins, event.begin_ns) - 1
        step = rank.steps[at].number if at >= 0 else None
        counts[step, event.name] += 1
        found[step, event.name, counts[step, event.name]] = event
    return found
