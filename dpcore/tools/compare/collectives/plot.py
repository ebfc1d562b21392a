"""Bandwidth over all sizes, latency of the small ones: one picture that reads on a light page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from dpcore.tools.compare.collectives.loop import Measurement
from dpcore.tools.compare.collectives.summary import Figures, summarise
from dpcore.tools.sizes import size_text

SMALL_BYTES = 64 << 10  # up to here the time matters ...
WIDE_BYTES = 4 << 10  # ... and from here on the bandwidth
BOUND_BYTES = 256 << 10  # below, a bound is the cost of its own call from Python
# Told apart also by people who do not see red and green as different.
_LINES: dict[str, dict[str, Any]] = {
    "dpcore arena": {"color": "#0b5fff", "linewidth": 2.6, "marker": "o", "zorder": 5},
    "dpcore plain": {"color": "#56a3ff", "linewidth": 2.2, "marker": "s", "zorder": 4},
    "dpcore in C++": {"color": "#002a7a", "linewidth": 2.2, "marker": "v", "zorder": 4},
    "Gloo": {"color": "#e07b00", "marker": "^"},
    "Open MPI": {"color": "#12805c", "marker": "D"},
    "MPICH": {"color": "#a6338f", "marker": "P"},
    "x *= 0.5": {"color": "#555555", "linestyle": (0, (5, 2)), "linewidth": 1.3},
    "memcpy": {"color": "#999999", "linestyle": (0, (2, 2)), "linewidth": 1.3},
}
_LABELS = {"x *= 0.5": "bound: x *= 0.5, no communication", "memcpy": "bound: memcpy"}
Series = dict[str, list[tuple[int, Figures]]]


def draw(path: Path, title: str, runs: Sequence[Sequence[Measurement]]) -> None:
    """`runs`: one list of measurements per size, of one collective and one world."""
    series = _series(runs)
    mpl.use("Agg")
    with mpl.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(11, 4.4), dpi=150, layout="constrained", facecolor="white")
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        _bandwidth(left, series)
        _latency(right, series)
        handles, labels = left.get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside lower center", ncols=min(4, max(1, len(labels))),
            frameon=False,
        )  # fmt: skip
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def _series(runs: Sequence[Sequence[Measurement]]) -> Series:
    series: Series = {}
    for run in runs:
        for result, figures in zip(run, summarise(run), strict=True):
            if figures is not None:
                points = series.setdefault(result.contender.name, [])
                points.append((result.cell.bytes, figures))
    return series


def _bandwidth(axes: Axes, series: Series) -> None:
    sizes = sorted({size for points in series.values() for size, _ in points})
    smallest = WIDE_BYTES if any(size >= WIDE_BYTES for size in sizes) else 0
    for name, points in series.items():
        least = BOUND_BYTES if name in _LABELS else smallest
        wide = [(size, figures.algbw) for size, figures in points if size >= least]
        _line(axes, name, [size for size, _ in wide], [rate for _, rate in wide])
    axes.set_title("bandwidth: size / time, GB/s", loc="left", fontsize=10)
    _finish(axes, [size for size in sizes if size >= smallest])


def _latency(axes: Axes, series: Series) -> None:
    sizes: list[int] = []
    for name, points in series.items():
        small = [(size, f.median_s * 1e6) for size, f in points if size <= SMALL_BYTES]
        if small and name not in _LABELS:
            _line(axes, name, [size for size, _ in small], [value for _, value in small])
            sizes += [size for size, _ in small]
    axes.set_title(f"latency up to {size_text(SMALL_BYTES)}, µs", loc="left", fontsize=10)
    _finish(axes, sizes)


def _line(axes: Axes, name: str, x: list[int], y: list[float]) -> None:
    style = {"linewidth": 1.7, "markersize": 4.5} | _LINES.get(name, {})
    axes.plot(x, y, label=_LABELS.get(name, name), **style)


def _finish(axes: Axes, sizes: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.grid(True, which="major", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    if sizes:
        ticks = sorted(set(sizes))
        every = -(-len(ticks) // 7)
        axes.xaxis.set_major_locator(FixedLocator(ticks[::every]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size_text(int(value))))
        axes.tick_params(axis="x", labelsize=8.5)
