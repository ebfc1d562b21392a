"""Operations on the CPU: reads those of Gloo and alike from a profile, and their exposed time.

A collective leaves two spans. ``c10d::allreduce_`` is the call, on the calling thread, and ends
when the operation is queued. ``gloo:all_reduce`` is the work, on one of Gloo's threads, and ends
with the result. Both are in the same order: the first call is the first to run.

The file does not say what a thread waits for. But a waiting thread runs no operator of torch. So if
a thread ran none for a while, and one of its collectives completed in that time, it was waiting
until then. DDP waits for its buckets after the last gradient, so time before that does not count
for buckets, and the wait ends when DDP begins to use the bucket.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpcore.recorder.profile_file import Profile, Span
from dpcore.recorder.profile_passes import Backward

_CALL = re.compile(r"c10d::(\w+)")
_WORK = re.compile(r"(gloo|mpi|ucc|xccl|ccl|dpcore):(\w+)")
# DDP's first operators after the wait for a bucket: it copies the bucket back, or makes views.
_AFTER_WAIT = ("torch.distributed.ddp.reducer::copy_bucket_to_grad", "aten::as_strided")
# And those with which DDP, but also other code, learns which parameters no rank has used.
_UNUSED = ("aten::select", "aten::item", "aten::copy_")
_MOST = 1 << 62  # elements of a tensor; larger numbers in a file are cut to this
_AHEAD_NS = 300_000
_BETWEEN_NS = 10_000  # DDP's gap between one view or copy and the next
_AWAKE_NS = 20_000_000  # a waiting thread wakes up at most this long after the last bucket
_NAMES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "sendrecv": "send_recv",
}
_BYTES = {
    "byte": 1, "char": 1, "unsigned char": 1, "signed char": 1, "bool": 1, "half": 2, "bfloat16": 2,
    "c10::half": 2, "c10::bfloat16": 2, "short": 2, "int": 4, "float": 4, "long": 8, "long int": 8,
    "double": 8, "complexfloat": 8, "complexdouble": 16,
}  # fmt: skip


@dataclass
class Operation:
    """A collective of a rank. ``begin_ns``: when a thread starts on it, or its kernel.
    ``backward``: the number of the backward that sent it as a bucket, else -1."""

    name: str
    library: str
    thread: int | str
    bytes: int
    launch_ns: int
    launched_ns: int
    begin_ns: int
    end_ns: int
    backward: int = -1


def operations_on_cpu(profile: Profile) -> list[Operation]:
    """The operations in the order of their calls."""
    calls: dict[str, list[Span]] = {}
    found = []
    for span in profile.spans:
        if span.category == "cpu_op" and (call := _CALL.match(span.name)):
            calls.setdefault(plain_name(call[1]), []).append(span)
        elif span.category != "gpu_user_annotation" and (work := _WORK.match(span.name)):
            name = plain_name(work[2])
            waiting = calls.get(name, ())
            call_span = calls[name].pop(0) if waiting else span
            size = bytes_of(span.args) or bytes_of(call_span.args)
            launched = call_span.end_ns if waiting else span.begin_ns
            times = call_span.begin_ns, launched, span.begin_ns, span.end_ns
            found.append(Operation(name, work[1], call_span.thread, size, *times))
    return sorted(found, key=lambda operation: operation.launch_ns)


def plain_name(name: str) -> str:
    """dpcore's name of a collective.

    >>> [plain_name(name) for name in ("allreduce_", "_allgather_base_", "alltoall_base_", "send")]
    ['all_reduce', 'all_gather', 'all_to_all', 'send']
    """
    bare = re.sub(r"base|coalesced|_", "", name.lower())
    return _NAMES.get(bare, bare)


def bytes_of(args: Mapping[str, Any]) -> int:
    """The bytes of an operation's tensors, or 0 if the file lacks them. They are recorded with
    ``profile(record_shapes=True)``, and for NCCL's kernels since torch 2.4.

    >>> bytes_of({"Input Dims": [[10, 2], []], "Input type": ["float", "Scalar"]})
    80
    >>> bytes_of({"In msg nelems": 1000, "dtype": "BFloat16"})
    2000
    """
    if "In msg nelems" in args:
        count: int = args["In msg nelems"]
        return count * _BYTES.get(str(args.get("dtype", "")).lower(), 4)
    dims, types = args.get("Input Dims") or (), args.get("Input type") or ()
    total = 0
    for shape, kind in zip(dims, types, strict=False):
        each = _BYTES.get(str(kind).lower(), 4 if kind == "TensorList" else 0)
        shapes = shape if shape and isinstance(shape[0], list) else [shape]
        for one in shapes:
            total += _product(one) * each if one else 0
    return total


def exposed_on_cpu(
    profile: Profile, operations: Sequence[Operation], backwards: Sequence[Backward]
) -> list[tuple[int, int, Operation]]:
    """Exposed spans: begin, end, and the operation that was waited for."""
    activities = {thread: _Activity(profile, thread) for thread in {op.thread for op in operations}}
    found = []
    buckets: dict[int, list[Operation]] = {}
    for operation in operations:
        if operation.backward >= 0:
            buckets.setdefault(operation.backward, []).append(operation)
            continue
        begin, end = activities[operation.thread].idle_around(operation.end_ns)
        begin, end = max(begin, operation.launched_ns), min(end, operation.end_ns)
        if begin < end:
            found.append((begin, end, operation))
    for index, sent in buckets.items():
        found += _waits_for_buckets(activities[sent[0].thread], backwards[index].end_ns, sent)
    return _without_overlaps(found)


def _waits_for_buckets(
    activity: _Activity, since: int, sent: Sequence[Operation]
) -> list[tuple[int, int, Operation]]:
    """The waits for the buckets of one backward. After the last gradient DDP waits for one bucket
    after the other, and each wait ends with its first use of that bucket. If it uses none, it
    waits until the last is complete. Gloo's thread may close an operation's span late, so an
    operation is taken to end at the latest where DDP begins to use its bucket."""
    last = max(operation.end_ns for operation in sent)
    found: list[tuple[int, int, Operation]] = []
    used = since
    for begin, following in activity.idle_from(since):
        next_to = following.name if following is not None else ""
        is_of_ddp = next_to in _AFTER_WAIT or (next_to in _UNUSED and begin < last)
        if begin >= last + (_AWAKE_NS if is_of_ddp else 0) or (used > since and not is_of_ddp):
            break
        end = following.begin_ns if following is not None and is_of_ddp else last
        if end - begin > _BETWEEN_NS:
            waited_for = next((op for op in sent if op.end_ns > begin), sent[-1])
            found.append((begin, end, waited_for))
        if not is_of_ddp:
            break
        used = end
    if used > since:
        for operation in sent:
            operation.end_ns = max(operation.begin_ns, min(operation.end_ns, used))
    return found


class _Activity:
    """The outermost spans in which a thread ran operators of torch."""

    def __init__(self, profile: Profile, thread: int | str) -> None:
        self._spans: list[Span] = []
        for span in profile.spans:  # in order of their begins, outer ones first
            if span.thread != thread or span.category != "cpu_op":
                continue
            if not self._spans or span.begin_ns >= self._spans[-1].end_ns:
                self._spans.append(span)
        self._begins = [span.begin_ns for span in self._spans]

    def idle_around(self, moment: int) -> tuple[int, int]:
        """Begin and end of the idle time around a moment. A waiting thread may continue shortly
        before the span of the work ends."""
        after = bisect.bisect_right(self._begins, moment)
        if after and moment - self._begins[after - 1] < _AHEAD_NS:
            after -= 1
        since = self._spans[after - 1].end_ns if after else moment
        return since, self._begins[after] if after < len(self._begins) else moment

    def idle_from(self, moment: int) -> Iterator[tuple[int, Span | None]]:
        """Each idle time after a moment: its begin, and the span that followed it."""
        for at in range(bisect.bisect_left(self._begins, moment), len(self._spans)):
            yield moment, self._spans[at]
            moment = self._spans[at].end_ns
        yield moment, None


def _without_overlaps(
    found: Sequence[tuple[int, int, Operation]],
) -> list[tuple[int, int, Operation]]:
    """Splits waits in which several operations end: the time up to the end of the operation that
    was sent first belongs to it, the time after that to the next."""
    result = []
    reached = 0
    for begin, end, operation in sorted(found, key=lambda entry: (entry[0], entry[2].launch_ns)):
        if end > max(begin, reached):
            result.append((max(begin, reached), end, operation))
            reached = end
    return result


def _product(shape: Sequence[Any]) -> int:
    result = 1
    for size in shape:
        result = min(result * size, _MOST) if isinstance(size, int) else result
    return result
