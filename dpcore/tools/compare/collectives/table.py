"""The columns of nccl-tests, one line per contender."""

from __future__ import annotations

from collections.abc import Sequence

from dpcore.base.user_code import without_folders
from dpcore.tools.compare.collectives.cells import ROOT, Cell
from dpcore.tools.compare.collectives.loop import Measurement
from dpcore.tools.compare.collectives.summary import Figures, summarise

_WIDTHS_AND_UNITS = {
    "size": (11, "B"),
    "count": (10, "elements"),
    "type": (8, ""),
    "redop": (6, ""),
    "root": (5, ""),
    "algorithm": (18, ""),
    "contender": (14, ""),
    "time": (11, "us"),
    "min": (11, "us"),
    "algbw": (8, "GB/s"),
    "busbw": (8, "GB/s"),
    "#wrong": (7, ""),
    "x peer": (7, "best"),
    "of bound": (8, ""),
}
COMPARE = tuple(name for name in _WIDTHS_AND_UNITS if name not in ("root", "algorithm"))
BENCH = tuple(
    name for name in _WIDTHS_AND_UNITS if name not in ("contender", "min", "x peer", "of bound")
)
STYLES = {"ours": "bold cyan", "peer": "", "bound": "dim"}


def heading(cell: Cell, rounds: int, columns: Sequence[str] = COMPARE) -> list[str]:
    of = f"median of {rounds} rounds" if rounds > 1 else "one round"
    known = [(name, *_WIDTHS_AND_UNITS[name]) for name in columns]
    names = " ".join(name.rjust(width) for name, width, _ in known)
    units = " ".join((f"({unit})" if unit else "").rjust(width) for _, width, unit in known)
    title = f"# {cell.collective}, {cell.world} ranks, slowest rank, {of}"
    return [title, f"#{names[1:]}", f"#{units[1:]}"]


def lines(
    results: Sequence[Measurement], columns: Sequence[str] = COMPARE
) -> list[tuple[str, str]]:
    """One line per contender with the style that a terminal gives it."""
    return [
        (
            _line(result, figures, columns),
            "bold red" if result.wrong else STYLES[result.contender.role],
        )
        for result, figures in zip(results, summarise(results), strict=True)
    ]


def _line(result: Measurement, figures: Figures | None, columns: Sequence[str]) -> str:
    cell = result.cell
    fields = {
        "size": str(cell.bytes),
        "count": str(cell.elements),
        "type": cell.dtype,
        "redop": cell.redop,
        "root": str(ROOT if cell.kind.rooted else -1),
        "algorithm": without_folders(cell.algorithm),
        "contender": result.contender.name,
    }
    if figures is None:
        fields |= {"time": "n/a"}
    else:
        fields |= {
            "time": microseconds(figures.median_s),
            "min": microseconds(figures.min_s),
            "algbw": f"{figures.algbw:.3f}",
            "busbw": f"{figures.busbw:.3f}",
            "#wrong": "-" if result.wrong is None else str(result.wrong),
            "x peer": "-" if figures.peer_ratio is None else f"{figures.peer_ratio:.2f}",
            "of bound": "-" if figures.bound_ratio is None else f"{figures.bound_ratio:.2f}",
        }
    known = [name for name in columns if name in fields]
    text = " ".join(fields[name].rjust(_WIDTHS_AND_UNITS[name][0]) for name in known)
    return text if figures is not None else f"{text}  {_short(result.missing)}"


def microseconds(seconds: float) -> str:
    value = seconds * 1e6
    return f"{value:.2f}" if value < 100 else f"{value:.1f}"


def _short(reason: str, width: int = 100) -> str:
    return reason if len(reason) <= width else reason[: width - 3] + "..."
