"""From the rounds of a cell to figures with intervals, and to sentences that say what they show.

    step       forward and backward of the slowest rank, and the optimizer's step where all have one
    exposed    from the last gradient until the step ends, on the rank that computes longest, less
               the same without communication
    slowdown   what else a step takes longer than without communication: computing that has less of
               the processors and the memory to itself
    overlap    1 - (exposed + slowdown) / all-reducing the same gradients with nothing beside it

A contender that communicates under the next forward, or in a way of its own, shows from outside
only both together: its exposed and slowdown are None. Overlap is None for one that does not send
all gradients in every step.

Each is the median over rounds; a difference or ratio is one of the same round. Intervals are
made of order statistics, and hold the true median with a confidence of 95%; fewer than
``LEAST_ROUNDS`` rounds have a range and no interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

from dpcore.tools.compare.plan import Contender, bare_of
from dpcore.tools.compare.training.ranks import ALONE
from dpcore.tools.ratios import LEAST_ROUNDS, Estimate, estimate, paired

WIDE = 1.0  # an overlap with a wider interval is unknown
PARTS = ("alone", "slowdown", "exposed", "both")  # of a step, as it is drawn
MOST_ROUNDS = 1000  # a difference that needs more is none that matters


@dataclass(frozen=True)
class Figures:
    contender: str
    step: Estimate
    alone: Estimate
    exposed: Estimate | None
    slowdown: Estimate | None
    cost: Estimate  # both together
    communication: Estimate
    overlap: Estimate | None
    ratio: Estimate | None  # step over that of the reference; None for the reference itself
    rounds_ms: tuple[float, ...]
    changes: str = ""  # how what it computes differs from a mean of all gradients in every step
    loss: float | None = None  # in the last round, where an optimizer steps
    memory_mib: float | None = None  # at its most, of the rank that needs most; on GPUs
    sends: bool = True  # whether there is another rank to send to

    @property
    def overlap_is_known(self) -> bool:
        return self.overlap is not None and self.overlap.high - self.overlap.low <= WIDE

    @property
    def parts_ms(self) -> dict[str, float]:
        """What a step is drawn as: one part after the other, up to its median. Medians of parts do
        not add up to the median of the whole, so each is drawn as its share of their sum."""
        shown = {"alone": self.alone, "slowdown": self.slowdown, "exposed": self.exposed}
        shown["both"] = self.cost if self.exposed is None else None
        parts = {name: 0.0 if it is None else max(0.0, it.median) for name, it in shown.items()}
        parts["alone"] = min(parts["alone"], self.step.median)
        scale = self.step.median / (sum(parts.values()) or 1.0)
        return {name: value * scale for name, value in parts.items()}

    def record(self) -> dict[str, Any]:
        return asdict(self) | {"overlap_is_known": self.overlap_is_known}


def figures_of(
    entrants: Sequence[Contender],
    rounds: Sequence[dict[str, Any]],
    losses: Mapping[str, float | None] | None = None,
    memory: Mapping[str, float] | None = None,
    sends: bool = True,
) -> list[Figures]:
    """One per contender. Rounds: seconds and tails of every rank and step, by contender. Losses:
    those at the end, where an optimizer steps. Memory: MiB, where it is known. ``sends``: whether
    there is another rank to send to."""
    reference = reference_of(entrants)
    steps = {name: _per_round(rounds, "seconds", name, max) for name in rounds[0]["seconds"]}
    tails = {name: _per_round(rounds, "tails", name, min) for name in rounds[0]["tails"]}
    found = []
    for one in entrants:
        name, bare = one.inner, bare_of(one)
        costs = _differences(steps[name], steps[ALONE])
        exposed = [max(0.0, tail) for tail in _differences(tails[name], tails[ALONE])]
        kind = one.kind
        splits = kind.splits and sends
        shares = [1 - cost / whole for cost, whole in zip(costs, steps[bare], strict=True)]
        found.append(
            Figures(
                contender=one.name,
                step=estimate(steps[name]),
                alone=estimate(steps[ALONE]),
                exposed=estimate(exposed) if splits else None,
                slowdown=estimate(_differences(costs, exposed)) if splits else None,
                cost=estimate(costs),
                communication=estimate(steps[bare]),
                overlap=estimate(shares) if kind.sends_all and sends else None,
                ratio=None if one is reference else paired(steps[name], steps[reference.inner]),
                rounds_ms=tuple(steps[name]),
                changes=kind.changes,
                loss=(losses or {}).get(name),
                memory_mib=(memory or {}).get(name),
                sends=sends,
            )
        )
    return found


def reference_of(entrants: Sequence[Contender]) -> Contender:
    """Whom the others are compared with: the first plain torch DDP, or else the first."""
    return next((one for one in entrants if one.is_torch), entrants[0])


def _per_round(
    rounds: Sequence[dict[str, Any]], what: str, name: str, over_ranks: Any
) -> list[float]:
    """Milliseconds: of each step the rank that counts, then the mean of a round's steps."""
    of_rounds = (zip(*round_[what][name], strict=True) for round_ in rounds)
    return [mean(map(over_ranks, steps)) * 1e3 for steps in of_rounds]


