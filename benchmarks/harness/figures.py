"""Kept results, and how documents write sizes, times and where a figure is from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results"


def size_text(size: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


def time_text(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} µs" if seconds < 1e-4 else f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1e-2 else f"{seconds * 1e3:.1f} ms"


def load(name: str) -> list[dict[str, Any]]:
    text = (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def source(
    name: str, first: dict[str, Any], root: str = "", what: str = "Medians of one run"
) -> str:
    """`root`: from the document to the root of the repository."""
    return f"{what} {run_of(first)}; {place_of(name, root)}"


def source_of_columns(name: str, columns: dict[str, dict[str, Any]], root: str = "") -> str:
    """Where columns come from several runs: which from which. A record of each column."""
    runs: dict[str, list[str]] = {}
    for column, record in columns.items():
        runs.setdefault(run_of(record), []).append(column)
    said = "; ".join(f"{', '.join(names)} {run}" for run, names in runs.items())
    return f"Medians: {said}; {place_of(name, root)}"


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
