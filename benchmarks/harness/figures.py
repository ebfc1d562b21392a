"""Kept results, and how documents write sizes, times and where a figure is from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from dpcore.tools import records
from dpcore.tools.ratios import ends_of

RESULTS = Path(__file__).resolve().parents[1] / "results"


def time_text(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} µs" if seconds < 1e-4 else f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1e-2 else f"{seconds * 1e3:.1f} ms"


def load(name: str) -> list[dict[str, Any]]:
    return records.load(RESULTS / f"{name}.jsonl")


def ends(used: Iterable[dict[str, Any]]) -> str:
    """What is in brackets behind the medians of these records: "95%", or of which range."""
    rounds = (record["rounds_s"] for record in used)
    counts = [len(next(iter(r.values())) if isinstance(r, dict) else r) for r in rounds]
    return " or ".join(dict.fromkeys(map(ends_of, counts)))


def source(
    name: str,
    used: Iterable[dict[str, Any]],
    root: str = "",
    what: str = "Medians of one run",
    part: Callable[[dict[str, Any]], str] = lambda _: "",
) -> str:
    """The runs of the records that a table shows; where they are several, which `part` is of which.
    `root`: from the document to the root of the repository."""
    runs: dict[str, dict[str, None]] = {}
    for record in used:
        runs.setdefault(run_of(record), {})[part(record)] = None
    if len(runs) == 1:
        return f"{what} {next(iter(runs))}; {place_of(name, root)}"
    said = "; ".join(f"{', '.join(parts)} {run}".strip() for run, parts in runs.items())
    return f"{what.removesuffix(' of one run').rstrip(',')}: {said}; {place_of(name, root)}"


def run_of(record: dict[str, Any]) -> str:
    """On which machine, when, of which commit."""
    machine = record["machine"]
    changed = "+, with uncommitted changes" if "+" in record["commit"] else ""
    return (
        f"on {machine['cores']} cores of an {machine['cpu']}"
        f" ({record['date'][:10]}, commit {record['commit'][:10]}{changed})"
    )


def place_of(name: str, root: str) -> str:
    path = f"benchmarks/results/{name}.jsonl"
    return f"the records are in [`{path}`]({root}{path})."
