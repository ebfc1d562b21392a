"""The tables of docs/torch_distributed.md: torch's own strategies over dpcore and over Gloo."""

from __future__ import annotations

from typing import Any

from benchmarks.harness.figures import ends, source, time_text


def table_of_torch_parallel(records: list[dict[str, Any]]) -> str:
    """A table for each number of ranks."""
    worlds = sorted({record["world"] for record in records})
    of_each = [[r for r in records if r["world"] == world] for world in worlds]
    return "\n".join(map(_table_of_strategies, of_each))


def _table_of_strategies(records: list[dict[str, Any]]) -> str:
    """Steps over both backends and the ratio with its interval, a row a strategy of torch's."""
    lines = [f"| | dpcore | Gloo | ratio ({ends(records)}) |", "|---|---:|---:|---:|"]
    rows = {record["strategy"]: record for record in records}.values()  # the last of each
    for r in rows:
        row = f"| {r['strategy']} | {time_text(r['dpcore_s'])} |"
        if r["refused"]:
            lines.append(f"{row} refuses it | |")
            continue
        x = r["of_gloo"]
        ratio = f"{x['median']:.2f} ({x['low']:.2f} to {x['high']:.2f})"
        lines.append(f"{row} {time_text(r['gloo_s'])} | {ratio} |")
    what = f"Medians of a step of {records[-1]['world']} ranks, backends in turns,"
    lines += ["", source("torch_parallel", rows, "../", what, lambda r: str(r["strategy"]))]
    return "\n".join(lines) + "\n"
