"""Rebuilds buckets after the first step: in the order in which gradients arrived and, unless sizes
were given, with measured sizes.

Two things are measured: when each gradient was ready in the first step, on the latest rank, and
the cost of operations between these ranks (``Speed``). In the model, operations in flight overlap:
once its bucket is ready, each occupies the link for its share and its bytes, one after the other,
and the latency is added at the end. Small buckets begin early, large ones pay the share less often;
the choice is the largest size that takes at most 1% longer than the best. If buckets are only sent
after backward, small ones have no advantage: then they are as large as possible, if that saves 1%.

On a busy machine small operations may take longer than large ones. A measurement by which bytes
would be faster than any memory is repeated, at once and then before the next steps. If none is
plausible, buckets get the default sizes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dpcore import _C
from dpcore.comm.communicators.read_back import numbers_in
from dpcore.ddp.wrapper.parameters import comes_sparse
from dpcore.ddp.wrapper.wrapped import Wrapped, profiled_as

CAPS_MB = (0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 25.0, 50.0, 100.0)
_MIB = 1 << 20
LARGEST = int(CAPS_MB[-1] * _MIB)
AT_THE_END = f"{LARGEST / _MIB:g} MiB each at most: they leave after backward only"
_LARGE, _FLIGHT = _MIB, 8  # most bytes of a large operation, number of small ones in flight
_FASTEST = 1e12  # bytes per second, more than any memory has
_REPEATS = 3  # steps in which a measurement is repeated
_SLACK = 0.01  # of the time until all gradients are averaged


class Speed(NamedTuple):
    """How fast a group's operations are, in seconds and bytes per second."""

    latency: float  # of a small one
    share: float  # of a small one among several
    bandwidth: float


class Cut(NamedTuple):
    """The measurements of the first step that a later cut needs."""

    order: list[int]
    computing: float  # seconds from the first gradient to the last
    share: float  # of a small operation among several, in seconds


def rebuild(model: Wrapped) -> None:
    """Rebuilds the buckets in rank 0's order. All ranks call it."""
    reducer = model._reducer
    count = len(model._parameters_by_number)
    arrived = list(reducer.arrival_order)
    # Else this rank had run out of inputs, or one graph delivered all in the order of its inputs.
    is_complete = len(arrived) == count and not model._graphs.are_late(reducer)
    sent = torch.tensor(arrived if is_complete else range(count)[::-1], device=model.device)
    if model._first_steps.were_compiling(model):
        sent.fill_(-1)  # rank 0's counts
    with torch.profiler.record_function(profiled_as(model, "broadcast") or "order of buckets"):
        model._model_group.broadcast(sent, 0)
    order = numbers_in(sent, model.group)
    if -1 in order:
        return  # the reducer asks for it again before the next forward
    caps: list[int] = []
    if model._first_steps.chooses_caps:
        came = dict(zip(arrived, reducer.arrival_ns, strict=True)) if is_complete else {}
        chosen = _measured_caps(model, order, came)
        if chosen is None:
            return  # the reducer asks for it again before the next forward
        caps, why = chosen
        _note_caps(model, caps, why)
    reducer.rebuild(order, caps)


def cut_for_the_end(model: Wrapped) -> None:
    """Enlarges buckets that are only sent after backward, where each one but the first costs its
    share without gain. All ranks call it with the same data. Buckets are not rebuilt if that saves
    less than 1%, nor under a communication hook: it may keep a state for each bucket, as PowerSGD
    does, and torch cuts buckets only once."""
    cut = model._first_steps.cut
    if cut is None or model._caps == [LARGEST] or model._comm_hooks:
        return
    in_vain = (len(model.bucket_report()) - 1) * cut.share
    if in_vain > _SLACK * cut.computing:
        _note_caps(model, [LARGEST], AT_THE_END)
        model._reducer.rebuild(cut.order, [LARGEST])


def _note_caps(model: Wrapped, caps: list[int], why: str) -> None:
    model._first_steps.why["buckets"] = why
    model._caps = caps
    # torch.compile splits graphs by this cap, and refuses less than torch's first bucket.
    model.bucket_bytes_cap = max(caps[-1], vars(dist)["_DEFAULT_FIRST_BUCKET_BYTES"])


