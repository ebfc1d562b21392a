"""``--measured FILE``: steps that ``dpcore compare`` measured, beside their predictions.

FILE is a ``compare.jsonl``, also of ``dpcore compare --grid``. A measured step belongs to a
prediction where schedule, size of buckets, ranks and link are the same. A link that the kernel
shapes has a rate and no stated latency, so its rate alone has to agree.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpcore.base.checked_json import TEXT, Fields, Unreadable, Wrong, number, whole
from dpcore.base.link import Speed, parse_speed
from dpcore.errors import Unsupported
from dpcore.reference.launches import ACROSS_STEPS, SCHEDULES
from dpcore.tools.argument_types import name_and_cap
from dpcore.tools.simulate.control import name_of
from dpcore.tools.simulate.links import Links
from dpcore.tools.simulate.local_updates import LocalUpdates
from dpcore.tools.simulate.questions import Asked

_MS = number(1e-9, 1e12, "milliseconds, more than 0")
_ESTIMATE = Fields({"median": _MS, "low": _MS, "high": _MS})
_LINE = Fields(
    {"contender": TEXT, "link": TEXT, "kind": TEXT, "world": whole(1), "step": _ESTIMATE,
     "alone": _ESTIMATE}
)  # fmt: skip
# Of ``--csv``, without those of ``--measured``.
COLUMNS = (
    "link", "world", "schedule", "algorithm", "cap_mb", "buckets", "step_ms", "low_ms", "high_ms",
    "exposed_ms", "bound_ms", "interval", "extrapolated",
)  # fmt: skip
MEASURED_COLUMNS = ("measured_ms", "measured_low_ms", "measured_high_ms", "error", "alone_ms")


@dataclass(frozen=True)
class Measured:
    """Milliseconds of a step, with the interval of its median; ``alone_ms``: of one without
    communication, in the same rounds. ``name``, ``cap_mb``: the schedule, as in ``asked_as``."""

    name: str
    cap_mb: float | None
    speed: Speed
    is_shaped: bool
    world: int
    step_ms: float
    low_ms: float
    high_ms: float
    alone_ms: float

    def is_over(self, links: Links) -> bool:
        """Whether it was measured over this link."""
        inter = replace(links.inter, latency=0.0) if self.is_shaped else links.inter
        return replace(links, inter=inter) == Links.of(self.speed)

    def of_any_size(self) -> Measured:
        return replace(self, cap_mb=None)

    def beside(self, step_ms: float) -> dict[str, float]:
        """Facts of a prediction of it; an error of 0.02 is a prediction that is 2% too long."""
        error = round(step_ms / self.step_ms - 1, 4)
        values = self.step_ms, self.low_ms, self.high_ms, error, self.alone_ms
        return dict(zip(MEASURED_COLUMNS, values, strict=True))


def asked_as(one: Asked) -> tuple[str, float | None]:
    """The name and the size of buckets by which a comparison knows a schedule."""
    if isinstance(one.schedule, LocalUpdates):
        return f"local:{one.schedule.sync_every}", None
    name = one.schedule if isinstance(one.schedule, str) else name_of(one.schedule)
    return name, one.bucket_cap_mb


def read_measured(path: Path) -> list[Measured]:
    """Of schedules that can be simulated, over links; others are left out."""
    found = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        why = problem.strerror if isinstance(problem, OSError) else "it is no text"
        raise Unsupported(f"--measured {path}: {why}") from None
    for at, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
            _LINE.check(line)
            if line["link"] != "none" and line["world"] > 1:
                found.append(_measured(line))
        except (Wrong, Unsupported, ValueError, RecursionError) as problem:
            raise Unreadable(
                f"{path}, line {at}: this is no line of a comparison's compare.jsonl: {problem}"
            ) from None
    if not found:
        raise Unsupported(
            f"--measured {path} has no step over a link, such as compare --link 1gbit"
        )
    return found


def _measured(line: Mapping[str, Any]) -> Measured:
    name, cap = name_and_cap(line["contender"], (*SCHEDULES, *ACROSS_STEPS))
    if name.partition(":")[0] in ("local_sgd", "diloco"):
        name, cap = f"local:{cap or name.partition(':')[2]}", ""
    step = line["step"]
    return Measured(
        name if name.startswith("local:") else name.rpartition(":")[2],
        float(cap) if cap not in ("", "auto") else None,
        parse_speed(line["link"]),
        line["kind"] == "hosts",
        line["world"], step["median"], step["low"], step["high"], line["alone"]["median"],
    )  # fmt: skip


def measured_of(known: Iterable[Measured], one: Asked, world: int, links: Links) -> Measured | None:
    """The step that was measured as it is asked for, the last one if there are several."""
    name, cap = asked_as(one)
    fits = [
        each
        for each in known
        if (each.name, each.cap_mb, each.world) == (name, cap, world) and each.is_over(links)
    ]
    return fits[-1] if fits else None


def csv_of(lines: Sequence[Mapping[str, Any]], with_measured: bool) -> str:
    """A row for each prediction."""
    text = io.StringIO()
    columns = (*COLUMNS, *(MEASURED_COLUMNS if with_measured else ()))
    writer = csv.DictWriter(text, columns, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for line in lines:
        caps = " ".join(f"{cap:g}" for cap in line["caps_mb"])
        writer.writerow({**line, "cap_mb": caps})
    return text.getvalue()
