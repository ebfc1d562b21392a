"""The museum of docs/mistakes.md: what torch DDP says of a mistake beside what dpcore says."""

from __future__ import annotations

from typing import Any

from benchmarks.harness.figures import source

TORCH, OURS = "torch DDP", "shm"
KINDS = {
    "never_averaged": "Gradients that are never averaged",
    "hyperparameters": "Optimizers that differ",
    "weights": "Weights, gradients and steps of one rank",
    "modes": "Modes, NaN and buffers",
    "data": "Data, losses and metrics",
    "structure": "Parameters, models and evaluation",
}
HOW = {"raise": "error", "warn": "warning", "note": "note", "silent": "silent", "waits": "waits"}
SHOWN = 140  # characters of a message


def table_of_mistakes(records: list[dict[str, Any]]) -> str:
    """A table for each kind. The last record of a mistake counts."""
    newest = {(record["mistake"], record["who"]): record for record in records}
    shown = [record for (_, who), record in newest.items() if who in (TORCH, OURS)]
    parts = []
    for kind, title in KINDS.items():
        names = dict.fromkeys(r["mistake"] for r in shown if r["kind"] == kind)
        if not names:
            continue
        parts += [
            f"### {title}",
            "",
            "| mistake | torch DDP | dpcore | remedy |",
            "|---|---|---|---|",
        ]
        for name in names:
            theirs, ours = newest.get((name, TORCH)), newest.get((name, OURS))
            known = ours or theirs
            assert known is not None
            parts.append(
                f"| [`{name}`]({known['address']}): {_cell(known['what'])} | {_said(theirs)} "
                f"| {_said(ours, with_text=True)} | {_cell(known['remedy'])} |"
            )
        parts.append("")
    what = "What two ranks were told"
    parts += [source("mistakes", shown, "../", what, lambda r: str(r["who"])), ""]
    return "\n".join(parts)


def _said(record: dict[str, Any] | None, with_text: bool = False) -> str:
    if record is None:
        return "–"
    how = HOW[record["told"]]
    if record["told"] == "silent":
        return how
    when = how if record["told"] == "note" else f"{how}, step {record['step']}"
    if not with_text:
        return when
    text = " ".join(record["text"].split())
    text = text if len(text) <= SHOWN else text[:SHOWN].rsplit(" ", 1)[0] + " ..."
    return f"{when}: *{_cell(text)}*"


def _cell(text: str) -> str:
    """As it may stand in a table, without being markup."""
    return text.replace("|", r"\|").replace("*", r"\*").replace("<", r"\<")
