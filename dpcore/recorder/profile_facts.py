"""What a profile shows beside its events: why a step may take longer than it has to.

Batches that a loader makes while nothing else runs, a GPU that is idle since the host waited for
it, DDP's search for unused parameters and its copies out of the buckets, shapes of the batches, and
how quickly matrices are multiplied. ``dpcore advise`` makes findings of these.
"""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dpcore.recorder.intervals import Intervals, union_of_spans
from dpcore.recorder.profile_file import Profile, Span
from dpcore.recorder.profiled import Multiplied, ProfileFacts

_LOADS = "enumerate(DataLoader)#"
_SEARCH = "torch.distributed.ddp.reducer::search_unused_parameters"
_COPY = "torch.distributed.ddp.reducer::copy_bucket_to_grad"
_COMPILED = ("CompiledFunctionBackward", "Torch-Compiled Region")
_WAITS_FOR_GPU = (
    *("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy"),
    *("hipStreamSynchronize", "hipDeviceSynchronize", "hipMemcpy"),
)
_CALLERS = {
    "aten::item": ".item()", "aten::_local_scalar_dense": ".item()", "aten::nonzero": "nonzero()",
    "aten::is_nonzero": "a tensor as a condition", "aten::equal": "torch.equal()",
    "aten::_to_copy": ".cpu()", "aten::copy_": "a copy to the host",
}  # fmt: skip
_TOUCH_NS = 20_000  # an idle time of the GPU begins or ends this near to the wait of the host
_QUIET_NS = 1_000_000  # less is between any two operators
_LEAST_FLOPS = 1e6
_LOOKED_AT = 8  # operators of a forward: the first may only read weights


def facts_of(profile: Profile, forwards: Sequence[Span], kernels: Sequence[Span]) -> ProfileFacts:
    """``kernels``: all of the GPU's, or none."""
    busy = union_of_spans([k.begin_ns for k in kernels], [k.end_ns for k in kernels])
    loads = [s for s in profile.spans if s.name.startswith(_LOADS) and s.is_on_host]
    waits = [(s.begin_ns, s.end_ns) for s in loads]
    quiet = list(_quiet(profile, forwards))
    return ProfileFacts(
        loading=list(_without(waits, busy)) if kernels else waits,
        quiet=list(_without(quiet, busy)) if kernels else quiet,
        workers=any("MultiProcessing" in span.name for span in loads),
        idle=list(_idle(profile, busy)) if kernels else [],
        searches=_named(profile, _SEARCH),
        copies=_named(profile, _COPY),
        batches=list(_batches(profile, forwards)),
        compiled=any(span.name.startswith(_COMPILED) for span in profile.spans),
        products=[] if kernels else _products(profile),
    )


def _named(profile: Profile, name: str) -> list[tuple[int, int]]:
    return [(s.begin_ns, s.end_ns) for s in profile.spans if s.name == name]


def _quiet(profile: Profile, forwards: Sequence[Span]) -> Iterator[tuple[int, int]]:
    """Times in which the thread of the forwards runs nothing that the profiler knows."""
    threads = {span.thread for span in forwards}
    reached = 0
    for span in profile.spans:
        if span.thread in threads and span.category in ("cpu_op", "cuda_runtime"):
            if reached and span.begin_ns - reached > _QUIET_NS:
                yield reached, span.begin_ns
            reached = max(reached, span.end_ns)


def _without(spans: Sequence[tuple[int, int]], busy: Intervals) -> Iterator[tuple[int, int]]:
    """The end of each span, as long as the part of it that nothing covers."""
    for begin, end in spans:
        if (free := end - begin - busy.between(begin, end)) > 0:
            yield end - free, end


def _idle(profile: Profile, busy: Intervals) -> Iterator[tuple[int, int, str]]:
    """Times between two kernels in which the host came back from waiting for the first."""
    begins, ends = busy.begins.tolist(), busy.ends.tolist()
    operators = [s for s in profile.spans if s.category == "cpu_op"]
    starts = [s.begin_ns for s in operators]
    taken = set()
    for span in profile.spans:
        if span.category != "cuda_runtime" or not span.name.startswith(_WAITS_FOR_GPU):
            continue
        if span.name.startswith(("cudaMemcpyAsync", "hipMemcpyAsync")):
            continue
        at = bisect.bisect_right(begins, span.end_ns + _TOUCH_NS) - 1
        if at < 0 or at + 1 >= len(begins) or at in taken:
            continue
        since, until = ends[at], begins[at + 1]
        if not since - _TOUCH_NS <= span.end_ns <= until or until - since < _TOUCH_NS:
            continue
        taken.add(at)
        around = operators[max(0, bisect.bisect_right(starts, span.begin_ns) - 16) :]
        inside = [
            s for s in around[:16]
            if s.thread == span.thread and s.begin_ns <= span.begin_ns and span.end_ns <= s.end_ns
        ]  # fmt: skip
        told = next((_CALLERS[s.name] for s in inside if s.name in _CALLERS), "")
        yield since, until, told or span.name


def _batches(
    profile: Profile, forwards: Sequence[Span]
) -> Iterator[tuple[int, tuple[tuple[int, ...], ...]]]:
    begins = [span.begin_ns for span in profile.spans]
    for forward in forwards:
        found: list[tuple[int, ...]] = []
        operators = 0
        for span in profile.spans[bisect.bisect_left(begins, forward.begin_ns) :]:
            if span.begin_ns >= forward.end_ns or operators == _LOOKED_AT:
                break
            if span.thread != forward.thread or span.category != "cpu_op":
                continue
            if span.name.startswith("c10d::"):  # buffers of the model
                continue
            if shapes := _shapes(span.args):
                found += shapes
                operators += 1
        yield forward.begin_ns, tuple(found)


def _shapes(args: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    dims = args.get("Input Dims") or ()
    return tuple(tuple(one) for one in dims if one and all(type(size) is int for size in one))


def _products(profile: Profile) -> list[Multiplied]:
    """Products of matrices, whose work is known from their shapes."""
    found: dict[tuple[str, tuple[tuple[int, ...], ...]], list[float]] = {}
    for span in profile.spans:
        if span.category == "cpu_op" and span.name in ("aten::mm", "aten::addmm", "aten::bmm"):
            key = span.name, _shapes(span.args)[-2:]
            found.setdefault(key, []).append((span.end_ns - span.begin_ns) * 1e-6)
    products = []
    for (name, shapes), ms in found.items():
        if len(shapes) != 2 or len(shapes[0]) != len(shapes[1]) or len(shapes[0]) < 2:
            continue
        (*many, n, k), m = shapes[0], shapes[1][-1]
        flops = 2.0 * n * k * m * (many[0] if many else 1)
        if flops >= _LEAST_FLOPS:
            quick = sorted(ms)[len(ms) // 10]
            what = f"{name.removeprefix('aten::')} of {_words(shapes[0])} and {_words(shapes[1])}"
            products.append(Multiplied(what, flops, len(ms), quick, statistics.median(ms), sum(ms)))
    return sorted(products, key=lambda one: -one.total_ms)


def _words(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
