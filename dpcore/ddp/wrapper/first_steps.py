"""The first steps choose the order and size of buckets, and when buckets are sent.

After the first synchronised step, buckets get the order in which gradients arrived, and sizes that
were measured (rebuilding.py). With ``schedule="auto"`` the next steps alternate between two launch
schedules. The one with the shorter backward stays, with buckets that suit it. It depends on
free processors, on the network and on their cost, which cannot be known without a measurement
(docs/decisions/0026).

A step in which dynamo has compiled a graph of the model says nothing about the next ones, so it is
not measured: graphs that exist run for the first time then, and others come from other graphs.

Neither choice changes a bit of the result: sizes are chosen only where gradients are added in rank
order in any bucket. All ranks decide alike, by the longest of their times.
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Any

import torch

from dpcore.comm.communicators.protocol import capabilities_of, core_of
from dpcore.ddp.wrapper.launch_schedule import keeps_caps
from dpcore.ddp.wrapper.rebuilding import Cut, cut_for_the_end
from dpcore.recorder import facts as trace_facts

if TYPE_CHECKING:
    from dpcore.ddp.wrapper.wrapped import Wrapped

FIRST, SECOND = "bucketed", "sequential"  # the schedules to compare, in this order
_ROUND = 4  # pairs of steps between two comparisons of the ranks' times
_MOST = 12
_LARGE = 25 << 20  # bytes of a bucket, by default
_COMPILING = 4  # steps, or rounds, that are left out because a graph was compiled in them


class Trial:
    """A trial of two schedules in alternating steps: first and second, second and first, ..."""

    def __init__(self) -> None:
        self._completed = 0
        self._order: list[str] = []  # of the steps of this round that have run or are running
        self._seconds: list[float] = []  # their times, for those that have run
        self._pairs: list[tuple[float, float]] = []  # times of all rounds, the same on all ranks
        self._graphs = 0  # that dynamo had compiled when this round began
        self._left_out = 0  # rounds

    def before_forward(self, model: Wrapped) -> bool:
        """All ranks call it before a synchronised forward. False when the trial is over."""
        reducer = model._reducer
        if reducer.completed == self._completed:
            return True  # no backward since the last forward
        self._completed = reducer.completed
        if self._order:
            self._seconds.append(reducer.backward_ns * 1e-9)
        if len(self._seconds) == 2 * _ROUND:
            self._agree(model)
            if self._pairs and is_decided(self._pairs):
                self._conclude(model)
                return False
        if not self._order and not self._pairs and not self._left_out:
            self._graphs = model._graphs.count
        if len(self._seconds) == len(self._order):  # the first step in new buckets does not count
            turn = len(self._order) % 4
            self._order.append(FIRST if turn in (0, 3) else SECOND)
            reducer.use_schedule(self._order[-1])
        return True

    def _agree(self, model: Wrapped) -> None:
        compiled, self._graphs = model._graphs.count - self._graphs, model._graphs.count
        longest = torch.tensor([*self._seconds, compiled], dtype=torch.float64)
        model._model_group.all_reduce(longest, "max", async_op=False)
        *times, compiled = longest.tolist()
        if compiled > 0 and self._left_out < _COMPILING:
            self._left_out += 1
            self._order, self._seconds = [], []
            return
        for at in range(0, len(times), 2):
            pair = dict(zip(self._order[at : at + 2], times[at : at + 2], strict=True))
            self._pairs.append((pair[FIRST], pair[SECOND]))
        self._order, self._seconds = [], []

    def _conclude(self, model: Wrapped) -> None:
        first = statistics.median(pair[0] for pair in self._pairs)
        ratio = median_ratio(self._pairs)
        name = SECOND if ratio < 1 else FIRST
        model._reducer.use_schedule(name)
        model._first_steps.why["schedule"] = (
            f"{name}; in {2 * len(self._pairs)} steps by turns, backward took {first * 1e3:.3g} ms "
            f"{FIRST} and {ratio:.2f} times as long {SECOND}"
        )
        if name == SECOND:
            cut_for_the_end(model)


def median_ratio(pairs: list[tuple[float, float]]) -> float:
    """The second schedule's time over that of the first."""
    return math.exp(statistics.median(math.log(second / first) for first, second in pairs))


def is_decided(pairs: list[tuple[float, float]]) -> bool:
    """Whether nearly all pairs agree, or enough pairs have run.

    >>> is_decided([(1.0, 1.2)] * 4), is_decided([(1.0, 1.2)] * 3 + [(1.0, 0.9)])
    (True, False)
    """
    against = sum(second < first for first, second in pairs)
    return min(against, len(pairs) - against) <= len(pairs) // 8 or len(pairs) >= _MOST


class FirstSteps:
    """The choices of a model's first steps: those still open, and those made."""

    def __init__(self, group: Any, caps_are: str, schedule: Any) -> None:
        """``caps_are``: "given", "auto" or "default". ``schedule``: as the program gave it."""
        alike = caps_are != "given" and any_layout_adds_alike(group)
        may_choose = caps_are == "auto" or (caps_are == "default" and alike)
        self.chooses_caps = may_choose and keeps_caps(schedule)
        self.adds_in_order = may_choose and alike
        is_open = schedule == "auto"
        can_try = group.world_size > 1 and capabilities_of(group).on_processors
        self._trial = Trial() if is_open and can_try else None
        self.schedule = FIRST if is_open else schedule
        self.why: dict[str, str] = {}  # the reason for each choice, shown to the user
        self.cut: Cut | None = None  # the measurements by which sizes were chosen
        self.measured_in_vain = 0  # steps whose measurements were implausible
        self._graphs = 0  # that dynamo had compiled before the last step
        self._left_out = 0  # steps in which it compiled
        self._looked_at = 0  # how many backwards had been averaged then
        self.is_settled = False

    def were_compiling(self, model: Wrapped) -> bool:
        """Whether dynamo has compiled a graph of the model in the last step, on this rank."""
        compiled, self._graphs = model._graphs.count - self._graphs, model._graphs.count
        self._left_out += compiled > 0
        return compiled > 0 and self._left_out <= _COMPILING

    def go_on(self, model: Wrapped) -> None:
        """All ranks call it before each synchronised forward, until the model is settled."""
        reducer = model._reducer
        if reducer.wants_rebuild:
            if reducer.completed == self._looked_at:
                return  # a second forward of this step: nothing has been measured since the first
            self._looked_at = reducer.completed
            model._rebuild_buckets()
            model._graphs.warn(model)
            trace_facts.note(model)
        elif reducer.completed > 0 and self._trial is not None:
            if not self._trial.before_forward(model):
                self._trial = None
        elif reducer.completed > 0:
            self.is_settled = True
            trace_facts.note(model)


def any_layout_adds_alike(group: Any) -> bool:
    """Whether the choice of buckets cannot change a bit: gradients are always added in rank order,
    and "auto" would not choose another algorithm for large buckets either."""
    if not (capabilities_of(group).ordered and capabilities_of(group).on_processors):
        return False
    choice = core_of(group).explain("all_reduce", _LARGE)
    if choice["way"] == "alone":
        return True
    if choice["asked"]:
        return False
    is_ordered = {one["algorithm"]: one["ordered"] for one in choice["candidates"]}
    return bool(choice["way"] == "memory" or is_ordered[choice["algorithm"]])
