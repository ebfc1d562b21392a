"""The result of a comparison: the table, and files with a row or a line per cell and contender."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from dpcore.base.files import write_whole
from dpcore.tools.compare.figures import Figures, verdicts
from dpcore.tools.compare.plan import Cell
from dpcore.tools.ratios import Estimate

WIDE = 120  # characters that the table takes in one line a row
WIDEST = 200  # and at most, with an interval in every column
QUANTITIES = ("step", "alone", "exposed", "slowdown", "communication")
COLUMNS = (
    "model", "link", "kind", "world", "contender", "rounds",
    *(f"{name}_ms{end}" for name in QUANTITIES for end in ("", "_low", "_high")),
    *(f"{name}{end}" for name in ("overlap", "ratio") for end in ("", "_low", "_high")),
    "reference", "conclusive", "confidence", "optimizer", "loss", "memory_mib", "changes",
    "rounds_ms",
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """One cell, measured."""

    cell: Cell
    figures: list[Figures]
    notes: list[str]  # what a reader has to know to judge it
    optimizer: str = ""  # whose step is a part of every step
    memory_alone_mib: float | None = None  # without communication; None where it is not counted

    @property
    def reference(self) -> str:
        return next(one.contender for one in self.figures if one.ratio is None)

    @property
    def verdicts(self) -> list[str]:
        return verdicts(self.figures)

    @property
    def ends(self) -> str:
        """What stands in brackets behind a figure."""
        ends = self.figures[0].step.ends
        return f"{ends} interval" if self.figures[0].step.confidence else ends


def table(outcome: Outcome, width: int) -> Table:
    """With intervals, behind the figures or, on a narrow terminal, below them."""
    made = Table(box=SIMPLE, pad_edge=False)
    made.add_column("", no_wrap=True)
    heads = ("step ms", "exposed ms", "slowdown ms", "overlap", f"of {outcome.reference}'s step")
    for head in (*heads, *more_heads(outcome)):
        made.add_column(head, justify="right")
    for one in outcome.figures:
        texts = [*map(interval, (one.step, one.exposed, one.slowdown))]
        texts += [overlap_text(one), ratio_text(one), *more_texts(outcome, one)]
        if width < WIDE:
            texts = [text.replace(" (", "\n(").replace(" – ", "–") for text in texts]
        made.add_row(escape(one.contender), *texts)
        if one.changes:
            made.add_row(Text(f"  {one.changes}", style="dim"))
    alone = number(outcome.figures[0].alone.median)
    blank = [""] * (4 + bool(outcome.optimizer))
    made.add_row("no communication", alone, *blank, *memory_of_alone(outcome), style="dim")
    return made


def stacked(outcome: Outcome) -> Table:
    """One figure below the other, for a terminal on which the columns do not fit."""
    beside = table(outcome, WIDEST)
    heads = [str(column.header) for column in beside.columns[1:]]
    rows = zip(*(column.cells for column in beside.columns), strict=True)
    made = Table(box=SIMPLE, pad_edge=False, show_header=False)
    made.add_column("", no_wrap=True)
    made.add_column("", justify="right", no_wrap=True)
    for name, *texts in rows:
        made.add_row(name, "")
        for head, text in zip(heads, texts, strict=True):
            if text:
                made.add_row(f"  {head}", text)
    return made


def number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def interval(of: Estimate | None) -> str:
    if of is None:
        return "–"
    return f"{number(of.median)} ({number(of.low)} – {number(of.high)})"


def overlap_text(one: Figures) -> str:
    of = one.overlap
    if of is None:
        return "–"
    if not one.overlap_is_known:
        return "unknown"
    return f"{of.median:.0%} ({of.low:.0%} – {of.high:.0%})"


def ratio_text(one: Figures) -> str:
    if one.ratio is None:
        return "1"
    mark = "" if one.ratio.is_conclusive else " ?"
    return f"{one.ratio.median:.3f} ({one.ratio.low:.3f} – {one.ratio.high:.3f}){mark}"


def more_heads(outcome: Outcome) -> list[str]:
    """Columns that there are where an optimizer steps, and where memory is counted."""
    heads = ["loss"] if outcome.optimizer else []
    return heads if outcome.memory_alone_mib is None else [*heads, "memory MiB"]


def more_texts(outcome: Outcome, one: Figures) -> list[str]:
    """What stands in them."""
    texts = []
    if outcome.optimizer:
        texts.append("–" if one.loss is None else f"{one.loss:.4g}")
    if outcome.memory_alone_mib is not None:
        texts.append("–" if one.memory_mib is None else f"{one.memory_mib:.0f}")
    return texts


def memory_of_alone(outcome: Outcome) -> list[str]:
    """The last text of the row without communication, where memory is counted."""
    known = outcome.memory_alone_mib
    return [] if known is None else [f"{known:.0f}"]


def tell(console: Console, outcome: Outcome) -> None:
    console.print(f"\n{outcome.cell.title}", style="bold", soft_wrap=True)
    made = table(outcome, console.width)
    fits = console.measure(made, options=console.options.update(width=WIDEST))
    console.print(made if fits.maximum <= console.width else stacked(outcome))
    console.print(f"In brackets: {outcome.ends}.", style="dim")
    for sentence in outcome.verdicts:
        console.print(f"* {sentence}", markup=False, soft_wrap=not console.is_terminal)
    for note in outcome.notes:
        console.print(note, style="dim", markup=False, soft_wrap=not console.is_terminal)


def records(model: str, facts: dict[str, Any], outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """With the rounds, complete enough to be judged without the machine."""
    return [
        facts
        | {
            "model": model,
            "link": outcome.cell.link or "none",
            "kind": outcome.cell.kind,
            "world": outcome.cell.world,
            "reference": outcome.reference,
            "notes": outcome.notes,
            "optimizer": outcome.optimizer,
        }
        | one.record()
        for outcome in outcomes
        for one in outcome.figures
    ]


def write_jsonl(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    write_whole(path, "".join(json.dumps(line) + "\n" for line in lines))


def write_csv(path: Path, model: str, outcomes: Sequence[Outcome]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for outcome in outcomes:
        for one in outcome.figures:
            writer.writerow(_row(model, outcome, one))
    write_whole(path, text.getvalue())


def write_rounds_csv(path: Path, model: str, outcomes: Sequence[Outcome]) -> None:
    """A row for each round and contender, in the order in which rounds were measured."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("model", "link", "kind", "world", "contender", "round", "step_ms"))
    for outcome in outcomes:
        cell = outcome.cell
        for one in outcome.figures:
            for number, step in enumerate(one.rounds_ms, 1):
                where = (model, cell.link or "none", cell.kind, cell.world, one.contender)
                writer.writerow((*where, number, f"{step:.6g}"))
    write_whole(path, text.getvalue())


def _row(model: str, outcome: Outcome, one: Figures) -> list[Any]:
    cell, ratio = outcome.cell, one.ratio
    row: list[Any] = [model, cell.link or "none", cell.kind, cell.world, one.contender]
    row.append(len(one.rounds_ms))
    for of in (*(getattr(one, name) for name in QUANTITIES), one.overlap, ratio):
        row += [""] * 3 if of is None else [f"{v:.6g}" for v in (of.median, of.low, of.high)]
    sure = "" if ratio is None else ratio.is_conclusive
    loss = "" if one.loss is None else f"{one.loss:.6g}"
    row += [outcome.reference, sure, one.step.confidence or ""]
    values = " ".join(f"{value:.6g}" for value in one.rounds_ms)
    memory = "" if one.memory_mib is None else f"{one.memory_mib:.6g}"
    return [*row, outcome.optimizer, loss, memory, one.changes, values]
