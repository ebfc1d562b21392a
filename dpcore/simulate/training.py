"""A step of data parallel training, predicted: gradients, buckets, launches, the wait at the end.

Left out: that communication takes processors and memory bandwidth from the computation beside it,
what an operation costs a processor (some 20 us), and jitter. So it is a bound that a run should
come near where the link is what takes time, and says little about memory that ranks share.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpcore.costs.link import Speed
from dpcore.errors import Error, Unsupported
from dpcore.reference.buckets import plan_buckets
from dpcore.show.buckets import described_model
from dpcore.show.figures import steps_of
from dpcore.show.reading import RankEvents, read_run
from dpcore.simulate.network import Network, NetworkOperation

SCHEDULES = ("bucketed", "sequential", "per_parameter", "flat", "oracle")
CAPPED = SCHEDULES[:2]  # their buckets have the size that was asked for
DEFAULT_CAPS = (1 << 20, 25 << 20)  # of DataParallel, and of traces that don't say any
_UNLIMITED = 1 << 62


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


@dataclass(frozen=True)
class Prediction:
    """Milliseconds of a step, which is forward, backward and communication, of the rank that takes
    longest. ``bound_ms``: no schedule is faster, since the first gradient has to be there before
    the card has anything to do. ``bucket_cap_mb``: what was asked for, or None for the caps that
    come with the gradients."""

    schedule: str
    algorithm: str
    bucket_cap_mb: float | None
    buckets: int
    step_ms: float
    exposed_ms: float
    bound_ms: float


def predict(
    work: Gradients,
    link: Speed,
    schedule: str = "bucketed",
    bucket_cap_mb: float | None = None,
    algorithm: str = "two_shot",
) -> Prediction:
    """The step of a schedule over a link. Without ``bucket_cap_mb``, with the caps of the run that
    the gradients are from.

    >>> ready = [0.01 * i for i in range(1, 9)]
    >>> work = Gradients([1_250_000] * 8, [0] * 8, [0.01], [0.08], [ready])
    >>> predict(work.on(2), Speed(1.25e8), "sequential").exposed_ms
    80.0
    """
    if schedule not in SCHEDULES:
        raise Unsupported(f"schedule {schedule!r}: choose of {', '.join(SCHEDULES)}")
    buckets = _buckets(work, schedule, bucket_cap_mb)
    operations = []
    for number, bucket in enumerate(buckets):
        ready = [
            work.forward[rank] + max(work.ready[rank][gradient] for gradient in bucket)
            for rank in range(work.world)
        ]
        end = [work.forward[rank] + work.backward[rank] for rank in range(work.world)]
        launched = end if schedule == "sequential" else ready
        nbytes = sum(work.sizes[gradient] for gradient in bucket)
        priority = 0 if schedule == "sequential" else number
        operations.append(NetworkOperation(nbytes, launched, priority))
    if schedule != "oracle":
        Network(work.world, link, algorithm).run(operations)
    ends, exposed = [], []
    for rank in range(work.world):
        computed = work.forward[rank] + work.backward[rank]
        done = max((o.finished[rank] for o in operations if o.finished), default=0.0)
        ends.append(max(computed, done))
        exposed.append(max(0.0, done - computed))
    return Prediction(
        schedule=schedule,
        algorithm=algorithm,
        bucket_cap_mb=bucket_cap_mb,
        buckets=len(buckets),
        step_ms=round(max(ends) * 1e3, 3),
        exposed_ms=round(statistics.mean(exposed) * 1e3, 3),
        bound_ms=round(bound_seconds(work, link) * 1e3, 3),
    )


def bound_seconds(work: Gradients, link: Speed) -> float:
    """Computing alone, or the time to the first gradient and all bytes at full bandwidth."""
    computed = work.compute_seconds
    if not link.bytes_per_second or work.world == 1:
        return computed
    first = max(f + min(r) for f, r in zip(work.forward, work.ready, strict=True))
    nbytes = 2 * (work.world - 1) / work.world * sum(work.sizes)
    return max(computed, first + link.latency + nbytes / link.bytes_per_second)


def _buckets(work: Gradients, schedule: str, cap_mb: float | None) -> list[list[int]]:
    """As the reducer plans them after the first step: in the order of arrival on rank 0."""
    order = sorted(range(len(work.sizes)), key=lambda gradient: work.ready[0][gradient])
    wanted = work.caps if cap_mb is None else [int(cap_mb * (1 << 20))]
    caps = {"per_parameter": [0], "flat": [_UNLIMITED]}.get(schedule, wanted)
    return plan_buckets(work.sizes, work.kinds, order, caps)


# ---- where the gradients come from ---------------------------------------------------------------


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


def sweep(
    work: Gradients,
    link: Speed,
    schedules: Sequence[str],
    caps: Sequence[float | None],
    algorithms: Sequence[str],
) -> list[Prediction]:
    """Every combination that differs: caps mean nothing to per_parameter, flat and oracle."""
    predictions = []
    for schedule in schedules:
        for cap in caps if schedule in CAPPED else caps[:1]:
            for algorithm in algorithms if schedule != "oracle" else algorithms[:1]:
                predictions.append(predict(work, link, schedule, cap, algorithm))
    return predictions
