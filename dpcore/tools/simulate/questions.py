"""Questions that take many predictions: how sure one is, what is best, how many ranks pay.

interval(...)   from the least to the most that a step may take
candidates(...) schedules, caps and algorithms, of which one is the best for a link
until(...)      how many ranks keep an efficiency
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from dpcore.reference.launches import ACROSS_STEPS
from dpcore.tools.simulate.classes import (
    MANY,
    MANY_ON_HOSTS,
    one_host_stands_for_all,
    stands_for_all,
)
from dpcore.tools.simulate.gradients import Gradients
from dpcore.tools.simulate.links import Links
from dpcore.tools.simulate.processors import Processors
from dpcore.tools.simulate.residuals import measured_between, varied
from dpcore.tools.simulate.shapes import POWERS_OF_TWO
from dpcore.tools.simulate.training import Prediction, alone_seconds

MOST_RANKS = 4096
_MEASURED_RANKS = 8  # beyond, no prediction was compared with a run
_SEEDS = 4  # of a link's jitter and loss
_CAPS_MB = (1.0, 4.0, 25.0)
_SCHEDULES = ("bucketed", "sequential", *ACROSS_STEPS)
_ALGORITHMS = ("two_shot", "ring")


class Asked(NamedTuple):
    """What ``predict`` is asked for."""

    schedule: Any
    bucket_cap_mb: float | None
    algorithm: Any


@dataclass(frozen=True)
class Interval:
    """Milliseconds of a step; ``source`` says what of, or why there is none."""

    low_ms: float
    high_ms: float
    source: str


def on_ranks(recorded: Gradients, world: int) -> Gradients:
    """The work on so many ranks. On more than have been recorded, and more than a few, each takes
    as long as the slowest one: thousands of ranks have one that does."""
    if world <= max(_MEASURED_RANKS, recorded.world):
        return recorded.on(world)
    slowest = max(
        range(recorded.world), key=lambda rank: recorded.forward[rank] + recorded.backward[rank]
    )
    return recorded.like([slowest] * world)


def is_extrapolated(world: int) -> bool:
    """Whether no run of this kind has been compared with its prediction."""
    return world > _MEASURED_RANKS


def interval(
    work: Gradients,
    links: Links,
    predicted: Prediction,
    again: Callable[..., Prediction],
    processors: Processors = Processors.free(),  # noqa: B008
) -> Interval:
    """``again(work, links, processors)`` predicts the same for another step of the recording, other
    random numbers, or costs of another calibration. Around all of that lies what the model was off
    in the cells of ``docs/simulator.md``."""
    by_length = sorted(work.spread, key=lambda step: step.compute_seconds)
    ends = [by_length[0], by_length[-1]] if by_length else []
    # Stragglers as recorded are drawn from all recorded steps for each of them.
    steps = [again(replace(each, spread=work.spread), links, processors) for each in ends]
    seeds: list[Prediction] = []
    if links.inter.jitter or links.inter.loss:
        others = [replace(links.inter, seed=links.inter.seed + n) for n in range(1, 1 + _SEEDS)]
        seeds = [again(work, replace(links, inter=other), processors) for other in others]
    costs: list[Prediction] = []
    if not processors.is_free:
        costs = [again(work, links, varied(processors, times)) for times in (-1, 1)]
    kind = "intervals" if work.updates else "steps"
    sources = [f"the shortest and longest of {len(work.spread)} recorded {kind}"] * bool(steps)
    sources += ["jitter and loss"] * bool(seeds) + ["other calibrations"] * bool(costs)
    sources += ["what nine of ten measured cells were off"]
    found = [one.step_ms for one in (predicted, *steps, *seeds, *costs)]
    low, high = measured_between(min(found), max(found), predicted.schedule in ACROSS_STEPS)
    return Interval(round(low, 3), round(high, 3), ", ".join(sources))


def candidates(work: Gradients, links: Links, hooked: bool = False) -> list[Asked]:
    """All named schedules with several sizes of buckets and algorithms. ``hooked``: only those that
    work with a communication hook."""
    algorithms = [*_ALGORITHMS]
    if 1 < links.ranks_per_host < work.world:
        algorithms.append("hierarchical")
    is_power = not work.world & (work.world - 1)
    if is_power and (2 < work.world <= _MEASURED_RANKS or work.world > MANY):  # else long
        algorithms.append("halving_doubling")
    return [
        Asked(schedule, cap, algorithm)
        for schedule in _SCHEDULES
        if not (hooked and schedule in ACROSS_STEPS)
        for cap in _CAPS_MB
        for algorithm in algorithms
    ]


@dataclass(frozen=True)
class Efficiency:
    """``world`` is the most ranks that keep it, 0 if two do not, and ``steps`` has what was tried:
    ranks and the milliseconds of a step."""

    world: int
    steps: Sequence[tuple[int, float]]


def ranks_tried(links: Links, algorithm: Any, straggle: bool) -> tuple[int, bool]:
    """Up to how many ranks ``until`` may go, by doubling hosts of several, and whether only to
    powers of two: thousands where one stands for all, a thousand where one host does, else as many
    as can be simulated each."""

    def doubled(limit: int) -> int:
        own = links.ranks_per_host
        return limit if own > limit else own << ((limit // own).bit_length() - 1)

    powers = algorithm in POWERS_OF_TWO if isinstance(algorithm, str) else False
    work = Gradients([8], [0], [0.1], [0.1], [[0.1]])
    most = MANY
    if not straggle and stands_for_all(work.on(MOST_RANKS), links, algorithm):
        most = MOST_RANKS
    elif not straggle:
        hosts = work.on(doubled(MANY_ON_HOSTS))
        most = MANY_ON_HOSTS if one_host_stands_for_all(hosts, links, algorithm) else MANY
    return doubled(most), powers


def until(
    recorded: Gradients,
    efficiency: float,
    ranks_to_ms: Callable[[int], float],
    most: int = MOST_RANKS,
    powers: bool = False,
    ranks_per_host: int = 1,
) -> Efficiency:
    """The most ranks of which each does at least ``efficiency`` of the work that it does alone, up
    to ``most``: by doubling, then by halves unless only ``powers`` of two are asked for. From one
    host on, whole hosts. ``ranks_to_ms``: a step on so many.

    >>> work = Gradients([8], [0], [0.1], [0.8], [[0.5]])
    >>> until(work, 0.9, lambda world: 900 + world).world
    100
    """
    alone = alone_seconds(recorded) * 1e3
    tried: dict[int, float] = {}

    def keeps(world: int) -> bool:
        tried[world] = ranks_to_ms(world)
        return alone / tried[world] >= efficiency

    def whole(world: int) -> int:
        return world if world < ranks_per_host else world - world % ranks_per_host

    low, high = 1, whole(2)
    while high <= most and keeps(high):
        low, high = high, whole(2 * high)
    while not powers and high <= most and high - low > max(1, low // 64):
        middle = whole((low + high) // 2)
        if middle == low:
            break
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return Efficiency(low if low > 1 else 0, sorted(tried.items()))
