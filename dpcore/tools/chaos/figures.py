"""What faults have cost a training, and what is wrong afterwards."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from dpcore.tools.chaos.job import Step


@dataclass
class Struck:
    """A fault that has come. ``numbers``: ranks of the job that it has killed."""

    kind: str
    at: float
    numbers: tuple[int, ...] = ()
    stepped: float | None = None  # when the next step was finished, without them

    def hears(self, step: Step) -> bool:
        """Takes the step, if it is the next one. Returns whether this was still open."""
        if self.stepped is not None:
            return False
        if step.at > self.at and not set(step.ranks) & set(self.numbers):
            self.stepped = step.at
        return True


@dataclass
class Figures:
    """Seconds, where nothing else is said."""

    ranks: int
    seconds: float
    faults: dict[str, int]
    joined: int
    steps: int
    repeated: int
    step: float
    kill_to_step: list[float]
    stop_to_step: list[float]
    start_to_step: list[float]
    goodput: float
    hangs: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    @property
    def is_well(self) -> bool:
        """Whether nothing hung, nothing was wrong and nothing was left."""
        return not (self.hangs or self.wrong or self.left)

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        return asdict(self)

    def text(self) -> str:
        """For a screen."""
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.faults.items()))
        rows = [
            ("faults", kinds or "none"),
            ("ranks that joined", str(self.joined)),
            ("steps", f"{self.steps} finished, {self.repeated} of them repeated"),
            ("a step", in_ms([self.step] if self.step else [])),
            ("kill to next step", in_ms(self.kill_to_step)),
            ("stop to next step", in_ms(self.stop_to_step)),
            ("start to first step", in_ms(self.start_to_step)),
            ("goodput", f"{self.goodput:.3f} of {self.seconds:.1f} s"),
            ("hangs", "; ".join(self.hangs) or "none"),
            ("wrong bits", "; ".join(self.wrong) or "none"),
            ("left behind", "; ".join(self.left) or "nothing"),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:{width}}  {said}" for name, said in rows)


def in_ms(seconds: Sequence[float]) -> str:
    """Median, 95th percentile and slowest, and how many there are.

    >>> in_ms([0.1, 0.2, 0.3])
    'median 200 ms, p95 300 ms, slowest 300 ms (3)'
    """
    if not seconds:
        return "none"
    if len(seconds) == 1:
        return f"{seconds[0] * 1e3:.0f} ms"
    return (
        f"median {statistics.median(seconds) * 1e3:.0f} ms, "
        f"p95 {percentile(seconds, 0.95) * 1e3:.0f} ms, "
        f"slowest {max(seconds) * 1e3:.0f} ms ({len(seconds)})"
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The least value that so many are not above.

    >>> percentile(range(1, 101), 0.95)
    95
    """
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def step_time(steps: Mapping[int, Step]) -> float:
    """The median from one finished step to the next; faults are few enough not to show."""
    times = [steps[number].at for number in sorted(steps)]
    gaps = [after - before for before, after in pairwise(times)]
    return statistics.median(gaps) if gaps else 0.0
