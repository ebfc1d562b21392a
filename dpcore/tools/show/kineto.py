"""A run as files of torch's profiler, for Holistic Trace Analysis and its like: one file per rank.

What a rank computed and sent becomes kernels: of forward, backward and other computing on stream 7,
of collectives on streams from 20 on, one for each lane of the timeline. Every kernel has its launch
on the host, with the same correlation number. Where the program waited for communication no kernel
computes, so that a tool that compares streams finds the overlap that the trace has.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpcore.base.files import write_whole
from dpcore.errors import Unsupported
from dpcore.recorder.file import Event
from dpcore.recorder.intervals import Intervals
from dpcore.tools.show.figures import communication_of, exposed_of, steps_of
from dpcore.tools.show.run import RankEvents, Run

_HOST_THREAD = 1
# Large, as a GPU's are: HTA gives the column the narrowest type that holds them, and then puts the
# numbers of rows into it.
_FIRST_CORRELATION = 1_000_000
_COMPUTE_STREAM, _FIRST_STREAM = 7, 20
_KERNELS = {
    "all_reduce": "AllReduce",
    "all_gather": "AllGather",
    "reduce_scatter": "ReduceScatter",
    "broadcast": "Broadcast",
    "reduce": "Reduce",
}
Piece = tuple[str, int, int]  # what was computed, begin, end


def export(run: Run, folder: Path) -> list[Path]:
    """Writes the files of all ranks into a folder, which is made, and says which they are."""
    if folder.exists() and not folder.is_dir():
        raise Unsupported(
            f"--export: {folder} is in the way; it would be a folder with a file per rank"
        )
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for rank in run.ranks:
        path = folder / f"rank{rank.rank}.pt.trace.json"
        # With json's default separators: HTA looks for the text '"rank": 0', with the space.
        write_whole(path, json.dumps(kineto_of(run, rank)))
        written.append(path)
    return written


def kineto_of(run: Run, rank: RankEvents) -> dict[str, Any]:
    """The content of a rank's file."""
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "dpcore"}],
        "distributedInfo": {
            "backend": "nccl",  # the only one whose communication those tools look for
            "rank": rank.rank,
            "world_size": run.world_size,
        },
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 0,
        "traceName": f"{run.name}, rank {rank.rank}, by dpcore show --export kineto",
        "traceEvents": list(_entries(run, rank)),
    }


def computed_pieces(rank: RankEvents) -> list[Piece]:
    """What was computed when: forward, backward and spans of the program's own without the time in
    which it waited; and "other" where something was on its way without being waited for."""
    exposed, sent = exposed_of(rank), communication_of(rank)
    outer = _outermost(rank.compute)
    moments = {t for event in outer for t in (event.begin_ns, event.end_ns)}
    for spans in (exposed, sent):
        moments |= {*spans.begins.tolist(), *spans.ends.tolist()}
    pieces: list[Piece] = []
    ordered = sorted(moments)
    is_exposed, is_sent = _covered(exposed, ordered), _covered(sent, ordered)
    at = 0
    for number, (begin, end) in enumerate(itertools.pairwise(ordered)):
        while at < len(outer) and outer[at].end_ns <= begin:
            at += 1
        is_computing = at < len(outer) and outer[at].begin_ns <= begin
        if is_exposed[number] or not (is_computing or is_sent[number]):
            continue
        name = outer[at].name if is_computing else "other"
        if pieces and pieces[-1][0] == name and pieces[-1][2] == begin:
            pieces[-1] = (name, pieces[-1][1], end)
        else:
            pieces.append((name, begin, end))
    return pieces


def _entries(run: Run, rank: RankEvents) -> Iterator[dict[str, Any]]:
    pid = 1000 + rank.rank
    named = {"name": f"rank {rank.rank}"}
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "ts": 0, "args": named}
    for number, (begin, end) in enumerate(steps_of(rank)):
        yield _span(f"ProfilerStep#{number}", "user_annotation", pid, _HOST_THREAD, begin, end, {})
    for event in rank.compute:
        if event.name == "forward":
            name, category = "DistributedDataParallel.forward", "user_annotation"
        elif event.name == "backward":
            name, category = "autograd::engine::evaluate_function: backward", "cpu_op"
        else:
            name, category = event.name, "user_annotation"
        yield _span(name, category, pid, _HOST_THREAD, event.begin_ns, event.end_ns, {})
    correlation = _FIRST_CORRELATION
    for name, begin, end in computed_pieces(rank):
        correlation += 1
        yield from _kernel(pid, name, _COMPUTE_STREAM, correlation, begin, end, {})
    for event, lane in zip(rank.operations, rank.operation_lanes, strict=True):
        correlation += 1
        name = f"ncclDevKernel_{_KERNELS.get(event.name, 'SendRecv')}"
        args = {
            "Collective name": event.name,
            "In msg nelems": event.bytes,
            "dtype": "Byte",
            "Group size": event.world or run.world_size,
        }
        stream = _FIRST_STREAM + lane
        yield from _kernel(pid, name, stream, correlation, event.begin_ns, event.end_ns, args)


def _kernel(
    pid: int, name: str, stream: int, correlation: int, begin: int, end: int, more: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    known = {"External id": correlation, "correlation": correlation}
    yield _span("cudaLaunchKernel", "cuda_runtime", pid, _HOST_THREAD, begin, begin, known)
    args = {**known, "device": 0, "context": 1, "stream": stream, **more}
    yield _span(name, "kernel", 0, stream, begin, end, args)


def _span(
    name: str, category: str, pid: int, tid: int, begin: int, end: int, args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid,
        "ts": begin / 1000, "dur": (end - begin) / 1000, "args": args,
    }  # fmt: skip


def _outermost(events: Sequence[Event]) -> list[Event]:
    result: list[Event] = []
    for event in sorted(events, key=lambda e: (e.begin_ns, -e.end_ns)):
        if not result or event.begin_ns >= result[-1].end_ns:
            result.append(event)
    return result


def _covered(spans: Intervals, moments: Sequence[int]) -> list[bool]:
    """Whether the spans cover the time that begins with each moment."""
    begins = np.asarray(moments, np.int64)
    covered: list[bool] = (spans.covered_until(begins + 1) > spans.covered_until(begins)).tolist()
    return covered
