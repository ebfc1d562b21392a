"""What is said of the mistakes of the museum? `python -m benchmarks.mistakes`

Each program of tests/mistakes/museum runs on two ranks over torch DDP with Gloo, then over dpcore.
A line says what reports the mistake, in which step and how: torch DDP is silent, waits for ever
(here until a deadline of seconds), or raises; dpcore raises, warns (`dpcore.MistakeWarning`) or
makes a note. A `!` is behind what the museum did not expect. Ways in which dpcore runs:

    shm        mapped memory         priority, dear, zero1   schedules that go across steps
    tcp        over loopback         gloo    process_group=, a group of gloo: dpcore's core moves it
                                     torch   dpcore.init("torch"): Gloo moves it
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.options import script_parser
from dpcore.tools.records import ROOT, keep, run_facts
from tests.mistakes.judging import of, problem
from tests.mistakes.museum import EXHIBITS
from tests.mistakes.running import WAYS, over_dpcore, over_torch

TORCH = "torch DDP"
WAITS = ("Timed out", "timeout", "Connection closed by peer")
SHOWN = 88  # characters of a message in the terminal


def heard(told: Sequence[Sequence[Any]], is_torch: bool) -> dict[str, Any]:
    """The first message, and how it was told; a note only if nothing else was said."""
    messages = of(told, "raise", "warn") or of(told, "note")
    if is_torch:  # a rank that knows something counts more than one that waits
        messages.sort(key=lambda message: any(word in message.text for word in WAITS))
    if not messages:
        return {"told": "silent"}
    first = messages[0]
    how = "waits" if is_torch and any(word in first.text for word in WAITS) else first.how
    rank = next(rank for rank, said in enumerate(told) if first in said)
    return {"told": how, "step": first.step, "rank": rank, "class": first.kind, "text": first.text}


def records(who: str, names: Sequence[str], options: Any) -> list[dict[str, Any]]:
    programs = {name: EXHIBITS[name].program for name in names}
    told = over_torch(programs) if who == TORCH else over_dpcore(programs, who, options.mistakes)
    loud = "warn" if options.mistakes == "all" else "note"
    lines = []
    for name in names:
        exhibit = EXHIBITS[name]
        line = {
            "mistake": name, "who": who, "expected": exhibit.grade, "address": exhibit.address,
            "kind": exhibit.program.__module__.rpartition(".")[2], "what": exhibit.what,
            "remedy": exhibit.remedy, **heard(told[name], who == TORCH),
        }  # fmt: skip
        if who != TORCH:
            line["unexpected"] = problem(exhibit, told[name], loud)
        lines.append(line)
    return lines


def row(line: dict[str, Any]) -> str:
    step = f"step {line['step']}" if "step" in line else ""
    mark = "!" if line.get("unexpected") else " "
    text = " ".join(line.get("text", "").split())[:SHOWN]
    return f"{line['mistake']:44}{line['told']:>7}{mark}{step:>8}  {text}"


def main() -> int:
    made = script_parser(__doc__)
    add = made.add_argument
    add("--who", default=f"{TORCH},shm", help="of torch DDP and the ways above (%(default)s)")
    add("--only", default="", help="names, or parts of them")
    add("--mistakes", default="warn", help="of DataParallel (default: %(default)s)")
    add("--records", type=Path, default=ROOT / "benchmarks/results/mistakes.jsonl")
    options = made.parse_args()
    if unknown := [who for who in options.who.split(",") if who not in (TORCH, *WAYS)]:
        made.error(f"no {', '.join(unknown)}; choose from {', '.join((TORCH, *WAYS))}")
    names = [name for name in EXHIBITS if any(part in name for part in options.only.split(","))]
    if not names:
        made.error(f"no mistake has {options.only!r} in its name")
    facts = run_facts({"": {"torch": torch.__version__}}, {"mistakes": options.mistakes})
    unexpected = 0
    for who in options.who.split(","):
        lines = records(who, names, options)
        print(f"\n{who}", *map(row, lines), sep="\n", flush=True)
        keep(options.records, facts, lines)
        unexpected += sum(bool(line.get("unexpected")) for line in lines)
    return int(unexpected > 0)


if __name__ == "__main__":
    sys.exit(main())
