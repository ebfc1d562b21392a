"""One HTML file that needs nothing else: figures and labels as JSON, events as compressed columns.

The parts lie in ``page_parts``: a frame, a style sheet, and scripts that are joined in the order of
their names. The page may load nothing (its content security policy says so), and every text of a
trace is put into it as text, never as markup.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from dpcore.base.files import write_whole
from dpcore.base.markup import frame, short
from dpcore.reference.moves import Move, Schedule
from dpcore.tools.show import moves
from dpcore.tools.show.columns import columns_of
from dpcore.tools.show.figures import figures_of, steps_of
from dpcore.tools.show.reading import read_run, run_of
from dpcore.tools.show.run import Run
from dpcore.tools.show.schedules import DrawnSchedules, can_be_followed
from dpcore.tools.show.schedules import steps_of as moves_by_step
from dpcore.tools.show.spans import legend_of
from dpcore.tools.show.tables import tables_of

Advised = Callable[[Run], Sequence[str]]  # lines for a run, as ``dpcore advise`` prints them

_ROW = 48  # pixels of a chunk in the drawing of a schedule
_AROUND = 190

PARTS = resources.files("dpcore.tools.show") / "page_parts"


def write_page(path: Path, runs: Sequence[Run], advised: Advised | None = None) -> None:
    """Writes the page of one run, or of several under each other. ``advised``: what to change."""
    write_whole(path, page_text(runs, advised))


def write_moves_page(path: Path, plan: Schedule, own: str = "") -> None:
    """Writes a page that steps through an algorithm. ``own``: the user's, as file.py:function."""
    title = f"{plan.collective} by {plan.algorithm}"
    write_whole(path, _text(title, moves.content(plan, own), []))


def page_of_trace(trace: Path | tuple[str, Any]) -> str:
    """The page of a file, or of a name and what would be written to a file."""
    return page_text(
        [read_run(trace) if isinstance(trace, Path) else run_of(Path(trace[0]), trace[1])]
    )


def page_of_schedule(schedule: Any) -> str | None:
    """HTML for a schedule of the core or of ``dpcore.reference``. None where it is too large to be
    drawn, or wrong."""
    names = ("algorithm", "collective", "world", "chunks", "root", "ordered")
    plan = Schedule(
        **{name: getattr(schedule, name) for name in names},
        moves=tuple(Move(*move) for move in schedule.moves),
    )
    if not can_be_followed(plan):
        return None
    entry = {"algorithms": {plan.algorithm: moves_by_step(plan)}, "first": plan.algorithm}
    page = filled(
        part("stepper.html"),
        {
            "style": part("style.css"),
            "stepper": part("moves.html"),
            "data": json_text({str(plan.world): {plan.collective: entry}}),
            "script": part("6_stepper.js"),
        },
    )
    return frame(page, _AROUND + _ROW * plan.chunks)


def page_text(runs: Sequence[Run], advised: Advised | None = None) -> str:
    """The page as text."""
    entries, blobs = [], []
    drawn = DrawnSchedules(runs)
    for number, run in enumerate(runs):
        entry, packed = _entry(run, drawn)
        entries.append(entry | {"advice": advised(run) if advised else []})
        blobs.append(f'<script type="text/plain" id="columns-{number}">{packed}</script>')
    names = ", ".join(run.name for run in runs)
    data = {"runs": entries, "schedules": drawn.content, "world": drawn.first_world}
    data["legend"] = legend_of(runs)
    return _text(names, data, blobs)


def _text(title: str, data: Mapping[str, Any], blobs: Sequence[str]) -> str:
    scripts = sorted(p.name for p in PARTS.iterdir() if p.name.endswith(".js"))
    content = {
        "title": _escaped(f"{title} · dpcore show"),
        "style": part("style.css"),
        "stepper": part("moves.html"),
        "data": json_text(data),
        "columns": "\n".join(blobs),
        "script": "\n".join(map(part, scripts)),
    }
    return filled(part("page.html"), content)


def part(name: str) -> str:
    """The text of one of the page's parts."""
    return (PARTS / name).read_text(encoding="utf-8")


def filled(frame: str, content: Mapping[str, str]) -> str:
    """The frame with its contents in the places of their names."""
    pieces = frame.replace("}}", "{{").split("{{")  # texts and names of contents in turn
    return "".join(content[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def _entry(run: Run, drawn: DrawnSchedules) -> tuple[dict[str, Any], str]:
    figures = figures_of(run)
    columns = columns_of(run, drawn)
    exposed, communication = figures.shown_ms
    machine, pipeline = run.machine, figures.pipeline
    entry = {
        "name": run.name,
        "headline": figures.headline,
        "exposed": short(exposed),
        "communication": short(communication),
        "overlap": None if figures.overlap is None else f"{figures.overlap:.0%}",
        "step": None if figures.step_ms is None else short(figures.step_ms),
        "step_count": figures.steps,
        "pipeline": pipeline.headline if pipeline else "",
        "several_stages": [r.rank for r in pipeline.ranks if len(r.stages) > 1] if pipeline else [],
        "world_size": run.world_size,
        "network": (run.transport or run.backend) + (f" as slow as {run.link}" if run.link else ""),
        "about": run.about
        or f"{machine.get('processors', '?')} processors, {machine.get('processor', '?')}",
        "error": run.error,
        "dropped": sum(rank.dropped for rank in run.ranks),
        "ranks": [rank.rank for rank in run.ranks],
        "end_ns": run.end_ns,
        "steps": next((steps for rank in run.ranks if (steps := steps_of(rank))), []),
        "tick_ns": columns.tick_ns,
        "labels": columns.labels,
        "lanes": columns.lanes,
        "tables": [
            {
                "title": table.title,
                "columns": table.columns,
                "texts": table.texts,
                "rows": table.rows,
            }
            for table in tables_of(run, figures)
        ],
    }
    return entry, columns.packed()


def json_text(content: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c")


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
