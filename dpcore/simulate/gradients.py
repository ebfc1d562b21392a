"""What a step computes, and when its gradients come: from a trace, or from a description."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpcore.errors import Error
from dpcore.show.buckets import described_model
from dpcore.show.figures import steps_of
from dpcore.show.reading import RankEvents, read_run

DEFAULT_CAPS = (1 << 20, 25 << 20)  # of DataParallel, and of traces that don't say any


@dataclass(frozen=True)
class Gradients:
    """What a step computes. Seconds; by rank where ranks differ.

    ``ready[rank][gradient]``: after the begin of backward. ``backward``: how long it computes.
    ``caps``: bytes of the first bucket, the second, ... in the run that this is from; the last is
    for all further.
    """

    sizes: list[int]
    kinds: list[int]
    forward: list[float]
    backward: list[float]
    ready: list[list[float]]
    caps: Sequence[int] = DEFAULT_CAPS

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
        )

    @property
    def compute_seconds(self) -> float:
        """Forward and backward of the rank that takes longest."""
        return max(f + b for f, b in zip(self.forward, self.backward, strict=True))


def gradients_of(path: Path) -> Gradients:
    """From a trace of a ``DataParallel``, or from a description such as

    ``{"forward_ms": 5, "backward_ms": 9, "gradients": [{"bytes": 4096, "ready_ms": 2.5}]}``
    """
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as problem:
        raise Error(f"{path} is neither a trace nor a list of gradients: {problem}") from problem
    if isinstance(content, dict) and "gradients" in content:
        return _of_description(path, content)
    return _of_trace(path)


def _of_description(path: Path, content: dict[str, Any]) -> Gradients:
    try:
        gradients = content["gradients"]
        return Gradients(
            sizes=[int(g["bytes"]) for g in gradients],
            kinds=[0] * len(gradients),
            forward=[content["forward_ms"] * 1e-3],
            backward=[content["backward_ms"] * 1e-3],
            ready=[[g["ready_ms"] * 1e-3 for g in gradients]],
        )
    except (KeyError, TypeError) as problem:
        raise Error(
            f"{path}: forward_ms, backward_ms and for each of the gradients bytes and ready_ms "
            f"are needed ({type(problem).__name__}: {problem})"
        ) from problem


def _of_trace(path: Path) -> Gradients:
    run = read_run(path)
    ran = {event.model for rank in run.ranks for event in rank.ready}
    found = [model for number in sorted(ran) if (model := described_model(run, number))]
    if len(ran) != 1 or not found:
        raise Error(
            f"{path} shows {len(ran) if found else 0} models; the gradients of one are needed, so "
            "record a block in which one model is trained"
        )
    (model,) = found
    if not any(model["parameter_bytes"]):
        raise Error(
            f"{path} does not say how large gradients are: record it with "
            "torch.profiler.profile(record_shapes=True), or with dpcore.trace"
        )
    count = len(model["parameters"])
    kinds = [0] * count
    types = sorted({bucket["dtype"] for bucket in model["buckets"]})
    for bucket in model["buckets"]:
        for gradient in bucket["gradients"]:
            kinds[gradient] = types.index(bucket["dtype"])
    forward, backward, ready = [], [], []
    for rank in run.ranks:
        times = _times_of(rank, count)
        if times is None:
            raise Error(f"{path}: rank {rank.rank} has no complete step with forward and backward")
        forward.append(times[0])
        backward.append(times[1])
        ready.append(times[2])
    caps = model.get("bucket_caps", DEFAULT_CAPS)
    return Gradients(list(model["parameter_bytes"]), kinds, forward, backward, ready, caps)


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
