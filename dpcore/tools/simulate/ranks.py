"""What the ranks do: steps one after the other, on one network that never starts anew.

A step is forward, module by module, backward, gradient by gradient, and the optimizer's step. At
each event a launch schedule may send buckets or wait for them, as in csrc/reducer; what it leaves
in flight goes on under the next forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from dpcore.errors import Error
from dpcore.tools.collector import without_collector
from dpcore.tools.simulate.control import Control, HeardSchedule
from dpcore.tools.simulate.gradients import Gradients
from dpcore.tools.simulate.network import Network
from dpcore.tools.simulate.plan import Matching
from dpcore.tools.simulate.stragglers import Pace
from dpcore.tools.simulate.turns import Turns

_SAME = 1e-4  # steps that differ by less than this share of one are alike


@dataclass
class Steps:
    """Of one rank: the ends of its steps, and in each what it waited for."""

    ends: list[float] = field(default_factory=list)
    waits: list[dict[str, float]] = field(default_factory=list)

    def seconds(self, last: int) -> float:
        """Of a step, in the mean over the last ones."""
        begin = self.ends[-1 - last] if last < len(self.ends) else 0.0
        return (self.ends[-1] - begin) / last

    def is_steady(self, count: int) -> bool:
        """Whether the last two of the first ``count`` steps took as long."""
        first, second = (b - a for a, b in pairwise([0.0, *self.ends[:count]][-3:]))
        return abs(first - second) <= _SAME * second


class _Steady(Exception):
    """All further steps are like the last one."""


StepIsOver = Callable[[int, Turns], None]


class Program(Protocol):
    """What a rank runs."""

    turns: Turns


def run(
    network: Network, made: Callable[[int, StepIsOver], Program], until_steady: bool
) -> list[Steps]:
    """The steps of each simulated rank. ``made``: the program of a rank, which calls what it is
    given at the end of each step. ``until_steady``: no further step once two take as long on every
    rank."""
    done = [Steps() for _ in range(network.ranks)]

    def step_is_over(rank: int, turns: Turns) -> None:
        done[rank].ends.append(turns.now)
        done[rank].waits.append(turns.waits)
        turns.waits = {}
        count = min(len(each.ends) for each in done)
        if until_steady and count > 1 and all(each.is_steady(count) for each in done):
            for each in done:
                del each.ends[count:], each.waits[count:]
            raise _Steady

    ranks = [made(rank, step_is_over) for rank in range(network.ranks)]
    try:
        for rank in ranks:
            network.at(0.0, rank.turns.resume)
        with without_collector():
            network.go_on()
        for rank in ranks:
            if not rank.turns.is_over:
                raise Error(
                    f"rank {rank.turns.rank} of the simulation waits for ever: "
                    f"{rank.turns.waits_for}; another rank never sends it"
                )
    except _Steady:
        pass
    finally:
        for rank in ranks:
            rank.turns.end()
    return done


class Rank:
    """Trains for some steps with a launch schedule."""

    def __init__(
        self,
        rank: int,
        work: Gradients,
        network: Network,
        schedule: HeardSchedule,
        matching: Matching,
        pace: Pace,
        steps: int,
        step_is_over: StepIsOver,
    ) -> None:
        self._work, self._matching, self._plan = work, matching, matching.plan
        self._schedule, self._steps, self._step_is_over = schedule, steps, step_is_over
        self._begins = work.begins[rank]
        ready = work.ready[rank]
        self._arrivals = sorted((ready[gradient], gradient) for gradient in range(len(ready)))
        self._pace_of, self._pace = pace, 1.0
        self.turns = Turns(rank, network, self._program)

    def _program(self) -> None:
        before: Control | None = None
        for number in range(self._steps):
            self.turns.where = "forward"
            self._pace = self._pace_of(self.turns.rank, number)
            begin = self.turns.now
            self._forward(before)
            self.turns.note("forward", "compute", begin, number)
            step = Control(self.turns, self._schedule, self._matching, number, self._update_seconds)
            self.turns.where = "backward"
            self._backward(step, number)
            self.turns.where = "optimizer"
            self._optimizer_step(step)
            self._step_is_over(self.turns.rank, self.turns)
            before = step

    def _compute(self, seconds: float) -> None:
        self.turns.compute(seconds * self._pace, self._work.busy[self.turns.rank])

    @property
    def _update_seconds(self) -> float:
        return self._work.update[self.turns.rank] * self._pace

    def _forward(self, before: Control | None) -> None:
        done = 0.0
        if before is not None and before.is_in_flight:
            before.finish(self._plan.needed_by_none)
            for module, begin in enumerate(self._begins):
                if "forward_begin" not in self._schedule.listens or not before.is_in_flight:
                    break
                self._compute(begin - done)
                done = begin
                before.in_forward = True
                self._schedule.tell("forward_begin", before, module)
                before.in_forward = False
        self._compute(self._work.forward[self.turns.rank] - done)
        if before is not None:
            before.finish(self._schedule.order)

    def _backward(self, step: Control, of_step: int) -> None:
        begin = self.turns.now
        notices = not self._schedule.listens.isdisjoint(("bucket_complete", "slice_complete"))
        hears_all = notices or "gradient_ready" in self._schedule.listens
        hears_all = hears_all or self.turns.notes is not None
        done = 0.0
        for number, (ready, gradient) in enumerate(self._arrivals):
            bucket = self._plan.bucket_of[gradient]
            step.missing[bucket] -= 1
            if not hears_all and step.missing[bucket] > 0 and number > 0:
                continue  # nothing looks at it
            self._compute(ready - done)
            done = ready
            size = self._plan.sizes[gradient]
            self.turns.note("gradient ready", "ready", self.turns.now, gradient, size)
            if number == 0:
                step.first_gradient = self.turns.now
            if notices:
                step.notice_complete()
            self._schedule.tell("gradient_ready", step, gradient)
            if step.missing[bucket] == 0:
                self._schedule.tell("bucket_ready", step, bucket)
        self._compute(self._work.backward[self.turns.rank] - done)
        self.turns.note("backward", "compute", begin, of_step)
        self.turns.where = "end of backward"
        step.backward_ends = True
        self._schedule.tell("backward_end", step)
        step.backward_ends = False
        step.check_all_launched()
        self._await_or_defer(step)

    def _await_or_defer(self, step: Control) -> None:
        """The program may read gradients now, unless something waits for them later."""
        schedule = self._schedule
        defers = schedule.has_update or "optimizer_step" in schedule.listens
        if not step.is_in_flight or (defers and self._matching.hook is None):
            return
        if "forward_begin" in schedule.listens and not defers:
            raise schedule.error(
                "leaves buckets in flight at the end of backward and waits for them in "
                "forward_begin, after the optimizer has used their gradients. Wait in "
                "backward_end, or define optimizer_step and wait there"
            )
        step.wait_for_all()

    def _optimizer_step(self, step: Control) -> None:
        step.has_stepped = True
        if step.is_in_flight:
            self._schedule.tell("optimizer_step", step)
        if self._schedule.updates_parts:
            step.check_all_gathered()
        elif not self._schedule.has_update:
            step.wait_for_all()
            begin = self.turns.now
            self.turns.compute(self._update_seconds)
            if self._update_seconds:
                self.turns.note("update", "compute", begin)
