"""Operations of ranks in the format of torch's flight recorder, for torch's own analyser.

    dpcore inspect --job --flight-recorder dump       of a job that runs or hangs
    dpcore show run.json --export flight-recorder     of a trace
    torchfrtrace dump

A file per rank, ``rank_0``, ``rank_1`` and so on, each a pickle of dictionaries, texts and numbers.
The analyser knows backends by their names, so operations are said to be Gloo's. Sends and receives
are left out: their numbers are their tags, and do not count them.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpcore.base.files import write_whole
from dpcore.errors import Unsupported

_VERSION = "2.10"  # of the format
NAMES = {
    "all_reduce": "all_reduce",
    "reduce_scatter": "_reduce_scatter_base",
    "all_gather": "_all_gather_base",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "all_to_all": "all_to_all_single",
    "barrier": "barrier",
}
_TYPES = {  # torch's names of ours, and bytes of each
    "float64": ("Double", 8), "float32": ("Float", 4), "float16": ("Half", 2),
    "bfloat16": ("BFloat16", 2), "int64": ("Long", 8), "int32": ("Int", 4), "int16": ("Short", 2),
    "int8": ("Char", 1), "uint8": ("Byte", 1), "bool": ("Bool", 1),
    "complex64": ("ComplexFloat", 8), "complex128": ("ComplexDouble", 16),
}  # fmt: skip
_PARTS = {"reduce_scatter": "output", "scatter": "output", "all_gather": "input", "gather": "input"}


@dataclass(frozen=True)
class Called:
    """One operation as a rank called it. ``nbytes``: of the whole buffer, where ranks have parts.
    ``end_ns``: None of one in flight."""

    group: int
    number: int
    collective: str
    dtype: str
    nbytes: int
    begin_ns: int
    end_ns: int | None

    @property
    def is_known(self) -> bool:
        """Whether the analyser knows such an operation."""
        return self.collective in NAMES


def write_dumps(
    folder: Path, by_rank: Mapping[int, Sequence[Called]], groups: Mapping[int, Sequence[int]]
) -> list[Path]:
    """``groups``: the ranks of each. A ring may have lost its oldest operations: those that some
    rank of a group no longer has are left out of all."""
    if folder.exists() and not folder.is_dir():
        raise Unsupported(f"{folder} is in the way; it would be a folder with a file per rank")
    folder.mkdir(parents=True, exist_ok=True)
    begins = {
        group: max(
            (
                min(called.number for called in calls if called.group == group)
                for calls in by_rank.values()
                if any(called.group == group for called in calls)
            ),
            default=0,
        )
        for group in groups
    }
    config = {
        str(group): {"name": str(group), "desc": _described(group), "ranks": str([*ranks])}
        for group, ranks in groups.items()
    }
    written = []
    for rank, calls in sorted(by_rank.items()):
        mine = {name: one for name, one in config.items() if rank in groups[int(name)]}
        shown = [one for one in calls if one.is_known and one.number >= begins[one.group]]
        entries = [
            _entry(number, called, len(groups[called.group]))
            for number, called in enumerate(_in_order(shown))
        ]
        dump = {"version": _VERSION, "pg_config": mine, "entries": entries}
        path = folder / f"rank_{rank}"
        write_whole(path, pickle.dumps(dump))
        written.append(path)
    return written


def _in_order(calls: Sequence[Called]) -> list[Called]:
    """By time, and those of a group by their numbers: times may be rounded."""
    latest: dict[int, int] = {}
    ordered = []
    for called in sorted(calls, key=lambda one: one.number):
        latest[called.group] = max(called.begin_ns, latest.get(called.group, 0))
        ordered.append((latest[called.group], called.group, called.number, called))
    return [called for *_, called in sorted(ordered, key=lambda one: one[:3])]


def _described(group: int) -> str:
    return "default_pg" if group == 0 else "split"


def _entry(record: int, called: Called, world: int) -> dict[str, Any]:
    kind, itemsize = _TYPES.get(called.dtype, ("Byte", 1))
    whole = called.nbytes // itemsize
    sizes = {"input": [[whole]], "output": [[whole]]}
    if part := _PARTS.get(called.collective):
        sizes[part] = [[whole // world]]
    return {
        "record_id": record,
        "pg_id": called.group,
        "process_group": (str(called.group), _described(called.group)),
        "collective_seq_id": called.number,
        "p2p_seq_id": 0,
        "op_id": called.number,
        "profiling_name": f"gloo:{NAMES[called.collective]}",
        "time_created_ns": called.begin_ns,
        "time_discovered_started_ns": called.begin_ns,
        "time_discovered_completed_ns": called.end_ns,
        "duration_ms": None if called.end_ns is None else (called.end_ns - called.begin_ns) * 1e-6,
        "input_sizes": sizes["input"],
        "output_sizes": sizes["output"],
        "input_dtypes": [kind],
        "output_dtypes": [kind],
        "state": "started" if called.end_ns is None else "completed",
        "retired": called.end_ns is not None,
        "timeout_ms": 0,
        "is_p2p": False,
        "frames": [],
    }
