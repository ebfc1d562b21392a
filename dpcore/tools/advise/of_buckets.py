"""Causes that lie in when and how gradients are sent: buckets, unused parameters, compiled code."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from itertools import accumulate

from dpcore.tools.advise.evidence import Bucket, Evidence, Step
from dpcore.tools.advise.finding import Finding, shown

MIB = 1 << 20
_DEFAULT_CAP = 25 * MIB
_WORTH = 0.05  # a gain is named from this share of a step on
_ONE = 0.9  # the share of the bytes that makes a bucket the only one
_PIECES = 4
_MANY = 6
_SMALL = 2 * MIB
_LATE = 0.25  # of backward
_AT_ONCE, _AT_ONCE_COMPILED = 0.8, 0.5  # of the time to the last gradient, before the first comes
_FEW = 0.1  # of all bytes
_COPIES = 0.05
_STEPPED, _LARGE_STATE = 0.1, 512 * MIB
_AFTER_BACKWARD = ("sequential", "flat")


def waits_ms(e: Evidence) -> float:
    """What a rank waits for the link in a step, and not for a late rank."""
    return e.median(_wait_of)


def tiny(e: Evidence) -> Finding | None:
    """Many more buckets than their bytes need. Of an emulated link the simulator knows better."""
    if not e.count or e.link:
        return None
    buckets = _usual(e)
    total, count = sum(b.bytes for b in buckets), len(buckets)
    needed = 1 + math.ceil(max(0, total - MIB) / _DEFAULT_CAP)
    if count < _MANY or total == 0 or count <= 2 * needed or total / count > _SMALL:
        return None
    flight = e.median(lambda step: step.flight_ms - step.late_ms)
    # Of the smaller ones even the quickest costs this; what is left of it are fixed costs.
    fixed = _fixed_ms(e)
    high = min(flight, waits_ms(e) + fixed * (count - needed))
    if high < _WORTH * e.step_ms:
        return None
    return Finding(
        cause="tiny buckets",
        says="Gradients travel in many small buckets, each of which costs time of its own.",
        evidence=(
            f"{count} buckets of {_size(total / count)} each in a step; torch's default makes "
            f"{needed}. They are in flight for {shown(flight)} ms of a step, and "
            f"{shown(waits_ms(e))} of these are exposed"
        ),
        high_ms=high,
        why="all that is exposed, and the fixed costs of the buckets that would be saved",
        change=(
            "leave out bucket_cap_mb (25), or DistributedDataParallel(model, bucket_cap_mb="
            f"{max(2, round(total / MIB / 4))})"
            if e.of_torch
            else "leave out bucket_cap_mb: the first steps then measure which size is best"
        ),
    )


def giant(e: Evidence) -> Finding | None:
    """All gradients in one bucket, which is sent when backward is over."""
    if not e.count or at_end(e) is not None or e.schedule == "sequential":
        return None
    buckets = _usual(e)
    total = sum(b.bytes for b in buckets)
    largest = max(buckets, key=lambda b: b.bytes, default=None)
    if largest is None or total < MIB or largest.bytes < _ONE * total:
        return None
    hideable = []
    for steps in e.ranks:
        for step in steps:
            one = max(step.buckets, key=lambda b: b.bytes)
            sizes = [nbytes for _, nbytes in step.arrivals]
            if step.arrivals and (not any(sizes) or max(sizes) > _ONE * sum(sizes)):
                return None  # a gradient is not divided
            hideable.append(min(_wait_of(step), _hideable(one)))
    if statistics.median(hideable) < _WORTH * e.step_ms:
        return None
    cap = max(2, round(total / MIB / _PIECES))
    most = max((nbytes for _, nbytes in e.ranks[0][0].arrivals), default=0)
    is_default = e.of_torch and len(buckets) > 1 and largest.bytes <= _DEFAULT_CAP + most
    return Finding(
        cause="one giant bucket",
        says=(
            f"Smaller buckets than torch's default would be sent earlier: one holds "
            f"{largest.bytes / total:.0%} of this small model."
            if is_default
            else "One bucket holds nearly all gradients, so they are sent when backward is over."
        ),
        trades=is_default,
        evidence=(
            f"it holds {_size(largest.bytes)}, {largest.bytes / total:.0%} of all gradients; its "
            f"first gradient comes {shown(_at(e, lambda b: b.first_ms))} ms after backward begins, "
            f"and it is sent after {shown(_at(e, lambda b: b.launch_ms))} ms; "
            f"{shown(waits_ms(e))} ms of a step are exposed"
        ),
        # One huge operation may be slower than several, so more than what they hide can be gained.
        high_ms=waits_ms(e),
        why="all that is exposed",
        change=(
            f"DistributedDataParallel(model, bucket_cap_mb={cap})"
            if e.of_torch
            else 'schedule="bucketed", and leave out bucket_cap_mb'
        ),
    )


def first_late(e: Evidence) -> Finding | None:
    """Gradients are there, and nothing is sent."""
    if not e.count or giant(e) is not None or at_end(e) is not None or _is_searched(e):
        return None
    if len(_usual(e)) < 2 or e.schedule in _AFTER_BACKWARD:
        return None
    late: list[float] = []
    gains: list[float] = []
    waiting: list[float] = []
    for steps in e.ranks:
        for step in steps:
            sizes = list(accumulate(nbytes for _, nbytes in step.arrivals))
            launch = min(b.launch_ms for b in step.buckets)
            if not sizes or sizes[-1] == 0:
                return None
            enough = next((at for (at, _), n in zip(step.arrivals, sizes, strict=True) if n >= MIB),
                          launch)  # fmt: skip
            before = max((n for (at, _), n in zip(step.arrivals, sizes, strict=True)
                          if at <= launch), default=0)  # fmt: skip
            late.append(launch - enough)
            waiting.append(before)
            gains.append(min(_wait_of(step), launch - enough))
    ms, high = statistics.median(late), statistics.median(gains)
    backward = e.median(lambda step: step.backward_ms)
    nbytes = statistics.median(waiting)
    first = min(_usual(e), key=lambda b: b.launch_ms)
    if ms < _LATE * backward or high < _WORTH * e.step_ms or nbytes < 2 * MIB:
        return None
    blocks = nbytes > 1.5 * first.bytes
    return Finding(
        cause="first bucket late",
        says="The first bucket is sent late, and all others wait for it."
        if blocks
        else "The first bucket is large, so the link has nothing to do at first.",
        evidence=(
            f"when it is sent, {shown(_first_launch(e))} ms after backward begins, gradients of "
            f"{_size(nbytes)} have come, and it holds {_size(first.bytes)}; "
            f"{shown(waits_ms(e))} ms of a step are exposed"
        ),
        high_ms=high,
        why="the time in which the link could have been sending",
        change=_change_of_first(e, blocks),
    )


def at_end(e: Evidence) -> Finding | None:
    """All gradients come within a moment at the end of backward."""
    if not e.count or e.on_gpu:
        return None
    firsts, lasts = [], []
    for steps in e.ranks:
        for step in steps:
            if len(step.arrivals) < 2 or step.backward_ms <= 0:
                return None
            firsts.append(_begin_of(step.arrivals))
            lasts.append(step.arrivals[-1][0])
    first, last = statistics.median(firsts), statistics.median(lasts)
    backward = e.median(lambda step: step.backward_ms)
    high = min(waits_ms(e), first)
    at_once = _AT_ONCE_COMPILED if e.compiled else _AT_ONCE
    if first < max(at_once * last, backward / 3) or high < _WORTH * e.step_ms:
        return None
    return Finding(
        cause="gradients at the end",
        says=(
            "A compiled graph delivers its gradients at the end of backward, so little is sent "
            "before."
            if e.compiled
            else "All gradients come at the end of backward, so nothing is sent before."
        ),
        evidence=(
            f"a tenth of the gradients is there {shown(first)} ms after backward begins, which "
            f"takes {shown(backward)} ms, and the last one after {shown(last)}; "
            f"{shown(waits_ms(e))} ms of a step are exposed"
            + (f". dpcore: {e.graphs}" if e.graphs else "")
        ),
        high_ms=high,
        why="all that is exposed, as far as backward is long enough to hide it",
        change=(
            _change_of_compiled(e)
            if e.compiled
            else "find what holds gradients back: one custom autograd function around the whole "
            "model, gradients that are copied by hand, or static_graph=True in its first step"
        ),
    )


def _change_of_compiled(e: Evidence) -> str:
    if not e.graphs:
        return (
            "torch._dynamo.config.optimize_ddp = True (the default) splits the graph where buckets "
            "end; it needs torch.compile(DistributedDataParallel(model)), without fullgraph=True"
        )
    if "compiled before it was wrapped" in e.graphs:
        return (
            "wrap the model before its first compiled forward, or call torch._dynamo.reset() after "
            "wrapping; with Inductor, gradients then leave while the graph runs"
        )
    return (
        "docs/compile.md says for each reason that dpcore gives what lets gradients leave while "
        "the graph runs; where all of them have left, computing the last ones takes this long"
    )


def _begin_of(arrivals: Sequence[tuple[float, int]]) -> float:
    """When the first gradients have come. One that comes alone makes no difference, and a small one
    may be of no parameter."""
    sizes = list(accumulate(nbytes for _, nbytes in arrivals))
    return next(at for (at, _), n in zip(arrivals, sizes, strict=True) if n >= _FEW * sizes[-1])


def unused(e: Evidence) -> Finding | None:
    """DDP searches the graph for unused parameters in every step."""
    if not e.count or not _is_searched(e):
        return None
    searched = [s for steps in e.ranks for s in steps if s.search_ms is not None]
    ms = statistics.median(s.search_ms or 0.0 for s in searched)
    # Buckets are never rebuilt in the order of arrival, and a map of the used ones travels.
    launches = [min((b.launch_ms for b in s.buckets), default=0.0) for s in searched]
    held = statistics.median(
        min(_wait_of(s), max(0.0, at)) for s, at in zip(searched, launches, strict=True)
    )
    count = len(e.ranks[0][0].arrivals)
    return Finding(
        cause="unused parameters searched",
        says="DDP searches for unused parameters in every step (find_unused_parameters=True).",
        evidence=(
            f"the search takes {shown(ms)} ms, a map of the used parameters travels in an "
            "all-reduce of its own, and buckets stay in the order of the parameters: the first is "
            f"sent {shown(statistics.median(launches))} ms after backward begins"
            + (f"; {count} gradients came in each step" if count and _is_constant(e) else "")
        ),
        high_ms=max(ms + held, 0.01),
        why="the search, and what is exposed while the first bucket was not sent",
        change=(
            "leave out find_unused_parameters if every parameter gets a gradient (torch raises an "
            "error in the second step if not); if the same ones are unused in every step, "
            "DistributedDataParallel(model, static_graph=True)"
        ),
    )


def copies(e: Evidence) -> Finding | None:
    """DDP copies all gradients out of its buckets."""
    ms = e.median(lambda step: step.copies_ms)
    if not e.of_torch or ms < _COPIES * e.step_ms or ms <= 0.5:
        return None
    return Finding(
        cause="copies out of buckets",
        says="DDP copies every gradient out of its bucket.",
        evidence=f"copy_bucket_to_grad takes {shown(ms)} ms of a step of {shown(e.step_ms)} ms",
        high_ms=ms,
        why="these copies",
        change="DistributedDataParallel(model, gradient_as_bucket_view=True), which also saves the "
        "memory of one copy of the gradients",
    )


def whole_optimizer(e: Evidence) -> Finding | None:
    """Every rank steps all parameters, and keeps the state for all."""
    ms = e.median(lambda step: step.optimizer_ms)
    nbytes = sum(b.bytes for b in _usual(e))
    if not e.count or e.world < 2 or e.schedule.startswith("zero") or nbytes == 0:
        return None
    if ms < _STEPPED * e.step_ms and nbytes < _LARGE_STATE:
        return None
    share = 1 - 1 / e.world
    made = "torch.optim.AdamW, lr=...)"
    return Finding(
        cause="optimizer",
        says="Each rank could step a part of the parameters, and keep the state for that part.",
        trades=True,
        evidence=(
            f"the optimizer's step takes {shown(ms)} ms of {shown(e.step_ms)}; gradients have "
            f"{_size(nbytes)}, and the state of Adam or AdamW twice as much on every rank, "
            f"{share:.0%} of which would be saved"
        ),
        high_ms=share * ms,
        why="of the optimizer's step; the parts of the parameters have to travel",
        change=(
            f"torch.distributed.optim.ZeroRedundancyOptimizer(model.parameters(), {made}"
            if e.of_torch
            else 'dp.DataParallel(model, schedule="zero1"); the optimizer becomes '
            "dp.DistributedOptimizer(optimizer, model)"
        ),
    )


def _usual(e: Evidence) -> tuple[Bucket, ...]:
    return next((step.buckets for steps in e.ranks for step in steps), ())


def _is_searched(e: Evidence) -> bool:
    steps = [step for of_rank in e.ranks for step in of_rank]
    return sum(step.search_ms is not None for step in steps) > len(steps) / 2


def _is_constant(e: Evidence) -> bool:
    return len({len(step.arrivals) for steps in e.ranks for step in steps}) == 1


def _fixed_ms(e: Evidence) -> float:
    """The least that an operation took."""
    times = [b.wire_ms for steps in e.ranks for s in steps for b in s.buckets if b.wire_ms > 0]
    return min(times, default=0.0)


def _hideable(one: Bucket) -> float:
    """What of a bucket's flight could have been under backward, in pieces."""
    before = (one.launch_ms - one.first_ms) * (1 - 1 / _PIECES)
    return max(0.0, min(one.wire_ms * (1 - 1 / _PIECES), before))


