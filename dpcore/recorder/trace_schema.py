"""The schema of a trace file: its fields and their kinds.

``recorder/file.py`` writes the file, ``tools/show/reading.py`` reads it. Fields that are not named
here are for other programs.
"""

from __future__ import annotations

from typing import Any

from dpcore.base.checked_json import (
    ANY_WHOLE,
    PLAIN,
    TEXT,
    TRUTH,
    Fields,
    Kind,
    ListOf,
    MapOf,
    number,
    or_null,
    whole,
)
from dpcore.recorder.profiled import facts_from

_MOST_US = (1 << 61) / 1000  # the year 2043 of Unix time: three of them fit 64 bits of nanoseconds
MICROSECONDS = number(0, _MOST_US, "microseconds, 0 or more")
_RANK = whole(0, (1 << 31) - 1)
_NO_RANK_OR_ONE = whole(-1, (1 << 31) - 1)
_MOVE = ListOf(whole(), 5)  # step, source, destination, chunk, 1 if it is added
_SCHEDULE = Fields(
    {"algorithm": TEXT, "collective": TEXT, "world": whole(1), "root": ANY_WHOLE,
     "chunks": whole(1), "ordered": TRUTH},
    {"moves": ListOf(_MOVE)},
)  # fmt: skip
_MODULE = Fields(
    {"gradients": ListOf(whole()), "begin": number(0, 1, "a share of forward, from 0 to 1")}
)
_LOCAL_UPDATES = Fields(
    {"sync_every": whole(1), "fragments": whole(1), "delay": whole(), "bits": whole(1)}
)
_BUCKET = Fields({"gradients": ListOf(whole()), "bytes": whole()}, {"dtype": TEXT})


def _numbers_agree(model: dict[str, Any]) -> str:
    """Checks the numbers of gradients, which are positions in the list of parameters."""
    count = len(model["parameters"])
    sizes = model.get("parameter_bytes")
    if sizes is not None and len(sizes) != count:
        return f"has {len(sizes)} parameter_bytes for {count} parameters"
    for parts, part in ((model["buckets"], "bucket"), (model.get("modules", []), "module")):
        last = max((n for each in parts for n in each["gradients"]), default=-1)
        if last >= count:
            return f"has a {part} with gradient {last}, of {count} parameters"
    return ""


_MODEL = Fields(
    {"parameters": ListOf(TEXT), "buckets": ListOf(_BUCKET)},
    {"number": whole(), "name": TEXT, "schedule": TEXT, "parameter_bytes": ListOf(whole()),
     "bucket_caps": ListOf(whole()), "modules": ListOf(_MODULE),
     "compiled": ListOf(TEXT), "local_updates": _LOCAL_UPDATES,
     "busy": number(0, 1, "a share of time, from 0 to 1"),
     "update_ms": number(0, _MOST_US * 1e-3, "milliseconds, 0 or more")},
    _numbers_agree,
)  # fmt: skip

EVENT = Fields(
    {"name": TEXT, "ts": MICROSECONDS, "pid": _RANK, "tid": ANY_WHOLE},
    {
        "dur": MICROSECONDS,
        "args": Fields(
            {},
            {"peer": _NO_RANK_OR_ONE, "thread": ANY_WHOLE, "operation": ANY_WHOLE,
             "number": whole(), "bytes": whole(), "path": TEXT, "schedule": TEXT,
             "root": _NO_RANK_OR_ONE, "world": _RANK, "model": whole()},
        ),
    },
)  # fmt: skip


def _is_profiled(value: Any) -> bool:
    try:
        facts_from(value)
    except (ValueError, TypeError, KeyError, OverflowError):
        return False
    return True


_PROFILED = Kind("what torch's profiler showed of a rank", _is_profiled)

TRACE = Fields(
    {
        "traceEvents": Kind("a list", lambda value: type(value) is list),
        "otherData": Fields(
            {},
            {"version": TEXT, "machine": MapOf(PLAIN), "transport": TEXT, "link": or_null(TEXT),
             "error": TEXT, "commit": TEXT, "dropped": MapOf(whole()),
             "paths": MapOf(MapOf(whole())), "schedules": MapOf(_SCHEDULE),
             "models": ListOf(_MODEL), "profiled": MapOf(_PROFILED)},
        ),
    },
    {"distributedInfo": Fields({}, {"world_size": whole(1, 1 << 20), "backend": TEXT})},
)  # fmt: skip
