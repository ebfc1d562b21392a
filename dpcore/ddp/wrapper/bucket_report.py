"""The result of ``DataParallel.bucket_report()``: a table to print, and a list to compute with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from dpcore.base.markup import paragraphs, table


@dataclass(frozen=True)
class BucketLine:
    """One bucket. Times are milliseconds after the first gradient of the last backward: when all
    gradients were ready, when it was sent, when it was complete. None without a backward."""

    parameters: list[str]
    dtype: str
    bytes: int
    ready_ms: float | None
    launched_ms: float | None
    complete_ms: float | None


class BucketReport(Sequence[BucketLine]):
    """The buckets in the order of their numbers."""

    def __init__(
        self,
        lines: Sequence[dict[str, Any]],
        schedule: str,
        rebuilt: bool,
        why: Mapping[str, str] = MappingProxyType({}),
        notes: Sequence[str] = (),
        ways: Sequence[str] = (),
    ) -> None:
        self._lines = [BucketLine(**line) for line in lines]
        self.schedule = schedule
        self.rebuilt = rebuilt
        self.why = dict(why)  # the reasons for the choices of the first steps
        self.notes = list(notes)  # about mistakes that right programs make as well
        # How many gradients came into their buckets in each way, in the last step. Empty where all
        # are copied.
        self.gradients = {way: ways.count(way) for way in _WAYS if way in ways}

    def __getitem__(self, index: Any) -> Any:
        return self._lines[index]

    def __len__(self) -> int:
        return len(self._lines)

    def _repr_html_(self) -> str:
        """The table as HTML, for notebooks."""
        columns = ["bucket", "MiB", "dtype", "ready ms", "sent ms", "done ms", "parameters"]
        rows = [
            [
                str(number),
                f"{line.bytes / 2**20:.3f}",
                line.dtype,
                *(
                    "-" if time is None else f"{time:.3f}"
                    for time in (line.ready_ms, line.launched_ms, line.complete_ms)
                ),
                _names(line),
            ]
            for number, line in enumerate(self)
        ]
        head = self._head()
        return table(columns, rows, head[0]) + paragraphs([*head[1:], *self._tail()])

    def _head(self) -> list[str]:
        order = "of arrival" if self.rebuilt else "of registration, reversed"
        buckets = "one bucket" if len(self) == 1 else f"{len(self)} buckets"
        return [
            f"schedule {self.schedule}, {buckets} in the order {order}",
            *(f"{what} chosen: {reason}" for what, reason in self.why.items()),
        ]

    def _tail(self) -> list[str]:
        ways = ", ".join(f"{number} {_WAYS[way]}" for way, number in self.gradients.items())
        came = [f"gradients: {ways}"] if ways else []
        return [*came, *(f"note: {note}" for note in self.notes)]

    def __repr__(self) -> str:
        """The table as text."""
        text = [
            *self._head(),
            "bucket    size MiB  dtype     ready ms    sent ms    done ms  parameters",
        ]
        for number, line in enumerate(self._lines):
            times = (line.ready_ms, line.launched_ms, line.complete_ms)
            shown = "".join(f"{'-':>11}" if time is None else f"{time:>11.3f}" for time in times)
            size = line.bytes / 2**20
            text.append(f"{number:>6}  {size:>10.3f}  {line.dtype:<8}{shown}  {_names(line)}")
        return "\n".join([*text, *self._tail()])


# How a gradient came into its bucket (csrc/reducer/backward/birth_plan.h).
_WAYS = {
    "born": "born in place",
    "kept": "added to in place",
    "small": "copied: under 1 MiB",
    "watched": "copied: made in memory that no step before has shown",
    "held": "copied: the place, or the gradient, is held by the program or a hook",
    "elsewhere": "copied: this step was not like the one before",
    "announced": "copied: they left a compiled graph while it ran",
}


def _names(line: BucketLine) -> str:
    names = ", ".join(line.parameters[:2])
    more = len(line.parameters) - 2
    return names + (f" and {more} more" if more > 0 else "")