def _wait_of(step: Step) -> float:
    return max(0.0, step.exposed_ms - step.late_ms)


def _at(e: Evidence, of: Callable[[Bucket], float]) -> float:
    return statistics.median(
        of(max(step.buckets, key=lambda b: b.bytes)) for steps in e.ranks for step in steps
    )


def _first_launch(e: Evidence) -> float:
    return e.median(lambda step: min(b.launch_ms for b in step.buckets))


def _change_of_first(e: Evidence, blocks: bool) -> str:
    if not e.of_torch:
        return "leave out bucket_cap_mb: its first bucket is small, and buckets follow the arrival"
    if blocks:
        return (
            "buckets leave in order of their numbers: a parameter whose gradient comes late is in "
            "the first. Register modules in the order of forward, leave out "
            "find_unused_parameters (which keeps DDP from sorting), and let ranks run the same "
            "branches"
        )
    return (
        "leave out bucket_cap_mb, so that the first bucket has 1 MiB; or, from torch 2.13 on, "
        "DistributedDataParallel(model, bucket_cap_mb_list=[1, 25])"
    )


def _size(nbytes: float) -> str:
    return f"{shown(nbytes / MIB)} MiB" if nbytes >= MIB / 10 else f"{nbytes / 1024:.3g} KiB"
