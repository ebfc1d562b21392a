"""The page of a comparison: one HTML file without scripts, in the colours of `dpcore show`."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from dpcore.base.files import write_whole
from dpcore.tools.compare.figures import Figures, ms
from dpcore.tools.compare.output import (
    Outcome,
    interval,
    memory_of_alone,
    more_heads,
    more_texts,
    number,
    overlap_text,
    ratio_text,
)
from dpcore.tools.ratios import LEAST_ROUNDS, Estimate

_PARTS = (
    ("alone", "computing, as long as it takes without communication"),
    ("slowdown", "computing that communication slows down"),
    ("exposed", "exposed communication, which nothing hides"),
    ("both", "what communication costs, of a contender that shows no more from outside"),
)


def write_page(path: Path, model: str, facts: dict[str, Any], outcomes: Sequence[Outcome]) -> None:
    write_whole(path, page_text(model, facts, outcomes))


def page_text(model: str, facts: dict[str, Any], outcomes: Sequence[Outcome]) -> str:
    machine, day = facts["machine"], facts["date"][:10]
    about = f"{machine['cores']} cores of {machine['cpu']}, {day}, dpcore {facts['commit']}"
    title = f"{model}: {', '.join(one.contender for one in outcomes[0].figures)}"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{escape(title)} · dpcore compare</title>
<style>
{_part("style.css", "dpcore.tools.show")}
{_part("compare.css")}
</style>
</head>
<body>
<header>
  <p class="brand">dpcore compare</p>
  <h1>{escape(title)}</h1>
  <p class="hint">{escape(about)}</p>
</header>
<main>
{"".join(map(_section, outcomes))}
{_part("how.html")}
<p class="hint"><code>{escape(facts["command"])}</code></p>
</main>
</body>
</html>
"""


def _part(name: str, package: str = "dpcore.tools.compare") -> str:
    return (resources.files(package) / "page_parts" / name).read_text("utf-8")


def _section(outcome: Outcome) -> str:
    said = "".join(f"<li>{escape(sentence)}</li>" for sentence in outcome.verdicts)
    notes = "".join(f"<p class='hint'>{escape(note)}</p>" for note in outcome.notes)
    drawn = {name for one in outcome.figures for name, value in one.parts_ms.items() if value > 0}
    legend = "".join(
        f"<span><i class='{name}'></i>{text}</span>" for name, text in _PARTS if name in drawn
    )
    return f"""<section class="cell">
<h2>{escape(outcome.cell.title)}</h2>
<ul class="verdicts">{said}</ul>
{_bars(outcome.figures)}
<p class="legend">{legend}</p>
{_ratios(outcome)}
<div class="scroll">{_table(outcome)}</div>
{notes}
</section>
"""


def _bars(figures: Sequence[Figures]) -> str:
    widest = max(one.step.high for one in figures)
    rows = []
    for one in figures:
        drawn = "".join(
            f"<b class='{name}' style='width:{100 * value / widest:.3f}%' "
            f"title='{name} {ms(value)}'></b>"
            for name, value in one.parts_ms.items()
            if value > 0
        )
        low, high = (100 * value / widest for value in (one.step.low, one.step.high))
        whisker = f"<u style='left:{low:.3f}%;width:{max(high - low, 0.15):.3f}%'></u>"
        rows.append(
            f"<dt>{escape(one.contender)}</dt><dd><span class='bar'>{drawn}{whisker}</span>"
            f"<span class='value'>{number(one.step.median)} ms</span></dd>"
        )
    return f"<dl class='bars' aria-label='Step by contender'>{''.join(rows)}</dl>"


def _ratios(outcome: Outcome) -> str:
    """A dot and its interval on a line that begins and ends at the furthest of all."""
    known = [(one, one.ratio) for one in outcome.figures if one.ratio is not None]
    if not known:
        return ""
    ends = [1.0, *(end for _, ratio in known for end in (ratio.low, ratio.high))]
    least, most = min(ends), max(ends)
    margin = 0.06 * (most - least) or 0.01
    least, most = least - margin, most + margin

    def at(value: float) -> float:
        return 100 * (value - least) / (most - least)

    def row(one: Figures, ratio: Estimate) -> str:
        kind, mark = ("", "") if ratio.is_conclusive else ("unsure", " ?")
        width = at(ratio.high) - at(ratio.low)
        return (
            f"<dt>{escape(one.contender)}</dt><dd><span class='line'>"
            f"<s style='left:{at(1.0):.3f}%'></s>"
            f"<u class='{kind}' style='left:{at(ratio.low):.3f}%;width:{width:.3f}%'></u>"
            f"<b class='{kind}' style='left:{at(ratio.median):.3f}%'></b></span>"
            f"<span class='value'>{ratio.median:.3f}{mark}</span></dd>"
        )

    rows = "".join(row(*pair) for pair in known)
    reference = escape(outcome.reference)
    return (
        f"<h3>Step over that of {reference}, with the {outcome.ends}</h3>"
        f"<p class='hint'>The upright line is {reference}. Left of it is faster; what touches it "
        f"(hollow) proves nothing, nor do fewer than {LEAST_ROUNDS} rounds.</p>"
        f"<dl class='bars ratios'>{rows}</dl>"
    )


def _table(outcome: Outcome) -> str:
    heads = ["step ms", "exposed ms", "slowdown ms", "communication ms", "overlap"]
    heads += [f"of {outcome.reference}", *more_heads(outcome)]
    columns = "".join(f"<th>{escape(head)}</th>" for head in heads)
    rows = "".join(
        f"<tr><td>{escape(one.contender)}{_changes(one)}</td><td>"
        + "</td><td>".join(
            map(
                escape,
                (
                    *(map(interval, (one.step, one.exposed, one.slowdown, one.communication))),
                    overlap_text(one),
                    ratio_text(one),
                    *more_texts(outcome, one),
                ),
            )
        )
        + "</td></tr>"
        for one in outcome.figures
    )
    memory = memory_of_alone(outcome)
    blank = [""] * (len(heads) - 1 - len(memory))
    cells = "</td><td>".join([interval(outcome.figures[0].alone), *blank, *memory])
    alone = f"<tr><td>no communication</td><td>{cells}</td></tr>"
    return f"<table><thead><tr><th></th>{columns}</tr></thead><tbody>{rows}{alone}</tbody></table>"


def _changes(one: Figures) -> str:
    return f"<br><small>{escape(one.changes)}</small>" if one.changes else ""
