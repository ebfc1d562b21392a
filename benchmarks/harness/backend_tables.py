"""The tables of docs/backends.md, from the records of ``python -m benchmarks.backends``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from benchmarks.harness.figures import source, time_text
from dpcore.tools.ratios import Estimate, estimate
from dpcore.tools.sizes import size_text

NAMES = {  # contenders, and how the heads of columns write them
    "dpcore plain": "dpcore",
    "dpcore arena": "dpcore, in its arena",
    "Gloo": "Gloo",
    "Open MPI": "Open MPI",
    "MPICH": "MPICH",
}
OURS = "dpcore plain"


def tables(records: list[dict[str, Any]]) -> str:
    """One per collective and number of ranks; a row a size, a column a backend."""
    collectives = list(dict.fromkeys(r["collective"] for r in records))
    worlds = sorted({r["world"] for r in records})
    parts = [source("backends", records, "../"), "", _where_behind(records), ""]
    for collective, world in itertools.product(collectives, worlds):
        chosen = [r for r in records if (r["collective"], r["world"]) == (collective, world)]
        parts += [f"## {collective}, {world} ranks", "", *_table(chosen), ""]
    return "\n".join(parts)


def _where_behind(records: list[dict[str, Any]]) -> str:
    """The cells in which another backend is faster than dpcore with ordinary tensors."""
    cells: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for record in records:
        cell = record["collective"], record["world"], record["bytes"]
        if "median_s" in record:  # there is none of a contender that failed
            cells.setdefault(cell, {})[record["contender"]] = record
    lower, apart = [], []
    cells = {cell: by_name for cell, by_name in cells.items() if OURS in by_name}
    for cell, by_name in cells.items():
        ours = by_name[OURS]
        faster = [r for r in by_name.values() if _is_peer(r) and r["median_s"] < ours["median_s"]]
        if any(_is_apart(_estimate(r), _estimate(ours)) for r in faster):
            apart.append(cell)
        elif faster:
            lower.append(cell)
    where = ", ".join(dict.fromkeys(collective for collective, _, _ in apart))
    return (
        f"With ordinary tensors dpcore is slower than another backend in {len(apart)} of "
        f"{len(cells)} cells ({where or 'none'}), and in {len(lower)} more another one has a lower "
        "median, but the intervals overlap."
    )


def _is_peer(record: dict[str, Any]) -> bool:
    return not record["contender"].startswith("dpcore")


def _estimate(record: dict[str, Any]) -> Estimate:
    return estimate(record["rounds_s"])


def _is_apart(lower: Estimate, higher: Estimate) -> bool:
    """Ranges of few rounds tell nothing apart."""
    return None not in (lower.confidence, higher.confidence) and lower.high < higher.low


def _table(records: list[dict[str, Any]]) -> Iterator[str]:
    names = [name for name in NAMES if any(r["contender"] == name for r in records)]
    yield "| size | " + " | ".join(NAMES[name] for name in names) + " |"
    yield "|---:|" + "---:|" * len(names)
    for size in sorted({r["bytes"] for r in records}):
        known = (r for r in records if r["bytes"] == size and "median_s" in r)
        of_size = {r["contender"]: r for r in known}
        best = min((r["median_s"] for r in of_size.values()), default=0.0)
        cells = [_cell(of_size[name], best) if name in of_size else "–" for name in names]
        yield f"| {size_text(size)} | " + " | ".join(cells) + " |"


def _cell(record: dict[str, Any], best: float) -> str:
    of = _estimate(record)
    median = time_text(record["median_s"])
    median = f"**{median}**" if record["median_s"] == best else median
    return f"{median} ({time_text(of.low)} to {time_text(of.high)})"
