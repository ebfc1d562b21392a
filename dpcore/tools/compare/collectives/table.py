"""The columns of nccl-tests, one line per contender."""

from __future__ import annotations

from collections.abc import Sequence

from dpcore.tools.compare.collectives.cells import TYPE, Cell
from dpcore.tools.compare.collectives.interleave import Measurement
from dpcore.tools.compare.collectives.summary import Figures, summarise

_COLUMNS = (
    ("size", 10, "B"),
    ("count", 10, "elements"),
    ("type", 6, ""),
    ("redop", 6, ""),
    ("contender", 14, ""),
    ("time", 11, "us"),
    ("min", 11, "us"),
    ("algbw", 8, "GB/s"),
    ("busbw", 8, "GB/s"),
    ("#wrong", 7, ""),
    ("x peer", 7, "best"),
    ("of bound", 8, ""),
)
STYLES = {"ours": "bold cyan", "peer": "", "bound": "dim"}


def heading(cell: Cell, rounds: int) -> list[str]:
    names = " ".join(name.rjust(width) for name, width, _ in _COLUMNS)
    units = " ".join((f"({unit})" if unit else "").rjust(width) for _, width, unit in _COLUMNS)
    title = f"# {cell.collective}, {cell.world} ranks, slowest rank, median of {rounds} rounds"
    return [title, names, units]


def lines(results: Sequence[Measurement]) -> list[tuple[str, str]]:
    """One line per contender with the style that a terminal gives it."""
    return [
        (_line(result, figures), STYLES[result.contender.role])
        for result, figures in zip(results, summarise(results), strict=True)
    ]


def _line(result: Measurement, figures: Figures | None) -> str:
    cell = result.cell
    fields = [str(cell.bytes), str(cell.elements), TYPE, cell.redop, result.contender.name]
    if figures is None:
        fields += ["n/a"]
    else:
        fields += [
            microseconds(figures.median_s),
            microseconds(figures.min_s),
            f"{figures.algbw:.3f}",
            f"{figures.busbw:.3f}",
            "-" if result.wrong is None else str(result.wrong),
            "-" if figures.peer_ratio is None else f"{figures.peer_ratio:.2f}",
            "-" if figures.bound_ratio is None else f"{figures.bound_ratio:.2f}",
        ]
    text = " ".join(
        field.rjust(width) for field, (_, width, _) in zip(fields, _COLUMNS, strict=False)
    )
    return text if figures is not None else f"{text}  {_short(result.missing)}"


def microseconds(seconds: float) -> str:
    value = seconds * 1e6
    return f"{value:.2f}" if value < 100 else f"{value:.1f}"


def _short(reason: str, width: int = 100) -> str:
    return reason if len(reason) <= width else reason[: width - 3] + "..."
