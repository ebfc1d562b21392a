"""The README's figures: what its commands print, and a step of torch DDP and of dpcore."""

from __future__ import annotations

import re
from typing import Any

from benchmarks.harness.beside_default import DEFAULT, TORCH, best_of_torch, newest
from benchmarks.harness.figures import load, source, time_text
from dpcore.tools.compare.training.ranks import ALONE
from dpcore.tools.ratios import paired

PLACES = {"host2": "a host", "1gbit": "1 Gbit/s", "100mbit": "100 Mbit/s"}
MODELS = {"mlp": "MLP, 42 M", "transformer": "transformer, 4.7 M", "many": "400 small tensors"}
BAR = "━━"  # of progress
# By the command's first words: the lines of its output that are shown, from one to another.
SHOWN = {
    "dpcore demo": (r"^between ", r"^ no communication"),
    "DPCORE_TRACE": (r"^run: ", r"^ rank 1"),
    "dpcore compare": (r"^ +step ms", r"^In brackets"),
}


OF_COMPILED = "1gbit,50us"  # the link of the compiled row


def excerpt(command: str, printed: str) -> str:
    begin, end = next(of for words, of in SHOWN.items() if command.startswith(words))
    lines = [line.rstrip() for line in printed.splitlines()]
    first = next(at for at, line in enumerate(lines) if re.search(begin, line))
    last = next(at for at in range(first, len(lines)) if re.search(end, lines[at]))
    return "\n".join(line for line in lines[first : last + 1] if line and BAR not in line)


def outputs_of_commands(records: list[dict[str, Any]]) -> str:
    """What the commands have printed, the lines that tell most."""
    shown = [record for record in records if "command" in record and "printed" in record]
    blocks = [
        f"```text\n$ {record['command']}\n{excerpt(record['command'], record['printed'])}\n```"
        for record in shown
    ]
    return "\n\n".join([*blocks, source("first_screen", shown, what="Printed")]) + "\n"


def cells_of(records: list[dict[str, Any]]) -> list[tuple[str, str, dict[str, dict[str, Any]]]]:
    """Place, model and records by contender, of each cell."""
    found = newest([record for record in records if "cell" in record])
    return [(*name.split("/")[:2], cell) for name, cell in found.items()]  # type: ignore[misc]


def cap_of(record: dict[str, Any]) -> str:
    cap = record["contender"].partition(" ")[2]
    return f"{cap} MiB" if cap else "its default"


def table_of_first_screen(records: list[dict[str, Any]]) -> str:
    """Steps, a row a cell; the ratio with the ends of its interval."""
    lines = [
        "| 2 ranks | model | computing alone | torch DDP | at its best cap | dpcore | "
        "of torch's best |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for place, model, cell in cells_of(records):
        best = best_of_torch(cell) or cell[TORCH]
        times = [time_text(cell[name]["step_s"]) for name in (ALONE, TORCH)]
        times += [f"{time_text(best['step_s'])} ({cap_of(best)})"]
        times += [time_text(cell[DEFAULT]["step_s"])]
        ratio = best["ratio"]
        ends = f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
        lines.append(f"| {PLACES[place]} | {MODELS[model]} | {' | '.join(times)} | {ends} |")
    compiled = [record for record in load("compiled") if record["link"] == OF_COMPILED]
    lines.append(_row_of_compiled({record["contender"]: record for record in compiled}))
    used = [record for _, _, cell in cells_of(records) for record in cell.values()]
    what = "Medians and, in brackets, 95% intervals of one run"
    sources = [
        source("first_screen", used, what=what),
        source("compiled", compiled, what="Compiled:"),
    ]
    return "\n".join([*lines, "", *sources]) + "\n"


def _row_of_compiled(cell: dict[str, dict[str, Any]]) -> str:
    names = ("compiled alone", "torch cut", "compiled")
    alone, torch_ddp, ours = (time_text(cell[name]["step_s"]) for name in names)
    ratio = paired(cell["compiled"]["rounds_s"], cell["torch cut"]["rounds_s"])
    ends = f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
    times = f"{alone} | {torch_ddp} | – | {ours}"
    return f"| 1 Gbit/s, emulated | transformer, compiled | {times} | {ends} |"
