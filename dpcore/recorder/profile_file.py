"""Reads one rank's file of torch's profiler as time spans.

The format is Chrome's: complete events ("ph": "X") with times in microseconds. Since torch 2.4
they count from ``baseTimeNanoseconds``, before that from the Unix epoch. ``distributedInfo`` names
the rank if torch.distributed was initialised when the profiler stopped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from dpcore.base.checked_json import (
    ANY_WHOLE,
    PLAIN,
    TEXT,
    Fields,
    Kind,
    ListOf,
    number,
    or_null,
    whole,
)

UNKNOWN = -1
# Not needed here, and often most of a file: Python's functions, arrows between events.
_IGNORED = ("python_function", "Trace", "overhead", "cuda_driver", "privateuse1_driver")
_MARKS = ("schemaVersion", "deviceProperties", "record_shapes", "trace_id", "with_stack")
_MOST_NS = 1 << 61  # the year 2043 of Unix time: the sum of three fits 64 bits
_TIME = number(-_MOST_NS / 1000, _MOST_NS / 1000, "microseconds")
_NUMBER_OR_TEXT = Kind(
    "a whole number or a text", lambda x: ANY_WHOLE.fits(x) if type(x) is int else type(x) is str
)
_LIST = ListOf(whole())  # of one tensor, in a list of them
_SIZES = ListOf(Kind("a size, or a list of sizes", lambda x: whole().fits(x) or _LIST.fits(x)))
_SPAN = Fields(
    {"ts": _TIME},
    {
        "name": TEXT, "cat": PLAIN, "tid": _NUMBER_OR_TEXT, "dur": _TIME,
        "args": or_null(
            Fields(
                {},
                {"correlation": _NUMBER_OR_TEXT, "Collective name": PLAIN, "dtype": PLAIN,
                 "In msg nelems": whole(), "Input Dims": or_null(ListOf(_SIZES)),
                 "Input type": or_null(ListOf(PLAIN))},
            )
        ),
    },
)  # fmt: skip
_FILE = Fields(
    {},
    {
        "baseTimeNanoseconds": whole(0, _MOST_NS), "host_name": PLAIN,
        "distributedInfo": or_null(
            Fields({}, {"rank": whole(-1, 1 << 31), "world_size": whole(0, 1 << 31),
                        "backend": PLAIN})
        ),
    },
)  # fmt: skip


class Span(NamedTuple):
    """A span in nanoseconds of Unix time. ``thread`` is a thread of the process or, for work on
    a GPU, the stream."""

    name: str
    category: str
    thread: int | str
    begin_ns: int
    end_ns: int
    args: Mapping[str, Any]

    @property
    def is_on_host(self) -> bool:
        return self.category in ("user_annotation", "cpu_op")


@dataclass(frozen=True)
class Profile:
    """``rank`` is UNKNOWN if the file does not name it. ``spans`` are in order of time, with outer
    spans before the ones inside them."""

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
    entries = [entry for entry in content["traceEvents"][:1000] if isinstance(entry, dict)]
    return any(entry.get("cat") in ("cpu_op", "user_annotation", "kernel") for entry in entries)


def profile_of(content: Mapping[str, Any]) -> Profile:
    """Reads the spans from a file's JSON. Raises ``Wrong`` for an invalid file."""
    _FILE.check(content)
    info = content.get("distributedInfo") or {}
    base_ns = content.get("baseTimeNanoseconds", 0)
    spans = sorted(_spans(content["traceEvents"], base_ns), key=lambda s: (s.begin_ns, -s.end_ns))
    return Profile(
        rank=info.get("rank", UNKNOWN),
        world_size=info.get("world_size", 0),
        backend=str(info.get("backend", "")),
        host=str(content.get("host_name", "")),
        spans=spans,
    )


def _spans(entries: list[Any], base_ns: int) -> Iterator[Span]:
    for index, entry in enumerate(entries):
        is_span = isinstance(entry, dict) and entry.get("ph") == "X"
        if not is_span or entry.get("cat") in _IGNORED:
            continue
        _SPAN.check(entry, ("traceEvents", index))
        begin_ns = base_ns + round(entry["ts"] * 1000)
        category = str(entry.get("cat", "")).lower()  # "Kernel" in files of earlier versions
        end_ns = begin_ns + max(0, round(entry.get("dur", 0) * 1000))
        name, thread, args = entry.get("name", ""), entry.get("tid", 0), entry.get("args")
        yield Span(name, category, thread, begin_ns, end_ns, args or {})
