"""What a step computes, and when its gradients come: from a trace, or from a description."""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dpcore.base.checked_json import Fields, ListOf, Unreadable, checking, number, whole
from dpcore.recorder.intervals import union_of
from dpcore.tools.show.buckets import described_model
from dpcore.tools.show.figures import steps_of
from dpcore.tools.show.reading import content_of, read_run
from dpcore.tools.show.run import RankEvents

PARTS = ("zero1", "zero2")  # schedules under which each rank updates a part of the parameters
DEFAULT_CAPS = (1 << 20, 25 << 20)  # of DataParallel, and of traces that don't say any


@dataclass(frozen=True)
class Gradients:
    """What a step computes. Seconds; by rank where ranks differ.

    ``ready[rank][gradient]``: after the begin of backward. ``backward``: how long it computes.
    ``caps``: bytes of the first bucket, the second, ... in the run that this is from; the last is
    for all further. ``modules``: the gradients of each, in the order of forward, and
    ``begins[rank][module]``: after the begin of forward. Without them forward is taken to spend its
    time as backward does, in the reverse order. ``update``: what the optimizer takes for all
    parameters; without it, nothing. ``spread``: the same of each recorded step, where there are
    several. ``busy``: the share of forward and backward in which they use a core; without it, all.
    """

    sizes: list[int]
    kinds: list[int]
    forward: list[float]
    backward: list[float]
    ready: list[list[float]]
    caps: Sequence[int] = DEFAULT_CAPS
    modules: Sequence[Sequence[int]] = ()
    begins: Sequence[Sequence[float]] = ()
    update: Sequence[float] = ()
    spread: tuple[Gradients, ...] = ()
    busy: Sequence[float] = ()

    def __post_init__(self) -> None:
        if not self.modules:
            order = sorted(range(len(self.sizes)), key=lambda gradient: -self.ready[0][gradient])
            begins = [
                _as_backward(order, ready, forward)
                for ready, forward in zip(self.ready, self.forward, strict=True)
            ]
            object.__setattr__(self, "modules", [[gradient] for gradient in order])
            object.__setattr__(self, "begins", begins)
        if not self.busy:
            object.__setattr__(self, "busy", [1.0] * len(self.forward))
        if not self.update:
            object.__setattr__(self, "update", [0.0] * len(self.forward))

    @property
    def world(self) -> int:
        return len(self.forward)

    def on(self, world: int) -> Gradients:
        """The same work on more or fewer ranks: each takes over the times of one that there is."""
        return self.like([rank % self.world for rank in range(world)])

    def like(self, ranks: Sequence[int]) -> Gradients:
        """The same work on so many ranks, each of which takes as long as the one named here."""
        return replace(
            self,
            forward=[self.forward[r] for r in ranks],
            backward=[self.backward[r] for r in ranks],
            ready=[self.ready[r] for r in ranks],
            begins=[self.begins[r] for r in ranks],
            update=[self.update[r] for r in ranks],
            busy=[self.busy[r] for r in ranks],
            spread=tuple(each.like(ranks) for each in self.spread),
        )

    @property
    def compute_seconds(self) -> float:
        """Forward and backward of the rank that takes longest."""
        return max(f + b for f, b in zip(self.forward, self.backward, strict=True))


def _as_backward(order: Sequence[int], ready: Sequence[float], forward: float) -> list[float]:
    """When forward begins with each gradient's parameter, if it takes the share of forward that the
    gradient takes of backward."""
    before = {}
    last = 0.0
    for gradient in sorted(order, key=ready.__getitem__):
        before[gradient], last = ready[gradient] - last, ready[gradient]
    ends = accumulate(before[gradient] for gradient in order)
    return [forward * (end - before[g]) / (last or 1.0) for g, end in zip(order, ends, strict=True)]


def gradients_of(path: Path, *more: Path) -> Gradients:
    """From a trace of a ``DataParallel``, which may be a folder or several files as ``dpcore show``
    takes them, or from a description such as

    ``{"forward_ms": 5, "backward_ms": 9, "gradients": [{"bytes": 4096, "ready_ms": 2.5}]}``

    It may also say ``"update_ms"``, the optimizer's time, and of each gradient ``"needed_ms"``:
    when forward begins with its parameter.
    """
    if not more and not os.path.isdir(path):
        content = content_of(path)
        if isinstance(content, dict) and "gradients" in content:
            with checking(path):
                return _of_description(content)
    return _of_trace(path, more)


def _is_in_order(content: dict[str, Any]) -> str:
    gradients, backward_ms = content["gradients"], content["backward_ms"]
    last = max((gradient["ready_ms"] for gradient in gradients), default=0)
    if last > backward_ms:
        return f"has a gradient at {last} ms, after the end of backward at {backward_ms} ms"
    needed = [gradient["needed_ms"] for gradient in gradients if "needed_ms" in gradient]
    if needed and len(needed) < len(gradients):
        return f"says needed_ms of {len(needed)} of {len(gradients)} gradients"
    if max(needed, default=0) > (forward_ms := content["forward_ms"]):
        return f"needs a gradient at {max(needed)} ms, after the end of forward at {forward_ms} ms"
    return "" if gradients else "has an empty list of gradients"


