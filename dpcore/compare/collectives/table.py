"""The columns of nccl-tests, one line per contender, and a compact view of a whole run."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

from dpcore.commands.sizes import size_text
from dpcore.compare.collectives.cells import TYPE, Cell
from dpcore.compare.collectives.interleave import Measurement
from dpcore.compare.collectives.summary import Figures, summarise

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
_STYLES = {"ours": "bold cyan", "peer": "", "bound": "dim"}


def heading(cell: Cell, rounds: int) -> list[str]:
    names = " ".join(name.rjust(width) for name, width, _ in _COLUMNS)
    units = " ".join((f"({unit})" if unit else "").rjust(width) for _, width, unit in _COLUMNS)
    title = f"# {cell.collective}, {cell.world} ranks, slowest rank, median of {rounds} rounds"
    return [title, names, units]


def lines(results: Sequence[Measurement]) -> list[tuple[str, str]]:
    """One line per contender with the style that a terminal gives it."""
    return [
        (_line(result, figures), _STYLES[result.contender.role])
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


def compact(runs: Sequence[Sequence[Measurement]]) -> Table:
    """A row per size, a column per contender: size over time, and the time below 64 KiB."""
    table = Table(box=SIMPLE, pad_edge=False)
    table.add_column("size", justify="right", no_wrap=True)
    shown = [r.contender for r in runs[0] if any(_of(run, r.contender.name).rounds for run in runs)]
    for contender in shown:
        table.add_column(
            contender.name, justify="right", no_wrap=True, style=_STYLES[contender.role]
        )
    for run in runs:
        figures = {
            r.contender.name: f for r, f in zip(run, summarise(run), strict=True) if f is not None
        }
        row = [size_text(run[0].cell.bytes)]
        for contender in shown:
            known = figures.get(contender.name)
            row.append("n/a" if known is None else _time_and_rate(known, run[0].cell))
        table.add_row(*(escape(text) for text in row))
    return table


def microseconds(seconds: float) -> str:
    value = seconds * 1e6
    return f"{value:.2f}" if value < 100 else f"{value:.1f}"


def _time_and_rate(figures: Figures, cell: Cell) -> str:
    if cell.bytes < 1 << 16:
        return f"{microseconds(figures.median_s)} us"
    return f"{figures.algbw:.2f} GB/s"


def _of(run: Sequence[Measurement], name: str) -> Measurement:
    return next(result for result in run if result.contender.name == name)


def _short(reason: str, width: int = 100) -> str:
    return reason if len(reason) <= width else reason[: width - 3] + "..."
