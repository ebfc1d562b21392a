"""Operations on the CPU: what Gloo and its like leave in a profile, and how much was exposed.

A collective leaves two spans. ``c10d::allreduce_`` is the call, on the thread that made it, and
ends when the operation is queued. ``gloo:all_reduce`` is the work, on one of Gloo's threads, and
ends when the result is there. Both are in order: the first call is the first to be worked on.

What a thread waits for is not in the file. But a thread that waits calls nothing, so a stretch of
its time in which it ran no operator of torch, and in which one of its collectives completed, was
spent on waiting, up to that moment. DDP waits for its buckets after the last gradient, so for these
only what comes later counts; and the wait ends when DDP begins to do something with the bucket.
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
# What DDP does first after it has waited for a bucket: it copies it back, or makes views of it.
_AFTER_WAIT = ("torch.distributed.ddp.reducer::copy_bucket_to_grad", "aten::as_strided")
# And what it does in between to learn which parameters no rank has used. Others do this as well.
_UNUSED = ("aten::select", "aten::item", "aten::copy_")
_MOST = 1 << 62  # elements of a tensor, whatever a file says
_AHEAD_NS = 300_000
_BETWEEN_NS = 10_000  # DDP takes from one view or copy to the next
_AWAKE_NS = 20_000_000  # longer after its last bucket no thread wakes up
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
    """A collective of a rank. ``begin_ns``: somebody works on it, or its kernel runs. ``backward``:
    the number of the backward that sent it as a bucket, else -1."""

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
    """In the order of their calls."""
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
    """The collective in dpcore's words.

    >>> [plain_name(name) for name in ("allreduce_", "_allgather_base_", "alltoall_base_", "send")]
    ['all_reduce', 'all_gather', 'all_to_all', 'send']
    """
    bare = re.sub(r"base|coalesced|_", "", name.lower())
    return _NAMES.get(bare, bare)


def bytes_of(args: Mapping[str, Any]) -> int:
    """The bytes of an operation's tensors, 0 where the file does not say: it does with
    ``profile(record_shapes=True)``, and of NCCL's kernels since torch 2.4.

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
    """Begin, end, and the operation that was waited for."""
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
    """After the last gradient DDP waits for one bucket after the other, and does next to nothing in
    between: the stretches before what it does with them. If it does nothing with them, it waits
    until the last is there. Their spans may end later than that: Gloo's thread closes them when it
    has a processor again, so what DDP has begun to use is complete."""
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
    """When a thread ran operators of torch: the outermost spans."""

    def __init__(self, profile: Profile, thread: int | str) -> None:
        self._spans: list[Span] = []
        for span in profile.spans:  # in order of their begins, outer ones first
            if span.thread != thread or span.category != "cpu_op":
                continue
            if not self._spans or span.begin_ns >= self._spans[-1].end_ns:
                self._spans.append(span)
        self._begins = [span.begin_ns for span in self._spans]

    def idle_around(self, moment: int) -> tuple[int, int]:
        """From when to when the thread was idle at a moment. Who waits may go on a little before
        the work's own span ends."""
        after = bisect.bisect_right(self._begins, moment)
        if after and moment - self._begins[after - 1] < _AHEAD_NS:
            after -= 1
        since = self._spans[after - 1].end_ns if after else moment
        return since, self._begins[after] if after < len(self._begins) else moment

    def idle_from(self, moment: int) -> Iterator[tuple[int, Span | None]]:
        """Since when the thread was idle, and what came next, over and over."""
        for at in range(bisect.bisect_left(self._begins, moment), len(self._spans)):
            yield moment, self._spans[at]
            moment = self._spans[at].end_ns
        yield moment, None


def _without_overlaps(
    found: Sequence[tuple[int, int, Operation]],
) -> list[tuple[int, int, Operation]]:
    """Several operations may end in one wait: it is for the one that was sent first, and from its
    end on for the next."""
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
