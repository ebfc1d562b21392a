"""Causes that lie in what ranks do between collectives: late ranks, data, batches, processors."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from dpcore.tools.advise.evidence import Evidence, Step
from dpcore.tools.advise.finding import Finding, shown

_LEAST_STEPS = 3
_LATER = 0.05  # a late rank costs at least this share of a step
_CORROBORATED = 0.4  # of the difference, the others have to be seen waiting
_LOADS, _LOADS_ALONE = 0.1, 0.15
_BETWEEN_TORCH, _BETWEEN = 0.12, 0.3  # only torch's profile knows the optimizer
_UNEQUAL, _UNEQUAL_UNSEEN = 0.03, 0.12
_ALIKE = 0.9  # correlation of forward and backward, if the work differs and not the machine
_SLOW_GFLOPS, _QUICK_GFLOPS = 1.0, 5.0
_IN_PRODUCTS = 0.15
_DISTURBED = 0.2
_CLOCKED_DOWN = 0.1
_CROWDED, _TOO_MANY = 2, 4  # threads for each processor


def straggler(e: Evidence) -> Finding | None:
    """One rank takes longer than every other one, in nearly every step."""
    if e.world < 2 or not e.all_ranks or e.count < _LEAST_STEPS or batches(e) is not None:
        return None
    times = e.together(lambda step: step.computing_ms)
    slow = max(range(e.world), key=lambda rank: statistics.median(t[rank] for t in times))
    others = [max(t[r] for r in range(e.world) if r != slow) for t in times]
    gaps = [t[slow] - other for t, other in zip(times, others, strict=True)]
    gap = statistics.median(gaps)
    late = [statistics.median(row[r] for r in range(e.world) if r != slow)
            for row in e.together(lambda step: step.late_ms)]  # fmt: skip
    is_steady = sum(g > 0 for g in gaps) >= len(gaps) - len(gaps) // 6
    noise = max(_spread([t[slow] for t in times]), _spread(others))
    if gap < _LATER * e.step_ms or not is_steady or gap < noise:
        return None
    if statistics.median(late) < _CORROBORATED * gap:
        return None
    mine = statistics.median(t[slow] for t in times)
    low, high = _quartiles(gaps)
    number = e.numbers[slow]
    return Finding(
        cause="straggler",
        says=f"Rank {number} computes longer than the other ranks, which wait for it.",
        evidence=(
            f"rank {number} computes {shown(mine)} ms in a step, the slowest of the others "
            f"{shown(statistics.median(others))}; the others wait "
            f"{shown(statistics.median(late))} ms in a step until it has entered ({e.counted})"
        ),
        low_ms=max(0.0, min(low, high)),
        high_ms=high,
        why="if it computed as long as the slowest other rank; the quartiles of the steps",
        change=(
            f"look at rank {number}'s host: other programs (top), a hot or capped processor or GPU "
            "(nvidia-smi -q -d PERFORMANCE), more work on that rank (logging, evaluation); or give "
            "it a smaller batch"
        ),
    )


def loader(e: Evidence) -> Finding | None:
    """A rank makes a batch while nothing else happens."""
    loads = e.together(lambda step: step.loading_ms)
    if not loads or e.step_ms <= 0:
        return None
    # Workers deliver batches in bursts, so their mean counts. Without them all take as long,
    # and the least counts: a busy machine makes some late.
    of = statistics.fmean if e.workers else min
    whole = loads if e.workers else loads[:-1] or loads  # the last step may end before it loads
    by_rank = [of([row[r] for row in whole]) for r in range(len(e.ranks))]
    ms = max(by_rank)
    if ms < max(1.0, _LOADS * e.step_ms):
        return None
    worst = max(range(len(by_rank)), key=by_rank.__getitem__)
    alone = len(by_rank) > 1 and by_rank[worst] > 3 * max(
        [ms for rank, ms in enumerate(by_rank) if rank != worst]
    )
    if alone and ms < _LOADS_ALONE * e.step_ms:
        return None
    whom = f"Rank {e.numbers[worst]} waits" if alone else "Ranks wait"
    change = (
        "more num_workers= or prefetch_factor= for the DataLoader, or less work for each sample"
        if e.workers
        else "DataLoader(..., num_workers=4, persistent_workers=True): batches are then made in "
        "other processes, while this one computes"
    )
    return Finding(
        cause="data loading",
        says=f"{whom} for data.",
        evidence=(
            "the DataLoader's next batch takes "
            + ", ".join(f"{shown(ms)} ms on rank {n}" for n, ms in _some(e, by_rank))
            + f" of a step of {shown(e.step_ms)} ms"
        ),
        high_ms=ms,
        why="all of the time in which the slowest rank loads",
        change=change,
    )


def between(e: Evidence) -> Finding | None:
    """Time of the program itself between steps, in which nothing of torch runs."""
    rows = e.together(lambda step: step.between_ms)
    if not rows or e.step_ms <= 0:
        return None
    by_rank = [statistics.median(row[r] for row in rows) for r in range(len(e.ranks))]
    ms = statistics.median(max(row) for row in rows)
    if ms < max(2.0, (_BETWEEN_TORCH if e.of_torch else _BETWEEN) * e.step_ms):
        return None
    if _quartiles([max(row) for row in rows])[0] < ms / 2:
        return None
    what = (
        "no operator of torch runs outside of forward and backward for "
        if e.of_torch
        else "between backward and the next forward pass "
    )
    return Finding(
        cause="data loading",
        says="Ranks spend much of a step outside of forward, backward and communication: "
        + ("data loading" if e.of_torch else "data loading, the optimizer")
        + ", logging, or Python.",
        evidence=what + ", ".join(f"{shown(ms)} ms on rank {n}" for n, ms in _some(e, by_rank)),
        high_ms=ms,
        why="all of that time",
        change=(
            "make batches in other processes: DataLoader(..., num_workers=4, "
            "persistent_workers=True); log and save every hundredth step"
            + ("" if e.of_torch else "; a fused optimizer, such as AdamW(..., fused=True)")
        ),
    )


def batches(e: Evidence) -> Finding | None:
    """Ranks have more work than others in the same step, since their batches differ."""
    if e.world < 2 or e.count < _LEAST_STEPS or not e.all_ranks:
        return None
    times = e.together(lambda step: step.computing_ms)
    gains = [max(row) - statistics.fmean(row) for row in times]
    gain = statistics.median(gains)
    shapes = {step.batch for steps in e.ranks for step in steps[: e.count] if step.batch}
    seen = _differing(shapes)
    if seen is not None:
        if gain < _UNEQUAL * e.step_ms or not _larger_take_longer(e, seen):
            return None
        sizes = sorted({step.batch[seen] for steps in e.ranks for step in steps if step.batch})
        told = f"inputs are {_words(sizes[0])} to {_words(sizes[-1])}"
        says = "Ranks have batches of different sizes, and wait for the one with the largest."
    else:
        is_known = bool(shapes) and all(step.batch for steps in e.ranks for step in steps)
        if is_known or gain < _UNEQUAL_UNSEEN * e.step_ms or not _work_varies(e):
            return None
        told = "forward and backward of a rank vary together from step to step"
        says = (
            "The work of a step differs between ranks, now more on one and now on another: "
            "batches of different sizes."
        )
    low, high = _quartiles(gains)
    return Finding(
        cause="unequal batches",
        says=says,
        evidence=(
            f"{told}; the rank with most work computes {shown(gain)} ms longer than the mean of "
            f"all, in a step of {shown(e.step_ms)} ms"
        ),
        low_ms=max(0.0, low),
        high_ms=high,
        why="if all ranks computed as long as their mean; the quartiles of the steps",
        change=(
            "give all ranks equal work in a step: DistributedSampler(..., drop_last=True) and "
            "drop_last=True of the DataLoader, or batches sorted by length, so that those of one "
            "step are alike"
        ),
    )


def threads(e: Evidence) -> Finding | None:
    """More threads than processors, or programs that take them away."""
    if e.on_gpu or e.step_ms <= 0 or not e.count:
        return None
    ranks = max(1, e.local_ranks)
    each = max(1, e.processors // ranks) if e.processors else 0
    known = ""
    crowded = e.threads * ranks / e.processors if e.threads > 1 and e.processors else 0.0
    if crowded:
        known = (
            f"{ranks} ranks with {e.threads} threads each share {e.processors} processors of their "
            "host"
        )
    steps = sum(step.ms for step in e.ranks[0]) or 1.0
    total = sum(one.total_ms for one in e.products)
    typical = sum(one.median_ms * one.count for one in e.products)
    quick = sum(one.quick_ms * one.count for one in e.products)
    gflops = sum(one.flops * one.count for one in e.products) / (typical or 1.0) * 1e-6
    lost = total - min(
        quick, sum(one.flops * one.count for one in e.products) / _QUICK_GFLOPS * 1e-6
    )
    # All recorded steps have products, and of the steps one was left out.
    many = len(e.ranks[0]) + 1
    is_slow = gflops < _SLOW_GFLOPS and total > _IN_PRODUCTS * steps
    is_disturbed = total - quick > _DISTURBED * steps and total > 2 * quick
    computing = [step.forward_ms + step.backward_ms for ranks in e.ranks for step in ranks]
    varies = statistics.median(computing) > 1.5 * min(computing)
    if e.products and (is_slow or is_disturbed):
        one = e.products[0]
        seen = (
            f"{one.what} takes {shown(one.median_ms)} ms, {one.flops / one.median_ms * 1e-6:.2g} "
            "GFLOP/s, where one core makes more than "
            f"{_QUICK_GFLOPS:.0f}"
            if is_slow
            else f"{one.what} takes {shown(one.quick_ms)} ms if nothing disturbs it, and "
            f"{shown(one.total_ms / one.count)} in the mean"
        )
        evidence, high = "; ".join(filter(None, [seen, known])), lost / many
        why = "the products of matrices at the pace of one undisturbed core"
    elif crowded > _TOO_MANY or (crowded >= _CROWDED and varies):
        spare = statistics.median(computing) - min(computing)
        evidence, high = known, max(spare, (1 - 1 / crowded) * statistics.median(computing))
        why = "computing, less the share of the threads that processors are there for"
    else:
        return None
    count = f"{each}" if each else "<processors of the host / its ranks>"
    return Finding(
        cause="oversubscribed threads",
        says="Threads compete for the processors: ranks start more of them than there are "
        "processors, or other programs run.",
        evidence=evidence,
        high_ms=min(high, e.step_ms),
        why=why,
        change=f"OMP_NUM_THREADS={count} in front of the command, or torch.set_num_threads({count})"
        " in the script; top shows other programs",
    )


def governor(e: Evidence) -> Finding | None:
    """The clock of the processors ran slower than it could while they computed."""
    if e.on_gpu or not e.count or e.governor in ("", "performance") or e.pace > 1 - _CLOCKED_DOWN:
        return None
    computing = e.median(lambda step: step.computing_ms)
    return Finding(
        cause="CPU governor",
        says="The processors' clock runs slower than it could.",
        evidence=(
            f"governor {e.governor!r}, at {e.pace:.0%} of the highest clock when the trace was "
            f"written; a step computes for {shown(computing)} ms"
        ),
        high_ms=(1 - e.pace) * computing,
        why="if it ran at the highest clock, which heat may forbid",
        change="cpupower frequency-set -g performance, as root on each host",
    )


def _differing(shapes: set[tuple[tuple[int, ...], ...]]) -> int | None:
    """The position of the input that differs, if the batches have the same number of inputs."""
    if len(shapes) < 2 or len({len(one) for one in shapes}) != 1:
        return None
    return next(n for n in range(len(next(iter(shapes)))) if len({one[n] for one in shapes}) > 1)


def _larger_take_longer(e: Evidence, at: int) -> bool:
    work: list[tuple[float, float]] = []
    for steps in e.ranks:
        work += [(_size(s.batch[at]), s.computing_ms) for s in steps if s.batch]
    sizes = [size for size, _ in work]
    small, large = min(sizes), max(sizes)
    ends = [[ms for size, ms in work if size == end] for end in (small, large)]
    return small < large and statistics.median(ends[1]) > statistics.median(ends[0])


def _work_varies(e: Evidence) -> bool:
    """Whether it is the work that differs from step to step, and not the machine: then forward and
    backward are long in the same steps, and the slowest rank is now one and now another."""
    times = e.together(lambda step: step.computing_ms)
    if e.count < 5:
        return False
    slowest = {max(range(e.world), key=row.__getitem__) for row in times}
    late = statistics.median(max(row) for row in e.together(lambda step: step.late_ms))
    gain = statistics.median(max(row) - statistics.fmean(row) for row in times)
    return (
        len(slowest) > 1
        and late >= _CORROBORATED * gain
        and all(_correlation(steps) > _ALIKE for steps in e.ranks)
    )


def _correlation(steps: Sequence[Step]) -> float:
    forward = [step.forward_ms for step in steps]
    backward = [step.backward_ms for step in steps]
    if min(_spread(forward), _spread(backward)) <= 0:
        return 0.0
    return statistics.correlation(forward, backward)


def _some(e: Evidence, by_rank: Sequence[float]) -> list[tuple[int, float]]:
    """The figures of the ranks with most, at most four."""
    order = sorted(range(len(by_rank)), key=lambda rank: -by_rank[rank])[:4]
    return [(e.numbers[rank], by_rank[rank]) for rank in sorted(order)]


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


def _spread(values: Sequence[float]) -> float:
    low, high = _quartiles(values)
    return high - low


def _size(shape: Sequence[int]) -> float:
    result = 1.0
    for size in shape:
        result *= size
    return result


def _words(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))
