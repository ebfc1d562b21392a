"""The pictures of a run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from dpcore.tools.compare.collectives.loop import Measurement
from dpcore.tools.compare.collectives.session import Run
from dpcore.tools.records import machine


def draw_all(path: Path | None, runs: Sequence[Run]) -> list[Path]:
    """A picture per world and collective; the name says which where there are several."""
    if path is None:
        return []
    # matplotlib takes half a second to import: only a caller that wants a picture pays.
    from dpcore.tools.compare.collectives.plot import draw

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
    what = f"{cell.collective}, {cell.world} ranks, {cell.dtype}"
    return f"{what}, {here['cores']} cores of {here['cpu']}"
