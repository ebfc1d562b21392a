"""The bars of a comparison as a picture, where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from dpcore.tools.compare.output import Outcome, number

_COLOURS = {"alone": "#35a29f", "slowdown": "#f0b429", "exposed": "#e5484d", "both": "#ee8a3c"}
_LABELS = {
    "alone": "computing",
    "slowdown": "slowed down",
    "exposed": "exposed communication",
    "both": "cost of communication, undivided",
}


def write_picture(path: Path, model: str, outcomes: Sequence[Outcome]) -> bool:
    """As PNG and SVG; False where there is no matplotlib to draw with."""
    if find_spec("matplotlib") is None:
        return False
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.use("Agg")
    rows = [len(outcome.figures) for outcome in outcomes]
    every = [one for outcome in outcomes for one in outcome.figures]
    parts = [part for part in _COLOURS if any(one.parts_ms[part] > 0 for one in every)]
    with mpl.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        height = 1.1 + sum(0.85 + 0.42 * count for count in rows)
        figure = Figure(figsize=(9, height), dpi=150, layout="constrained", facecolor="white")
        panels = figure.subplots(len(outcomes), 1, squeeze=False, height_ratios=rows)[:, 0]
        for axes, outcome in zip(panels, outcomes, strict=True):
            names = [one.contender for one in outcome.figures]
            left = [0.0] * len(names)
            for part in parts:
                values = [one.parts_ms[part] for one in outcome.figures]
                kind = {"color": _COLOURS[part], "label": _LABELS[part]}
                axes.barh(names, values, left=left, height=0.62, **kind)
                left = [at + value for at, value in zip(left, values, strict=True)]
            for at, one in enumerate(outcome.figures):
                axes.plot([one.step.low, one.step.high], [at, at], color="#1d2129", linewidth=1.5)
                axes.text(
                    one.step.high, at, f"  {number(one.step.median)} ms", va="center", fontsize=9
                )
            axes.invert_yaxis()
            axes.set_title(outcome.cell.title, loc="left", fontsize=10)
            axes.set_xlim(0, 1.12 * max(one.step.high for one in outcome.figures))
        ends = " or ".join(dict.fromkeys(outcome.ends for outcome in outcomes))
        panels[-1].set_xlabel(f"step, ms: median and {ends}")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(parts), frameon=False)
        figure.suptitle(model, x=0.01, ha="left", fontweight="bold", fontsize=11)
        path.parent.mkdir(parents=True, exist_ok=True)
        for suffix in (".png", ".svg"):
            figure.savefig(path.with_suffix(suffix))
    return True