def _differences(ours: Sequence[float], others: Sequence[float]) -> list[float]:
    return [mine - other for mine, other in zip(ours, others, strict=True)]


def verdicts(figures: Sequence[Figures]) -> list[str]:
    """A sentence on each contender but the reference, the one with the shortest step first."""
    reference = next(one for one in figures if one.ratio is None)
    others = sorted((one for one in figures if one.ratio is not None), key=lambda f: f.step.median)
    if not others:
        return [f"Only {reference.contender} took part, so there is nothing to compare it with."]
    if reference.step.confidence is None:
        return [
            f"{len(reference.rounds_ms)} rounds are too few to conclude anything; {LEAST_ROUNDS} "
            "are the least."
        ]
    said = [_verdict(one, reference) + _otherwise(one, reference) for one in others]
    return said + [_below_0(one) for one in figures if _is_below_0(one)]


def _is_below_0(one: Figures) -> bool:
    return one.overlap is not None and one.overlap_is_known and one.overlap.high < 0


def _below_0(one: Figures) -> str:
    return (
        f"{one.contender}'s overlap is below 0: communication adds {ms(one.cost.median)} to a "
        f"step, and takes {ms(one.communication.median)} with nothing beside it."
    )


def _otherwise(one: Figures, reference: Figures) -> str:
    """What else is not the same, of a contender that does not compute what the others do."""
    if not one.changes:
        return ""
    said = f" Mind what it computes: {one.changes}"
    if one.loss is None or reference.loss is None:
        return f"{said}."
    losses = f"{one.loss:.4g}, {reference.contender}'s {reference.loss:.4g}"
    return f"{said}; its loss at the end is {losses}."


def _verdict(one: Figures, reference: Figures) -> str:
    ratio = one.ratio
    assert ratio is not None
    step = f"its step takes {ratio.median:.3f} of {reference.contender}'s ({ratio.between()})"
    if not ratio.is_conclusive:
        return (
            f"{one.contender} and {reference.contender} cannot be told apart: {step}, so nothing "
            f"can be concluded from {len(one.rounds_ms)} rounds. {_advice(ratio, one)}"
        )
    word = "faster" if ratio.median < 1 else "slower"
    return f"{one.contender} is {word} than {reference.contender}: {step}. {why(one, reference)}."


def why(one: Figures, reference: Figures) -> str:
    """What a step takes longer than computing alone, of both: that is all they differ in."""
    what = "communication" if one.sends else "the wrapper"
    if max(one.cost.low, reference.cost.low) <= 0:
        return f"What {what} adds to a step scatters too much to say more"
    costs = f"{_cost(one)}; with {reference.contender} it adds {_cost(reference)}"
    return f"{what.capitalize()} adds {costs}"


def added(cost: Estimate) -> str:
    """What communication adds to a step, of milliseconds that may be below 0."""
    return ms(cost.median) if cost.low > 0 else "nothing that can be measured"


def _cost(one: Figures) -> str:
    if one.cost.low <= 0:
        return added(one.cost)
    if one.exposed is None:
        return added(one.cost)
    exposed = min(one.exposed.median, one.cost.median)
    return f"{added(one.cost)} ({ms(exposed)} of it exposed, the rest slower computing)"


def ms(value: float) -> str:
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f} ms"


def _advice(ratio: Estimate, one: Figures) -> str:
    """How many rounds an interval that leaves out 1 would take: it shrinks with their root."""
    distance, half = abs(1 - ratio.median), (ratio.high - ratio.low) / 2
    rounds = len(one.rounds_ms) * (half / distance) ** 2 if distance > 0 else math.inf
    if rounds * 1.2 > MOST_ROUNDS:
        return f"If there is a difference, it is below {max(ratio.high - 1, 1 - ratio.low):.1%}."
    wanted = 10 * math.ceil(max(rounds * 1.2, 1.5 * len(one.rounds_ms)) / 10)
    return f"--rounds {wanted} might tell; the rounds that are there are kept."
