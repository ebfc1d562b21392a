"""What the demonstrations of this folder share: their options, intervals, tables and pictures.

A demonstration prints one table and draws one figure. The table goes to stdout, or all numbers as
JSON with --json; the progress bar and the name of the figure go to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

try:
    import matplotlib
except ModuleNotFoundError:
    sys.exit("this draws a figure and needs matplotlib: pip install '.[learn]' in the clone")

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

COLOURS = ("#1f6f8b", "#d1495b", "#66a182", "#edae49", "#6c5b7b", "#7f7f7f")

# Student's t at 97.5%, for 1 to 10 degrees of freedom.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


class Spread(NamedTuple):
    """A mean over seeds or repetitions, and its 95% interval. One value has none."""

    mean: float
    low: float
    high: float
    count: int

    def text(self, digits: int = 1) -> str:
        if self.count < 2:
            return f"{self.mean:.{digits}f} (one value)"
        return f"{self.mean:.{digits}f} ± {(self.high - self.low) / 2:.{digits}f}"


def spread(values: Sequence[float]) -> Spread:
    """By Student's t: for the few seeds that a demonstration has time for.

    >>> spread([9.0, 10.0, 11.0]).text()
    '10.0 ± 2.5'
    >>> spread([9.0]).text()
    '9.0 (one value)'
    """
    mean, count = statistics.fmean(values), len(values)
    if count < 2:
        return Spread(mean, mean, mean, count)
    t = _T[min(count - 2, len(_T) - 1)]
    half = t * statistics.stdev(values) / math.sqrt(count)
    return Spread(mean, mean - half, mean + half, count)


def over(count: int, what: str) -> str:
    """What is shown of so many values.

    >>> over(5, "seeds"), over(1, "seeds")
    ('mean and 95% over 5 seeds', 'one value, without an interval')
    """
    return f"mean and 95% over {count} {what}" if count > 1 else "one value, without an interval"


def options(description: str, name: str) -> argparse.Namespace:
    """What every demonstration understands. ``quick``: sizes for a test, not for conclusions."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print all numbers as JSON")
    parser.add_argument(
        "--out", type=Path, default=Path(f"{name}.png"), help="the figure (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    chosen = parser.parse_args()
    if chosen.out.suffix not in (".png", ".svg", ".pdf"):
        parser.error(f"--out {chosen.out}: a name that ends in .png, .svg or .pdf is needed")
    if not os.access(chosen.out.parent, os.W_OK):
        parser.error(f"--out {chosen.out}: there is no folder {chosen.out.parent} to write to")
    chosen.name, chosen.began = name, time.perf_counter()
    return chosen


@contextlib.contextmanager
def progress(total: int, text: str) -> Iterator[Callable[[], None]]:
    """A bar on stderr; what it gives is called once per part that is done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bar = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
    with bar:
        task = bar.add_task(text, total=total)
        yield lambda: bar.advance(task)


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Columns as wide as they need to be; numbers to the right."""
    names = list(rows[0])
    cells = [names, *([row[name] for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    is_text = [cells[1][column][:1].isalpha() for column in range(len(names))]
    lines = (
        "  ".join(
            cell.ljust(width) if left else cell.rjust(width)
            for cell, width, left in zip(line, widths, is_text, strict=True)
        ).rstrip()
        for line in cells
    )
    return "\n".join(lines)


def axes(*titles: str) -> tuple[Any, list[Axes]]:
    """A figure with a plot for each title, side by side."""
    pyplot.rcParams.update({"font.size": 10, "axes.grid": True, "grid.alpha": 0.3})
    size = (6.2 * len(titles) if len(titles) > 1 else 7.0, 4.6)
    figure, plots = pyplot.subplots(1, len(titles), figsize=size, squeeze=False)
    for plot, title in zip(plots[0], titles, strict=True):
        plot.set_title(title, fontsize=11)
        plot.spines[["top", "right"]].set_visible(False)
    return figure, list(plots[0])


def line(
    plot: Axes, x: Sequence[float], y: Sequence[Spread], label: str, number: int, **more: Any
) -> None:
    """Means, and their intervals as a band."""
    colour = COLOURS[number % len(COLOURS)]
    style = {"marker": "o", "markersize": 4, "color": colour, "label": label, **more}
    plot.plot(x, [point.mean for point in y], **style)
    plot.fill_between(
        x, [point.low for point in y], [point.high for point in y], color=colour, alpha=0.15
    )


def in_per_cent(plot: Axes) -> None:
    """No interval of an accuracy is drawn below 0 or above 100."""
    low, high = plot.get_ylim()
    plot.set_ylim(max(0.0, low), min(101.0, high))


def numbers_on(axis: Any, ticks: Sequence[float], names: Sequence[str] | None = None) -> None:
    """Plain numbers at these places, and none in between, on an axis of powers."""
    axis.set_ticks(ticks, names or [f"{tick:g}" for tick in ticks])
    axis.set_ticks([], minor=True)


def numbers_of_scale(plot: Axes) -> None:
    """1, 2, 5, 10, ... on an upright axis of powers, as far as it goes."""
    low, high = plot.get_ylim()
    ticks = [one * 10**power for power in range(-3, 9) for one in (1, 2, 5)]
    seen = [tick for tick in ticks if low <= tick <= high]
    numbers_on(plot.yaxis, seen, [f"{tick:,}" if tick >= 1 else f"{tick:g}" for tick in seen])


def finish(
    chosen: argparse.Namespace,
    rows: Sequence[Mapping[str, str]],
    figure: Any,
    facts: Mapping[str, Any],
    said: Sequence[str],
) -> None:
    """Prints the table and what follows from it, and writes the figure."""
    figure.tight_layout()
    figure.savefig(chosen.out, dpi=120)
    seconds = time.perf_counter() - chosen.began
    try:
        if chosen.json:
            about = {"demonstration": chosen.name, "quick": chosen.quick, "seconds": seconds}
            print(json.dumps({**about, "rows": rows, "said": said, **facts}))
        else:
            print(table(rows))
            for sentence in said:
                print(f"\n{sentence}")
        sys.stdout.flush()
    except BrokenPipeError:  # into head, which has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    print(f"{chosen.out}, {seconds:.0f} s", file=sys.stderr)
