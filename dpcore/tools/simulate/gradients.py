"""What a step computes, and when its gradients come: from a trace, or from a description."""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np

from dpcore.base.checked_json import Fields, ListOf, Unreadable, checking, number, whole
from dpcore.recorder.intervals import union_of
from dpcore.reference.buckets import plan_buckets
from dpcore.tools.show.buckets import described_model
from dpcore.tools.show.figures import steps_of
from dpcore.tools.show.reading import content_of, read_runs
from dpcore.tools.show.run import RankEvents, Run

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
    ``unknown``: what the recording does not say, in words. ``updates``: the arguments of
    ``LocalUpdates`` of a recording of those, which has no gradients: ``sizes`` are of parameters.
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
    unknown: tuple[str, ...] = ()
    updates: Mapping[str, Any] | None = None

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

    def slowed_by(self, factors: Sequence[float]) -> Gradients:
        """The same work where each rank takes so many times as long. ``spread`` stays as it is."""
        pairs = partial(zip, factors, strict=True)  # with what there is of each rank
        return replace(
            self,
            forward=[factor * seconds for factor, seconds in pairs(self.forward)],
            backward=[factor * seconds for factor, seconds in pairs(self.backward)],
            ready=[[factor * moment for moment in own] for factor, own in pairs(self.ready)],
            begins=[[factor * moment for moment in own] for factor, own in pairs(self.begins)],
            update=[factor * seconds for factor, seconds in pairs(self.update)],
        )

    def on_cores_of_their_own(self, cores: float, together: int) -> Gradients:
        """What ``together`` ranks compute that were recorded on fewer ``cores``. They compute at
        the same time, so each second of a core took ``together / cores``; what they waited for a
        core is taken out, since the simulator lets them wait again. Where a recording does not say
        how busy they were, they can't have had more of the cores than there is."""
        times = max(1.0, together / cores) if cores else 1.0
        had = [min(busy, 1 / times) for busy in self.busy]
        kept = [max(busy, 1 - busy * (times - 1)) for busy in had]
        return replace(
            self.slowed_by(kept),
            update=[seconds / times for seconds in self.update],
            busy=[busy / share for share, busy in zip(kept, had, strict=True)],
            spread=tuple(each.on_cores_of_their_own(cores, together) for each in self.spread),
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
    """From a trace of a ``DataParallel`` or of local updates, which may be a folder or several
    files as ``dpcore show`` takes them, or from a description such as

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
    runs = read_runs([path, *more])
    run = runs[0]
    if len(runs) > 1 and not (_of_torch(run) and _are_windows(runs)):
        raise Unreadable(f"{path} holds {len(runs)} runs; name the files of one")
    ran = {event.model for rank in run.ranks for event in (*rank.ready, *rank.launches)}
    found = [model for number in sorted(ran) if (model := described_model(run, number))]
    blocks = [model for model in run.models if model.get("local_updates")]
    if not ran and len(blocks) == 1 and all(steps_of(rank) for rank in run.ranks):
        return _of_block(run, blocks[0])
    if _of_torch(run) and len(found) > 1:
        found = [_usual(run, found)]
    elif len(ran) != 1 or not found:
        raise Unreadable(
            f"{path} shows {len(ran) if found else 0} models; the gradients of one are needed, so "
            "record a block in which one model is trained"
        )
    (model,) = found
    by_bucket = _of_torch(run) and not any(rank.ready for rank in run.ranks)
    if by_bucket:  # over NCCL the host runs ahead, and only buckets are seen on the device
        sizes = [bucket["bytes"] for bucket in model["buckets"]]
        kinds = [0] * len(sizes)
    else:
        sizes = model.get("parameter_bytes", [])
        kinds = _kinds(model)
    if not any(sizes):
        raise Unreadable(
            f"{path} does not say how large gradients are: record it with "
            "torch.profiler.profile(record_shapes=True), or with dpcore.trace"
        )
    number = model.get("number", 0)
    by_rank = [
        [
            step
            for window in runs
            for rank in window.ranks
            if rank.rank == one.rank
            for step in _steps_of(rank, len(sizes), number if _of_torch(run) else 0, by_bucket)
        ]
        for one in run.ranks
    ]
    for rank, steps in zip(run.ranks, by_rank, strict=True):
        if not steps:
            raise Unreadable(
                f"{path}: rank {rank.rank} has no complete step with forward and backward"
            )
    modules = model.get("modules", [])
    caps, unknown = _caps_of(run, model, sizes, by_bucket)
    if "busy" not in model and not by_bucket:
        unknown.append("how busy a core was (it is taken to compute all the time)")
    stepped = model.get("update_ms", 0.0) * 1e-3  # by the program itself
    if not stepped and not any(step.update for steps in by_rank for step in steps):
        unknown.append("the optimizer's step (it is taken to take no time)")

    def made(times: Sequence[_Times], spread: tuple[Gradients, ...] = ()) -> Gradients:
        return Gradients(
            list(sizes), kinds, [t.forward for t in times], [t.backward for t in times],
            [t.ready for t in times], caps,
            modules=[module["gradients"] for module in modules],
            begins=[[module["begin"] * t.forward for module in modules] for t in times],
            update=[t.update * _parts_of(model, run.world_size) or stepped for t in times],
            spread=spread, busy=[model.get("busy", 1.0)] * len(times), unknown=tuple(unknown),
        )  # fmt: skip

    together = list(zip(*by_rank, strict=False))
    spread = tuple(map(made, together)) if len(together) > 1 else ()
    return made([_least_of(steps) for steps in by_rank], spread)


def _of_block(run: Run, model: Mapping[str, Any]) -> Gradients:
    """What steps of local updates compute, by the median of those that neither send nor receive.
    What the others compute beyond that is taken to be the outer optimizer's."""
    options = model["local_updates"]
    every = options["sync_every"]
    busy = options["fragments"] * (2 if options["delay"] else 1)  # such steps in an interval
    sizes = list(model.get("parameter_bytes", []))
    quiet, outer, intervals = [], 0.0, 1
    for rank in run.ranks:
        alone, sending = _local_steps(rank, every)
        quiet.append(alone or sending)
        intervals = max(1, round((len(alone) + len(sending)) / every))
        if alone and sending:
            outer = max(outer, (median(sending) - median(alone)) * busy)

    def made(seconds: list[float], **more: Any) -> Gradients:
        return Gradients(
            sizes, [0] * len(sizes), [0.0] * len(seconds), seconds,
            [[each] * len(sizes) for each in seconds], **more,
        )  # fmt: skip

    intervals = min(intervals, *map(len, quiet))
    means = [
        made([fmean(_part(steps, number, intervals)) for steps in quiet])
        for number in range(intervals)
    ]
    return made(
        [median(steps) for steps in quiet],
        spread=tuple(means) if len(means) > 1 else (),
        unknown=("gradients (so schedules other than local:N can't be predicted)",),
        updates={**options, "outer": outer},
    )


def _part(values: Sequence[float], number: int, parts: int) -> Sequence[float]:
    return values[len(values) * number // parts : len(values) * (number + 1) // parts]


def _local_steps(rank: RankEvents, every: int) -> tuple[list[float], list[float]]:
    """Seconds that steps compute: of those without communication, and of the others."""
    exposed = union_of(rank.exposed)
    begins = [event.begin_ns for event in rank.operations]
    steps = steps_of(rank)
    alone: list[float] = []
    sending: list[float] = []
    for begin, end in steps[1:] if len(steps) > every + 1 else steps:  # the first warms up
        waited = exposed.between(begin, end)
        sends = waited or bisect_left(begins, begin) < bisect_left(begins, end)
        (sending if sends else alone).append((end - begin - waited) * 1e-9)
    return alone, sending


def _of_torch(run: Run) -> bool:
    return any(model.get("schedule") == "torch DDP" for model in run.models)


def _are_windows(runs: Sequence[Run]) -> bool:
    """Whether they are repetitions of a profiler's schedule: the same ranks, model and folder."""
    first = runs[0]
    return all(
        _of_torch(run)
        and run.path.absolute().parent == first.path.absolute().parent
        and [rank.rank for rank in run.ranks] == [rank.rank for rank in first.ranks]
        and run.models == first.models
        for run in runs
    )


def _usual(run: Run, layouts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The layout of most steps; of two as frequent ones the later, since DDP begins with another
    one than it keeps."""
    sent = Counter(event.model for rank in run.ranks for event in rank.launches)
    steps = {n: sent[model["number"]] / len(model["buckets"]) for n, model in enumerate(layouts)}
    return layouts[max(steps, key=lambda n: (steps[n], n))]


def _kinds(model: Mapping[str, Any]) -> list[int]:
    kinds = [0] * len(model.get("parameter_bytes", []))
    types = sorted({bucket.get("dtype", "") for bucket in model["buckets"]})
    for bucket in model["buckets"]:
        for gradient in bucket["gradients"]:
            kinds[gradient] = types.index(bucket.get("dtype", ""))
    return kinds


def _caps_of(
    run: Run, model: Mapping[str, Any], sizes: Sequence[int], by_bucket: bool
) -> tuple[Sequence[int], list[str]]:
    """The caps of the run, and sentences about what of them is a guess."""
    if caps := model.get("bucket_caps"):
        return caps, []
    if not _of_torch(run):
        return DEFAULT_CAPS, []
    unknown = []
    if missing := run.world_size - len(run.ranks):
        unknown.append(f"{missing} of {run.world_size} ranks (taken to compute as the others do)")
    if by_bucket:
        unknown.append(
            "the gradients within a bucket (each bucket counts as one gradient, ready when its "
            "kernel began, so smaller buckets can't be predicted)"
        )
        return [1], unknown
    filled = [bucket for bucket in model["buckets"] if bucket["gradients"]]  # no map of the unused
    counts = [len(bucket["gradients"]) for bucket in filled]
    order = list(range(len(sizes)))[::-1]
    closed = [bucket["bytes"] for bucket in filled[:-1]]
    for caps in (DEFAULT_CAPS, *([cap] for cap in sorted(closed)), [sum(sizes)]):
        planned = plan_buckets(sizes, [0] * len(sizes), order, caps)
        if [len(bucket) for bucket in planned] == counts:
            words = "torch's default" if caps is DEFAULT_CAPS else f"{caps[0] / 2**20:.3g} MiB"
            unknown.append(f"bucket_cap_mb (the buckets are those of {words})")
            return caps, unknown
    unknown.append("bucket_cap_mb (no single one makes these buckets; torch's default is taken)")
    return DEFAULT_CAPS, unknown


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


def _steps_of(
    rank: RankEvents, count: int, model: int = 0, by_bucket: bool = False
) -> list[_Times]:
    """``model``: the layout whose steps count, or 0 for all. ``by_bucket``: each launch of a bucket
    counts as its one gradient."""
    backwards = [event for event in rank.compute if event.name == "backward"]
    updates = [event for event in rank.compute if event.name in ("update", "optimizer")]
    elsewhere = union_of([*rank.exposed, *updates])

    def clock(*moments: int) -> list[float]:
        """The seconds that forward and backward have computed by then."""
        times = np.array(moments, np.int64)
        return [float(t) for t in (times - elsewhere.covered_until(times)) * 1e-9]

    came = rank.launches if by_bucket else rank.ready
    came = [event for event in came if model in (0, event.model)]
    arrivals = [event.begin_ns for event in came]
    ready = clock(*arrivals)
    found = []
    for begin, end in steps_of(rank):
        inside = [event for event in backwards if begin <= event.begin_ns < end]
        if not inside:
            continue
        event = inside[-1]
        since, start, over = clock(begin, event.begin_ns, event.end_ns)
        times = [over - start] * count
        last_ns = (
            end if by_bucket else event.end_ns
        )  # its kernel may begin after the last other one
        inside_of_it = range(bisect_left(arrivals, event.begin_ns), bisect_right(arrivals, last_ns))
        if model and not inside_of_it:
            continue
        for at in inside_of_it:
            if came[at].operation < count:
                times[came[at].operation] = min(ready[at], over) - start
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
