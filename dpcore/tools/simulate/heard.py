"""A launch schedule of one simulated rank: what it says of itself, and the events that it hears."""

from __future__ import annotations

import copy
from typing import Any

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


class HeardSchedule:
    """``schedule``: a ``dpcore.LaunchSchedule``, or a twin of ``dpcore.reference.launches``."""

    def __init__(self, schedule: Any, buckets: int) -> None:
        self._schedule = schedule
        self._in_words = f"schedule {name_of(schedule)!r}"
        with naming_the_line(self._in_words):
            self.listens = frozenset(schedule.listens_to())
            self.phases = list(schedule.phases())
            self.whole_buckets = int(schedule.whole_buckets())
            self.is_exact = bool(schedule.is_exact())
            self.order = list(schedule.order(buckets))
        if sorted(self.order) != list(range(buckets)):
            raise self.error(f"has an order() without each of {buckets} buckets once")

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
