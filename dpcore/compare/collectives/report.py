"""The result of a run: pictures, and sentences for a reader who has no time for tables."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from dpcore.commands.sizes import size_text
from dpcore.compare.collectives.interleave import Measurement
from dpcore.compare.collectives.session import Run
from dpcore.compare.collectives.summary import Figures, summarise
from dpcore.compare.collectives.table import microseconds
from dpcore.compare.records import machine


def draw_all(path: Path | None, runs: Sequence[Run]) -> list[Path]:
    """A picture per world and collective; the name says which where there are several."""
    if path is None:
        return []
    # matplotlib takes half a second to import: only who wants a picture pays.
    from dpcore.compare.collectives.plot import draw

    def kind(run: Run) -> tuple[int, str]:
        return run[0].cell.world, run[0].cell.collective

    kinds = [
        (key, list(group)) for key, group in itertools.groupby(runs, kind) if key[1] != "barrier"
    ]
    paths = []
    for (world, collective), of_kind in kinds:
        name = path if len(kinds) == 1 else path.with_stem(f"{path.stem}-{collective}-{world}")
        draw(name, plot_title(of_kind[0][0]), of_kind)
        paths.append(name)
    return paths


def plot_title(sample: Measurement) -> str:
    here = machine()
    cell = sample.cell
    return f"{cell.collective}, {cell.world} ranks, f32, {here['cores']} cores of {here['cpu']}"


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
