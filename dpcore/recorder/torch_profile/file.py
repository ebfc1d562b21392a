"""One file of torch's profiler, of one rank, as spans of time.

The format is Chrome's: complete events ("ph": "X") with microseconds. Since torch 2.4 they count
from ``baseTimeNanoseconds``, before that from the beginning of Unix time. ``distributedInfo`` names
the rank where torch.distributed was initialised when the profiler stopped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

UNKNOWN = -1
# What is of no use here, and may be most of a file: Python's functions, arrows between events.
_IGNORED = {"python_function", "Trace", "overhead", "cuda_driver", "privateuse1_driver"}
_MARKS = ("schemaVersion", "deviceProperties", "record_shapes", "trace_id", "with_stack")


class Span(NamedTuple):
    """Something that took time, in nanoseconds of Unix time. ``thread``: of the process, or, of
    what a GPU did, its stream."""

    name: str
    category: str
    thread: int | str
    begin_ns: int
    end_ns: int
    args: Mapping[str, Any]


@dataclass(frozen=True)
class Profile:
    """``rank``: UNKNOWN where the file does not say. ``spans`` are in order of time, outer ones
    before those inside of them."""

    rank: int
    world_size: int
    backend: str
    host: str
    spans: list[Span]


def is_profile(content: Any) -> bool:
    """Whether this JSON was written by torch's profiler."""
    if not isinstance(content, dict) or not isinstance(content.get("traceEvents"), list):
        return False
    if any(mark in content for mark in _MARKS):
        return True
    categories = {e.get("cat") for e in content["traceEvents"][:1000] if isinstance(e, dict)}
    return bool(categories & {"cpu_op", "user_annotation", "kernel"})


def profile_of(content: Mapping[str, Any]) -> Profile:
    """The spans of a file, whose JSON this is."""
    info = content.get("distributedInfo") or {}
    base_ns = int(content.get("baseTimeNanoseconds", 0))
    spans = sorted(_spans(content["traceEvents"], base_ns), key=lambda s: (s.begin_ns, -s.end_ns))
    return Profile(
        rank=int(info.get("rank", UNKNOWN)),
        world_size=int(info.get("world_size", 0)),
        backend=str(info.get("backend", "")),
        host=str(content.get("host_name", "")),
        spans=spans,
    )


def _spans(entries: list[Any], base_ns: int) -> Iterator[Span]:
    for entry in entries:
        if not isinstance(entry, dict) or entry.get("ph") != "X" or entry.get("cat") in _IGNORED:
            continue
        begin, took = entry.get("ts"), entry.get("dur", 0)
        if not isinstance(begin, int | float) or not isinstance(took, int | float):
            continue
        begin_ns = base_ns + round(begin * 1000)
        args = entry.get("args") or {}
        category = str(entry.get("cat", "")).lower()  # "Kernel" in files of earlier versions
        end_ns = begin_ns + max(0, round(took * 1000))
        yield Span(
            str(entry.get("name", "")), category, entry.get("tid", 0), begin_ns, end_ns, args
        )