_MS = number(0, 1e9, "milliseconds, from 0 on")
_DESCRIPTION = Fields(
    {
        "forward_ms": _MS, "backward_ms": _MS,
        "gradients": ListOf(Fields({"bytes": whole(), "ready_ms": _MS}, {"needed_ms": _MS})),
    },
    {"update_ms": _MS},
    agree=_is_in_order,
)  # fmt: skip


def _of_description(content: dict[str, Any]) -> Gradients:
    _DESCRIPTION.check(content)
    gradients = content["gradients"]
    needed = [gradient["needed_ms"] for gradient in gradients if "needed_ms" in gradient]
    order = sorted(range(len(needed)), key=needed.__getitem__)
    return Gradients(
        sizes=[g["bytes"] for g in gradients],
        kinds=[0] * len(gradients),
        forward=[content["forward_ms"] * 1e-3],
        backward=[content["backward_ms"] * 1e-3],
        ready=[[g["ready_ms"] * 1e-3 for g in gradients]],
        modules=[[gradient] for gradient in order],
        begins=[[needed[gradient] * 1e-3 for gradient in order]],
        update=[content.get("update_ms", 0.0) * 1e-3],
    )


def _of_trace(path: Path, more: Sequence[Path]) -> Gradients:
    run = read_run(path, *more)
    ran = {event.model for rank in run.ranks for event in rank.ready}
    found = [model for number in sorted(ran) if (model := described_model(run, number))]
    if len(ran) != 1 or not found:
        raise Unreadable(
            f"{path} shows {len(ran) if found else 0} models; the gradients of one are needed, so "
            "record a block in which one model is trained"
        )
    (model,) = found
    sizes = model.get("parameter_bytes", [])
    if not any(sizes):
        raise Unreadable(
            f"{path} does not say how large gradients are: record it with "
            "torch.profiler.profile(record_shapes=True), or with dpcore.trace"
        )
    count = len(sizes)
    kinds = [0] * count
    types = sorted({bucket.get("dtype", "") for bucket in model["buckets"]})
    for bucket in model["buckets"]:
        for gradient in bucket["gradients"]:
            kinds[gradient] = types.index(bucket.get("dtype", ""))
    by_rank = [_steps_of(rank, count) for rank in run.ranks]
    for rank, steps in zip(run.ranks, by_rank, strict=True):
        if not steps:
            raise Unreadable(
                f"{path}: rank {rank.rank} has no complete step with forward and backward"
            )
    caps = model.get("bucket_caps") or DEFAULT_CAPS
    modules = model.get("modules", [])

    def made(times: Sequence[_Times], spread: tuple[Gradients, ...] = ()) -> Gradients:
        return Gradients(
            list(sizes), kinds, [t.forward for t in times], [t.backward for t in times],
            [t.ready for t in times], caps,
            modules=[module["gradients"] for module in modules],
            begins=[[module["begin"] * t.forward for module in modules] for t in times],
            update=[t.update * (_parts_of(model, run.world_size)) for t in times],
            spread=spread, busy=[model.get("busy", 1.0)] * len(times),
        )  # fmt: skip

    together = list(zip(*by_rank, strict=False))
    spread = tuple(map(made, together)) if len(together) > 1 else ()
    return made([_least_of(steps) for steps in by_rank], spread)


def _parts_of(model: Mapping[str, Any], world: int) -> int:
    """By how many ranks the optimizer's work was divided."""
    return world if model.get("schedule") in PARTS else 1


class _Times(NamedTuple):
    """Of a rank in a step: until the begin of backward, backward, each gradient after that begin,
    the optimizer; without what it waited."""

    forward: float
    backward: float
    ready: list[float]
    update: float


def _steps_of(rank: RankEvents, count: int) -> list[_Times]:
    backwards = [event for event in rank.compute if event.name == "backward"]
    updates = [event for event in rank.compute if event.name in ("update", "optimizer")]
    elsewhere = union_of([*rank.exposed, *updates])

    def clock(*moments: int) -> list[float]:
        """The seconds that forward and backward have computed by then."""
        times = np.array(moments, np.int64)
        return [float(t) for t in (times - elsewhere.covered_until(times)) * 1e-9]

    arrivals = [event.begin_ns for event in rank.ready]
    ready = clock(*arrivals)
    found = []
    for begin, end in steps_of(rank):
        inside = [event for event in backwards if begin <= event.begin_ns < end]
        if not inside:
            continue
        event = inside[-1]
        since, start, over = clock(begin, event.begin_ns, event.end_ns)
        times = [over - start] * count
        for at in range(
            bisect_left(arrivals, event.begin_ns), bisect_right(arrivals, event.end_ns)
        ):
            if rank.ready[at].operation < count:
                times[rank.ready[at].operation] = ready[at] - start
        update = sum(each.ms * 1e-3 for each in updates if begin <= each.begin_ns < end)
        found.append(_Times(start - since, over - start, times, update))
    return found


def _least_of(steps: Sequence[_Times]) -> _Times:
    """Other programs and waits make a step longer and nothing makes it shorter, so this is a step
    that nothing has disturbed, and no step of the trace computed in less."""
    return _Times(
        forward=min(step.forward for step in steps),
        backward=min(step.backward for step in steps),
        ready=[min(times) for times in zip(*(step.ready for step in steps), strict=True)],
        update=min((step.update for step in steps if step.update > 0), default=0.0),
    )
