"""Ranks that compute longer than was recorded, in some steps or in all."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dpcore.errors import Unsupported
from dpcore.tools.simulate.gradients import Gradients

Pace = Callable[[int, int], float]  # of a rank in a step: how many times as long it computes


@dataclass(frozen=True)
class Stragglers:
    """Each rank's time in each step is multiplied by a number.

    ``factors``: by rank, in all steps; where there are fewer than ranks they begin anew.
    ``normal``: the standard deviation of a normal distribution around 1.
    ``exponential``: the mean of a delay that is added, as a share of the step.
    ``recorded``: as much longer as a recorded step, drawn for each rank and step, took than the
    least one. ``seed``: of what is drawn. The same seed gives the same steps.
    """

    factors: Sequence[float] = (1.0,)
    normal: float = 0.0
    exponential: float = 0.0
    recorded: bool = False
    seed: int = 0

    @property
    def are_drawn(self) -> bool:
        """Whether steps differ."""
        return bool(self.normal or self.exponential or self.recorded)

    def pace(self, work: Gradients) -> Pace:
        if not self.factors or min(*self.factors, self.normal, self.exponential, 1.0) < 0:
            raise Unsupported(f"{self}: a factor, a deviation and a delay are numbers from 0 on")
        if self.recorded and not work.spread:
            raise Unsupported("stragglers as recorded need a trace with several steps")

        def of(rank: int, step: int) -> float:
            drawn = random.Random(f"{self.seed} {rank} {step}")
            factor = self.factors[rank % len(self.factors)]
            factor *= max(0.0, drawn.gauss(1, self.normal))
            if self.exponential:
                factor += drawn.expovariate(1 / self.exponential)
            if self.recorded:
                taken = drawn.choice(work.spread)
                factor *= _seconds(taken, rank) / _seconds(work, rank)
            return factor

        return of

    def fastest(self, work: Gradients, steps: int) -> Gradients:
        """The work of each rank as in the fastest of its first ``steps``."""
        if self == Stragglers():
            return work
        pace, drawn = self.pace(work), range(steps if self.are_drawn else 1)
        return work.slowed_by(
            [min(pace(rank, step) for step in drawn) for rank in range(work.world)]
        )


def _seconds(work: Gradients, rank: int) -> float:
    return work.forward[rank] + work.backward[rank]
