"""What a step computes, and when its gradients come: from a trace, or from a description."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from dpcore.base.checked_json import Fields, ListOf, Unreadable, checking, number, whole
from dpcore.tools.show.buckets import described_model
from dpcore.tools.show.figures import steps_of
from dpcore.tools.show.reading import content_of, read_run
from dpcore.tools.show.run import RankEvents

DEFAULT_CAPS = (1 << 20, 25 << 20)  # of DataParallel, and of traces that don't say any


@dataclass(frozen=True)
class Gradients:
    """What a step computes. Seconds; by rank where ranks differ.

    ``ready[rank][gradient]``: after the begin of backward. ``backward``: how long it computes.
    ``caps``: bytes of the first bucket, the second, ... in the run that this is from; the last is
    for all further. ``modules``: the gradients of each, in the order of forward, and
    ``begins[rank][module]``: after the begin of forward. Without them forward is taken to spend its
    time as backward does, in the reverse order. ``update``: what the optimizer takes for all
    parameters; without it, nothing.
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

    def __post_init__(self) -> None:
        if not self.modules:
            order = sorted(range(len(self.sizes)), key=lambda gradient: -self.ready[0][gradient])
            begins = [
                _as_backward(order, ready, forward)
                for ready, forward in zip(self.ready, self.forward, strict=True)
            ]
            object.__setattr__(self, "modules", [[gradient] for gradient in order])
            object.__setattr__(self, "begins", begins)
        if not self.update:
            object.__setattr__(self, "update", [0.0] * len(self.forward))

    @property
    def world(self) -> int:
        return len(self.forward)

    def on(self, world: int) -> Gradients:
        """The same work on more or fewer ranks: each takes over the times of one that there is."""
        take = [rank % self.world for rank in range(world)]
        return replace(
            self,
            forward=[self.forward[r] for r in take],
            backward=[self.backward[r] for r in take],
            ready=[self.ready[r] for r in take],
            begins=[self.begins[r] for r in take],
            update=[self.update[r] for r in take],
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
    return "" if gradients else "has an empty list of gradients"


_MS = number(0, 1e9, "milliseconds, from 0 on")
_DESCRIPTION = Fields(
    {
        "forward_ms": _MS, "backward_ms": _MS,
        "gradients": ListOf(Fields({"bytes": whole(), "ready_ms": _MS})),
    },
    agree=_is_in_order,
)  # fmt: skip


def _of_description(content: dict[str, Any]) -> Gradients:
    _DESCRIPTION.check(content)
    gradients = content["gradients"]
    return Gradients(
        sizes=[g["bytes"] for g in gradients],
        kinds=[0] * len(gradients),
        forward=[content["forward_ms"] * 1e-3],
        backward=[content["backward_ms"] * 1e-3],
        ready=[[g["ready_ms"] * 1e-3 for g in gradients]],
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
    forward, backward, ready = [], [], []
    for rank in run.ranks:
        times = _times_of(rank, count)
        if times is None:
            raise Unreadable(
                f"{path}: rank {rank.rank} has no complete step with forward and backward"
            )
        forward.append(times[0])
        backward.append(times[1])
        ready.append(times[2])
    caps = model.get("bucket_caps") or DEFAULT_CAPS
    return Gradients(list(sizes), kinds, forward, backward, ready, caps)


def _times_of(rank: RankEvents, count: int) -> tuple[float, float, list[float]] | None:
    """The least over the steps: to the begin of backward, backward, each gradient. Other programs
    and waits make a step longer and nothing makes it shorter, so this is a step that nothing has
    disturbed, and no step of the trace computed in less."""
    backwards = [event for event in rank.compute if event.name == "backward"]
    to_backward, computing = [], []
    arrivals: list[list[float]] = [[] for _ in range(count)]
    for begin, end in steps_of(rank):
        inside = [event for event in backwards if begin <= event.begin_ns < end]
        if not inside:
            continue
        event = inside[-1]
        to_backward.append((event.begin_ns - begin) * 1e-9)
        computing.append((event.end_ns - event.begin_ns) * 1e-9)
        for ready in rank.ready:
            if event.begin_ns <= ready.begin_ns <= event.end_ns and ready.operation < count:
                arrivals[ready.operation].append((ready.begin_ns - event.begin_ns) * 1e-9)
    if not to_backward:
        return None
    end_of_all = min(computing)
    times = [min(seen) if seen else end_of_all for seen in arrivals]
    return min(to_backward), end_of_all, times
