"""Operations on GPUs: kernels of NCCL and RCCL, and the time in which they run alone.

A kernel and its launch on the host have the same correlation number. The launch lies inside the
call of torch.distributed, or the forward or backward, to which it belongs. As in Holistic Trace
Analysis, time is exposed if a kernel communicates and none computes; copies and fills of memory do
not count as computation.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Sequence

from dpcore.recorder.intervals import Intervals, union_of_spans
from dpcore.recorder.profile_cpu import Operation, bytes_of, plain_name
from dpcore.recorder.profile_file import Profile, Span

_COMMUNICATES = re.compile(r"(?:void )?(nccl|rccl|msccl|oneccl|hccl)|.*ncclKernel|.*ncclDevKernel")
_COLLECTIVE = re.compile(
    r"(AllReduce|AllGather|ReduceScatter|AllToAll|Broadcast|SendRecv|Reduce)", re.IGNORECASE
)
_CALL = re.compile(r"c10d::(\w+)")


def kernels_of(profile: Profile) -> tuple[list[Span], list[Span]]:
    """The kernels that communicate, and those that compute."""
    kernels = [span for span in profile.spans if span.category == "kernel"]
    communicate = [span for span in kernels if _COMMUNICATES.match(span.name)]
    return communicate, [span for span in kernels if not _COMMUNICATES.match(span.name)]


class Launches:
    """Where on the host each kernel was launched."""

    def __init__(self, profile: Profile) -> None:
        self._launch = {
            span.args["correlation"]: span
            for span in profile.spans
            if span.category in ("cuda_runtime", "cuda_driver") and "correlation" in span.args
        }
        self._calls = [s for s in profile.spans if s.category == "cpu_op" and _CALL.match(s.name)]
        self._begins = [span.begin_ns for span in self._calls]

    def of(self, kernel: Span) -> Span | None:
        return self._launch.get(kernel.args.get("correlation"))

    def call_of(self, kernel: Span) -> Span | None:
        """The call of torch.distributed around a kernel's launch."""
        launch = self.of(kernel)
        if launch is None:
            return None
        at = bisect.bisect_right(self._begins, launch.begin_ns)
        near = reversed(self._calls[max(0, at - 8) : at])
        return next(
            (s for s in near if s.thread == launch.thread and s.end_ns >= launch.end_ns), None
        )

    def extents(
        self, kernels: Sequence[Span], spans: Sequence[tuple[int, int]]
    ) -> list[tuple[int, int] | None]:
        """For each span on the host: the begin of the first and the end of the last kernel that
        was launched in it."""
        launched = [(launch.begin_ns, k) for k in kernels if (launch := self.of(k)) is not None]
        launched.sort(key=lambda pair: pair[0])
        begins = [begin for begin, _ in launched]
        found: list[tuple[int, int] | None] = []
        for begin, end in spans:
            inside = slice(bisect.bisect_left(begins, begin), bisect.bisect_left(begins, end))
            mine = [kernel for _, kernel in launched[inside]]
            last = max((kernel.end_ns for kernel in mine), default=0)
            found.append((min(k.begin_ns for k in mine), last) if mine else None)
        return found


def operations_on_gpu(communicate: Sequence[Span], launches: Launches) -> list[Operation]:
    """The operations in the order in which they ran. Each counts as sent when its kernel began:
    until then the stream was busy with earlier work."""
    found = []
    for kernel in communicate:
        call = launches.call_of(kernel)
        launch = launches.of(kernel)
        named = _COLLECTIVE.search(str(kernel.args.get("Collective name", "")) or kernel.name)
        named = named or _COLLECTIVE.search(kernel.name)
        name = plain_name(named[1] if named else "communication")
        if call is not None and (called := _CALL.match(call.name)) is not None:
            name = plain_name(called[1])
        size = bytes_of(kernel.args) or (bytes_of(call.args) if call is not None else 0)
        host_ns = launch.begin_ns if launch is not None else kernel.begin_ns
        thread = launch.thread if launch is not None else 0
        times = host_ns, host_ns, kernel.begin_ns, kernel.end_ns
        found.append(Operation(name, "nccl", thread, size, *times))
    return found


def exposed_on_gpu(
    operations: Sequence[Operation], compute: Sequence[Span]
) -> list[tuple[int, int, Operation]]:
    """Exposed spans: begin, end and operation."""
    computing = union_of_spans([k.begin_ns for k in compute], [k.end_ns for k in compute])
    found = []
    reached = 0
    for operation in sorted(operations, key=lambda op: op.begin_ns):
        begin = max(operation.begin_ns, reached)
        reached = max(reached, operation.end_ns)
        found += [(a, b, operation) for a, b in _gaps(computing, begin, operation.end_ns)]
    return found


def _gaps(covered: Intervals, begin: int, end: int) -> list[tuple[int, int]]:
    """The parts of a span that nothing covers."""
    gaps = []
    at = bisect.bisect_right(covered.ends, begin)
    while begin < end:
        is_last = at >= len(covered.begins) or covered.begins[at] >= end
        until = end if is_last else int(covered.begins[at])
        if until > begin:
            gaps.append((begin, until))
        if is_last:
            break
        begin = int(covered.ends[at])
        at += 1
    return gaps
