"""The table of docs/simulator.md: each cell's prediction, made anew from its record."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from itertools import combinations
from typing import Any

from benchmarks.harness.figures import source
from benchmarks.harness.simulated_cells import ACROSS, ALL, OWN, TORCH, Cell, judged
from dpcore.tools.records import ROOT

CLEAR = 0.05  # schedules of a column that differ by more have an order


def table_of_simulated(records: list[dict[str, Any]]) -> str:
    """A row a column of cells: by how much predictions are off."""
    ways = (*ALL, TORCH)
    names = [_short(name) for name in ways]
    lines = [
        f"| place | ranks | model | computing | {' | '.join(names)} |",
        f"|---|---:|---|---:|{'---:|' * len(names)}",
    ]
    all_cells, pairs, wrong = [], 0, []
    for record in records:
        cells = {cell.contender: cell for cell in judged(record)}
        all_cells += cells.values()
        one = next(iter(cells.values()))
        row = [_error(cells[name]) if name in cells else "" for name in ways]
        lines.append(
            f"| {one.place} | {one.world} | {one.model} | {one.alone_ms:.0f} ms | "
            f"{' | '.join(row)} |"
        )
        asked, false = orders(list(cells.values()))
        pairs += asked
        wrong += false
    said = [said_of_errors(all_cells), said_of_kinds(all_cells), said_of_orders(pairs, wrong)]
    return "\n".join([*lines, "", *said, "", source("simulated", records, "../")]) + "\n"


def _short(name: str) -> str:
    return "own schedule" if name == OWN else name.removeprefix("dpcore ")


def _error(cell: Cell) -> str:
    return f"{cell.error:+.1%}" if cell.counts else f"({cell.error:+.1%})"


def said_of_errors(cells: Sequence[Cell]) -> str:
    counted = [abs(cell.error) for cell in cells if cell.counts]
    if not counted:
        return f"None of {len(cells)} cells counts."
    worst = max((cell for cell in cells if cell.counts), key=lambda cell: abs(cell.error))
    return (
        f"Of {len(cells)} cells {len(counted)} count. Their errors have a median of "
        f"{statistics.median(counted):.1%}; nine of ten are at most "
        f"{sorted(counted)[int(0.9 * (len(counted) - 1))]:.1%}. The worst is {worst.error:+.1%}: "
        f"{_short(worst.contender)}, {worst.model}, {worst.world} ranks, {worst.place}."
    )


def said_of_kinds(cells: Sequence[Cell]) -> str:
    """Between which shares nine of ten errors lie, of schedules of two kinds. Cells that do not
    count belong here if they are off by more than their run is."""
    known = [cell for cell in cells if cell.counts or cell.is_clearly_off]
    said = []
    for kind, is_across in (("within a step", False), ("across steps", True)):
        errors = sorted(c.error for c in known if (c.contender in ACROSS) is is_across)
        if errors:
            low, high = (errors[round(share * (len(errors) - 1))] for share in (0.05, 0.95))
            said.append(f"{low:+.1%} and {high:+.1%} {kind}")
    return (
        "With those in brackets that are off by more than three times what their halves differ by, "
        f"nine of ten lie between {', between '.join(said)}."
    )


def said_of_orders(pairs: int, wrong: Sequence[str]) -> str:
    said = f"Of {pairs} pairs of schedules in a column that differ by more than {CLEAR:.0%}, "
    if not wrong:
        return said + "the order is right in all."
    return said + f"the order is wrong in {len(wrong)}: {'; '.join(wrong)}."


def orders(cells: Sequence[Cell]) -> tuple[int, list[str]]:
    """How many pairs have an order, and in which the prediction has another one."""
    asked, wrong = 0, []
    for one, other in combinations([cell for cell in cells if cell.counts], 2):
        if abs(one.measured_ms / other.measured_ms - 1) <= CLEAR:
            continue
        asked += 1
        if (one.measured_ms < other.measured_ms) != (one.predicted_ms < other.predicted_ms):
            wrong.append(
                f"{_short(one.contender)} and {_short(other.contender)} ({one.model}, {one.place})"
            )
    return asked, wrong


def figures_of_residuals(records: list[dict[str, Any]]) -> str:
    """What ``dpcore/tools/simulate/residuals.py`` holds: of errors, what the page says."""
    page = (ROOT / "docs/simulator.md").read_text(encoding="utf-8")
    (said,) = re.findall(r"nine of ten lie between .*$", page, re.MULTILINE)
    shares = [f"{float(share) / 100:.3f}" for share in re.findall(r"[-+][0-9.]+(?=%)", said)]
    of_machines: dict[str, list[dict[str, float]]] = {}
    for record in records:
        of_machines.setdefault(record["machine"]["cpu"], []).append(record["processors"])
    most: dict[str, float] = {}
    for apart in map(_apart, of_machines.values()):
        most |= {name: max(share, most.get(name, 0.0)) for name, share in apart.items()}
    lines = [f"    {name!r}: {share:.2f}," for name, share in most.items()]
    text = (
        f"WITHIN = {shares[0]}, {shares[1]}\nACROSS = {shares[2]}, {shares[3]}\n"
        "CALIBRATIONS = {\n" + "\n".join(lines) + "\n}\n# "
    )
    return text.replace("'", '"')


def _apart(calibrations: Sequence[dict[str, float]]) -> dict[str, float]:
    """By constant that all of them have: half of the range, as a share of its middle."""
    names = [name for name in calibrations[0] if all(name in each for each in calibrations)]
    found = {name: [each[name] for each in calibrations] for name in names}
    return {
        name: (max(values) - min(values)) / (max(values) + min(values))
        for name, values in found.items()
        if name not in ("cores", "ranks")
    }
