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
    machine = first["machine"]
    commit = first["commit"][:10] + (
        "+, with uncommitted changes" if "+" in first["commit"] else ""
    )
    return (
        f"{what} on {machine['cores']} cores of an {machine['cpu']}"
        f" ({first['date'][:10]}, commit {commit});"
        f" the records are in [`benchmarks/results/{name}.jsonl`]"
        f"({root}benchmarks/results/{name}.jsonl)."
    )
