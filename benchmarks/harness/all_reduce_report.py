"""A run of all-reduces for a reader who has no time: a row per size, and two sentences."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

from dpcore.tools.compare.collectives.cells import Cell
from dpcore.tools.compare.collectives.loop import Measurement
from dpcore.tools.compare.collectives.session import Run
from dpcore.tools.compare.collectives.summary import Figures, summarise
from dpcore.tools.compare.collectives.table import STYLES, microseconds
from dpcore.tools.sizes import size_text


def compact(runs: Sequence[Sequence[Measurement]]) -> Table:
    """A row per size, a column per contender: size over time, and the time below 64 KiB."""
    table = Table(box=SIMPLE, pad_edge=False)
    table.add_column("size", justify="right", no_wrap=True)
    shown = [r.contender for r in runs[0] if any(_of(run, r.contender.name).rounds for run in runs)]
    for contender in shown:
        table.add_column(
            contender.name, justify="right", no_wrap=True, style=STYLES[contender.role]
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


def _time_and_rate(figures: Figures, cell: Cell) -> str:
    if cell.bytes < 1 << 16:
        return f"{microseconds(figures.median_s)} us"
    return f"{figures.algbw:.2f} GB/s"


def _of(run: Sequence[Measurement], name: str) -> Measurement:
    return next(result for result in run if result.contender.name == name)


def sentences(runs: Sequence[Run], small: int, large: int) -> list[str]:
    """What was seen at a small and at a large size, in plain words with the numbers."""
    said = []
    for size, rate in ((small, False), (large, True)):
        run = next((run for run in runs if run[0].cell.bytes == size), None)
        if run is not None:
            said.append(_comparison(run, rate))
    return said


def _comparison(run: Run, rate: bool) -> str:
    known = {
        r.contender.name: (r, f) for r, f in zip(run, summarise(run), strict=True) if f is not None
    }
    size = size_text(run[0].cell.bytes)
    peers = sorted(
        (f.median_s, name) for name, (r, f) in known.items() if r.contender.role == "peer"
    )
    others = ", ".join(f"{name} {_value(known[name][1], rate)}" for _, name in peers)
    arena = known.get("dpcore arena", (None, None))[1]
    plain = known.get("dpcore plain", (None, None))[1]
    if arena is None or plain is None:
        return f"At {size} dpcore did not run; the others: {others or 'none ran'}."
    text = (
        f"At {size} dpcore reduces {_value(arena, rate)} in its arena and "
        f"{_value(plain, rate)} from ordinary tensors; {others or 'no other library ran'}"
    )
    if arena.peer_ratio is not None:
        text += f": in the arena {_times(arena.peer_ratio)} the best of them"
    if rate and arena.bound_ratio is not None:
        text += f", and {arena.bound_ratio:.0%} of the speed of `x *= 0.5` over the same bytes"
    return text + "."


def _times(ratio: float) -> str:
    return f"{ratio:.1f} times as fast as" if ratio >= 1 else f"{1 / ratio:.1f} times slower than"


def _value(figures: Figures, rate: bool) -> str:
    return f"at {figures.algbw:.1f} GB/s" if rate else f"in {microseconds(figures.median_s)} us"
