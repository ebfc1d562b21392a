"""``--grid "LINKS x WORLDS x SCHEDULES x CAPS"``: every combination, and a plot with the bound.

A panel is one link and one number of ranks, a line is a schedule over its sizes of buckets. The
bound is for all that send every gradient in every step: such a step takes at least as long as
computing without communication, and at least as long as communication with nothing beside it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from dpcore.tools import argument_types as types
from dpcore.tools.argument_types import name_and_cap


class Grid(NamedTuple):
    links: list[str]
    worlds: list[int]
    schedules: list[str]
    caps: list[float]  # MiB

    @property
    def contenders(self) -> list[str]:
        """Every schedule with every cap; what has a number of its own behind it comes once."""
        return [
            name if ":" in name else f"{name}:{cap:g}"
            for name in self.schedules
            for cap in ([self.caps[0]] if ":" in name else self.caps)
        ]


def grid(text: str) -> Grid:
    """
    >>> grid("none,1gbit x 2,4 x torch,local_sgd:16 x 1,25").contenders
    ['torch:1', 'torch:25', 'local_sgd:16']
    """
    parts = re.split(r"\s+x\s+", text.strip())
    if len(parts) != 4:
        raise ValueError(
            f"{text!r} has {len(parts)} lists; write links x worlds x schedules x caps in MiB, "
            "such as 'none,1gbit x 2,4 x torch,bucketed x 1,4,25'"
        )
    links, worlds, schedules, caps = parts
    sizes = list(dict.fromkeys(types.mib(part) for part in caps.split(",")))
    return Grid(types.links(links), types.worlds(worlds), types.names(schedules), sizes)


def split_name(contender: str) -> tuple[str, float | None]:
    """
    >>> split_name("bucketed:25"), split_name("local_sgd:16")
    (('bucketed', 25.0), ('local_sgd:16', None))
    """
    name, cap = name_and_cap(contender, ())
    if not cap or cap == "auto" or name in ("local_sgd", "diloco") or "hook:" in name:
        return contender, None
    return name, float(cap)


def bound_ms(outcome: Any) -> float:
    """What no schedule can beat that sends all gradients in every step. Of the ways to send them,
    torch's and dpcore's, the quicker one counts."""
    alone: float = outcome.figures[0].alone.median
    quickest: float = min(one.communication.median for one in outcome.figures)
    return max(alone, quickest)


def write_grid(path: Path, model: str, outcomes: Sequence[Any]) -> bool:
    """As PNG and SVG; False where there is no matplotlib to draw with."""
    if find_spec("matplotlib") is None:
        return False
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.use("Agg")
    links = list(dict.fromkeys(outcome.cell.link for outcome in outcomes))
    worlds = list(dict.fromkeys(outcome.cell.world for outcome in outcomes))
    with mpl.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        size = (1.2 + 3.6 * len(worlds), 1.3 + 2.9 * len(links))
        figure = Figure(figsize=size, dpi=150, layout="constrained", facecolor="white")
        panels = figure.subplots(len(links), len(worlds), squeeze=False)
        for outcome in outcomes:
            place = links.index(outcome.cell.link), worlds.index(outcome.cell.world)
            _panel(panels[place], outcome)
        handles, labels = panels[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
        ends = " or ".join(dict.fromkeys(outcome.ends for outcome in outcomes))
        for axes in panels[-1]:
            axes.set_xlabel(f"buckets, MiB: median and {ends}")
        for axes in panels[:, 0]:
            axes.set_ylabel("step, ms")
        figure.suptitle(model, x=0.01, ha="left", fontweight="bold", fontsize=11)
        path.parent.mkdir(parents=True, exist_ok=True)
        for kind in (".png", ".svg"):
            figure.savefig(path.with_suffix(kind))
    return True


def _panel(axes: Any, outcome: Any) -> None:
    by_name: dict[str, list[tuple[float, Any]]] = {}
    once = []
    for one in outcome.figures:
        name, cap = split_name(one.contender)
        if cap is None:
            once.append(one)
        else:
            by_name.setdefault(name, []).append((cap, one))
    caps = sorted({cap for of in by_name.values() for cap, _ in of})
    for number, (name, of) in enumerate(by_name.items()):
        of.sort(key=lambda pair: pair[0])
        # Beside each other, so that intervals can be told apart.
        at = [caps.index(cap) + 0.06 * (number - (len(by_name) - 1) / 2) for cap, _ in of]
        middle = [one.step.median for _, one in of]
        reach = [
            [one.step.median - one.step.low for _, one in of],
            [one.step.high - one.step.median for _, one in of],
        ]
        axes.errorbar(at, middle, yerr=reach, label=name, marker="o", markersize=4, capsize=2)
    for number, one in enumerate(once):
        style = {"color": f"C{len(by_name) + number}", "linestyle": "-."}
        axes.axhline(one.step.median, label=one.contender, **style)
    axes.axhline(
        bound_ms(outcome),
        color="#1d2129",
        linestyle="--",
        linewidth=1,
        label="bound of any overlap",
    )
    axes.set_xticks(range(len(caps)), [f"{cap:g}" for cap in caps])
    axes.set_ylim(bottom=0, top=1.15 * max(one.step.high for one in outcome.figures))
    link = outcome.cell.link or "this machine"
    axes.set_title(f"{outcome.cell.world} ranks, {link}", loc="left", fontsize=10)


def best_of(outcome: Any) -> str:
    """One sentence on a cell of the grid."""
    best = min(outcome.figures, key=lambda one: one.step.median)
    near = [
        one.contender
        for one in outcome.figures
        if one is not best and one.step.low <= best.step.high
    ]
    least = bound_ms(outcome)
    said = (
        f"{outcome.cell.title}: {best.contender} has the shortest step, {best.step.median:.3g} ms"
    )
    said += f", {best.step.median / least:.2f} of the bound of {least:.3g} ms"
    return f"{said}; intervals overlap with {', '.join(near)}." if near else f"{said}."