def _measured_caps(
    model: Wrapped, order: list[int], came_ns: dict[int, int]
) -> tuple[list[int], str] | None:
    """The caps and the reason for them. None if the next step is to measure again."""
    if model.device.type != "cpu":
        return list(model._caps), "as without measuring: gradients of a GPU come unseen by the host"
    if model.schedule == "sequential":
        return [LARGEST], AT_THE_END
    if model.group.world_size == 1:
        return [LARGEST], "a single rank sends nothing"
    parameters = model._parameters_by_number
    nbytes = [parameter.nbytes for parameter in parameters]
    smallest = int(CAPS_MB[0] * _MIB)
    if sum(nbytes) <= smallest:
        return [smallest], "all gradients together are as small as the smallest bucket"
    begin = min(came_ns.values(), default=0)
    ready = torch.tensor(
        [(came_ns.get(number, begin) - begin) * 1e-9 for number in range(len(parameters))],
        dtype=torch.float64,
    )
    model._model_group.all_reduce(ready, "max", async_op=False)
    sparse = comes_sparse(model.module, parameters)
    types = [parameter.dtype for parameter in parameters]
    speed = measured_speed(model._model_group, min(sum(nbytes), _LARGE))
    if speed is None:
        model._first_steps.measured_in_vain += 1
        if model._first_steps.measured_in_vain < _REPEATS:
            return None
        return list(model._caps), (
            f"as without measuring: in {_REPEATS} steps, small operations took longer than large "
            "ones, since the machine was busy with something else"
        )
    model._first_steps.cut = Cut(order, float(ready.max()), speed.share)
    caps = best_caps(
        nbytes,
        [types.index(kind) for kind in types],
        [number for number in order if not sparse[number]],
        ready.tolist(),
        speed,
    )
    return caps, (
        f"{caps[-1] / _MIB:g} MiB each: an operation was measured to take "
        f"{speed.latency * 1e6:.3g} us, one of many {speed.share * 1e6:.3g} us, and bytes "
        f"{speed.bandwidth * 1e-6:.3g} MB/s"
    )


def measured_speed(group: Any, large_bytes: int = _LARGE) -> Speed | None:
    """Measures the group with tensors on the CPU; None if no measurement was plausible. All ranks
    call it and get the same result."""
    one = [torch.zeros(1)]
    flight = [torch.zeros(1) for _ in range(_FLIGHT)]
    large = [torch.zeros(large_bytes // 4)]
    for _ in range(_REPEATS):
        seconds = [_seconds_of(group, tensors) for tensors in (one, flight, large)]
        agreed = torch.tensor(seconds, dtype=torch.float64)
        group.all_reduce(agreed, "max", async_op=False)
        latency, of_flight, of_large = agreed.tolist()
        if (of_large - latency) * _FASTEST > large_bytes:
            share = max(of_flight - latency, 0.0) / (_FLIGHT - 1)
            return Speed(latency, share, large_bytes / (of_large - latency))
    return None


def _seconds_of(group: Any, tensors: Sequence[torch.Tensor]) -> float:
    """The median time of concurrent all-reduces of the tensors."""
    taken = []
    for _ in range(5):
        group.all_reduce(tensors[0], "sum", async_op=False)  # all begin together
        begin = time.perf_counter()
        for work in [group.all_reduce(tensor, "sum", async_op=True) for tensor in tensors]:
            work.wait()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def best_caps(
    sizes: Sequence[int],
    kinds: Sequence[int],
    order: Sequence[int],
    ready: Sequence[float],
    speed: Speed,
) -> list[int]:
    """The caps with which communication ends first. ``ready``: seconds, by gradient number.

    >>> from dpcore.ddp.wrapper.rebuilding import Speed, best_caps
    >>> sizes, ready = [1 << 20] * 8, [0.01 * number for number in range(8)]
    >>> [cap >> 20 for cap in best_caps(sizes, [0] * 8, range(8), ready, Speed(1e-4, 1e-5, 1e8))]
    [1]
    >>> [cap >> 20 for cap in best_caps(sizes, [0] * 8, range(8), ready, Speed(1e-4, 1e-5, 1e12))]
    [100]
    """
    ends = {}
    for cap_mb in CAPS_MB:
        cap = int(cap_mb * (1 << 20))
        free = 0.0
        for bucket in _C.plan_buckets(sizes, kinds, order, [cap]):
            begin = max(free, *(ready[number] for number in bucket))
            free = begin + speed.share + sum(sizes[n] for n in bucket) / speed.bandwidth
        ends[cap] = free + speed.latency
    enough = min(ends.values()) * (1 + _SLACK)
    return [max(cap for cap, end in ends.items() if end <= enough)]
