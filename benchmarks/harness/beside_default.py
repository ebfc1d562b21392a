"""Contenders beside the default in `benchmarks.defaults`, where it misses a target, and the tables.

A record of the default has the time of its step, a record of another contender also the ratio
default / contender with its interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.harness.figures import ends
from dpcore.tools.compare.training.ranks import DEFAULT, TORCH

OURS = (
    "dpcore sequential", "dpcore bucketed 0.5", "dpcore bucketed 1", "dpcore bucketed 4",
    "dpcore bucketed 25", "dpcore bucketed auto", "dpcore per_parameter",
)  # fmt: skip
OF_TORCH = (TORCH, "torch 0.5", "torch 1", "torch 4", "torch 25")
OF_OURS_AT_MOST = 1.03  # the upper end of the interval of the ratio
OF_TORCH_BELOW = 1.0  # of torch's default


def missed(line: dict[str, Any]) -> bool:
    """Whether a target is: there is none for other sizes of torch's buckets."""
    if "ratio" not in line or line["contender"] in OF_TORCH[1:]:
        return False
    high = float(line["ratio"]["high"])
    return high >= OF_TORCH_BELOW if line["contender"] == TORCH else high > OF_OURS_AT_MOST


def details(cell: str, lines: Sequence[dict[str, Any]]) -> str:
    text = [f"{cell:30}{'step ms':>10}{'default / it':>14}{ends(lines):>19}"]
    for line in lines:
        row = f"  {line['contender']:28}{line['step_s'] * 1e3:>10.2f}"
        if ratio := line.get("ratio"):
            interval = f"{ratio['low']:.3f} - {ratio['high']:.3f}"
            row += f"{ratio['median']:>14.3f}{interval:>19}{' missed' if missed(line) else ''}"
        elif not line["settled"]:
            row += "  not settled: its layout changed after the warm-up"
        text.append(row)
    return "\n".join(text)


def newest(lines: Sequence[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """By cell and contender the last record: a cell that is measured again replaces the old one."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for line in lines:
        found.setdefault(line["cell"], {})[line["contender"]] = line
    return found


def used_in(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for cell in newest(lines).values() for line in cell.values()]


def best_of_torch(cell: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """The one that comes nearest to the default, or is furthest ahead of it."""
    known = [line for name, line in cell.items() if name.split()[0] == TORCH]
    return max(known, key=lambda line: line["ratio"]["median"], default=None)


def summary(lines: Sequence[dict[str, Any]]) -> str:
    """A row a cell: upper ends of intervals, so that nothing above the targets is good."""
    names = [name.removeprefix("dpcore ").replace("bucketed ", "") for name in OURS]
    heads = [name.replace("sequential", "seq").replace("per_parameter", "per p") for name in names]
    text = [
        f"upper end ({ends(used_in(lines))}) of default / contender; * misses the target: at most "
        f"{OF_OURS_AT_MOST} of ours, below {OF_TORCH_BELOW:g} of torch",
        f"{'cell':24}{'ms':>9}" + "".join(f"{head:>7}" for head in heads)
        + f"{'torch':>8}{'best of torch':>15}",
    ]  # fmt: skip
    misses = 0
    for cell, of_cell in newest(lines).items():
        row = f"{cell:24}{of_cell[DEFAULT]['step_s'] * 1e3:>9.1f}"
        for name in (*OURS, TORCH):
            line = of_cell.get(name)
            misses += bool(line and missed(line))
            mark = "*" if line and missed(line) else " "
            row += f"{line['ratio']['high']:>6.2f}{mark}" if line else f"{'-':>6} "
        if best := best_of_torch(of_cell):
            row += f"{best['ratio']['high']:>9.2f} {best['contender']}"
        text.append(row)
    return "\n".join([*text, f"{misses} of the targets missed"])
