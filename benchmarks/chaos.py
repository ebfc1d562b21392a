"""100 faults in one training, on a host and over namespaces. `python -m benchmarks.chaos`

The program of `dpcore chaos` trains on 4 ranks, which are killed, stopped and started again, so
that ranks join while others die. Its weights have to be those of a run in one process in which the
same ranks take each step. Nothing may hang, and nothing may be left: no process, no file in
/dev/shm.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.figures import source
from benchmarks.harness.options import script_parser
from dpcore.tools import hosts as namespaces
from dpcore.tools.chaos.command import Chaos
from dpcore.tools.chaos.faults import faults
from dpcore.tools.chaos.figures import in_ms
from dpcore.tools.records import ROOT, keep, run_facts

_SCENES = {"host": (1, ["kill", "pair", "stop"]), "hosts": (2, ["kill", "stop", "cut", "slow"])}


def left_in_memory() -> set[str]:
    """Files, of whatever process."""
    return set(os.listdir("/dev/shm"))


def measured(scene: str, options: Any) -> dict[str, Any]:
    """One line of the record."""
    count, kinds = _SCENES[scene]
    before = left_in_memory()
    command = [sys.executable, "-m", "dpcore.tools.chaos.program"]
    coming = faults(options.seed, options.mtbf, kinds)
    say = print if options.verbose else None

    def run(hosts: Any) -> Any:
        chaos = Chaos(command, options.world, hosts, coming, options.faults, 0.5, 60.0, say)
        return chaos.run(True)

    if count > 1:
        with namespaces.hosts(count) as made:
            figures = run(made)
    else:
        figures = run(None)
    figures.left += [f"/dev/shm/{name}" for name in left_in_memory() - before]
    print(f"{scene}\n{figures.text()}\n", flush=True)
    return {"scene": scene, **figures.as_json()}


_TABLE = [
    "| | faults | steps (repeated) | kill to next step | wrong or left | goodput |",
    "|---|---|---:|---|---|---:|",
]


def table_of_chaos(records: list[dict[str, Any]]) -> str:
    """Of docs/failures.md."""
    lines = list(_TABLE)
    for record in records:
        faults = ", ".join(f"{count} {kind}" for kind, count in sorted(record["faults"].items()))
        said = in_ms(record["kill_to_step"])
        wrong = "; ".join([*record["hangs"], *record["wrong"], *record["left"]]) or "nothing"
        place = {"host": "one host", "hosts": "two hosts"}[record["scene"]]
        steps = f"{record['steps']} ({record['repeated']})"
        lines.append(
            f"| {place} | {faults} | {steps} | {said} | {wrong} | {record['goodput']:.2f} |"
        )
    what = f"{records[0]['ranks']} ranks, one run"
    return "\n".join([*lines, "", source("chaos", records, "../", what), ""])


if __name__ == "__main__":
    made = script_parser(__doc__)
    made.add_argument("--world", type=int, default=4)
    made.add_argument("--faults", type=int, default=100)
    made.add_argument("--mtbf", type=float, default=1.0, help="seconds; default: %(default)s")
    made.add_argument("--seed", type=int, default=7)
    made.add_argument("--scenes", default="host,hosts", help="default: %(default)s")
    made.add_argument("--verbose", action="store_true", help="say each fault")
    made.add_argument("--records", type=Path, default=ROOT / "benchmarks/results/chaos.jsonl")
    options = made.parse_args()
    facts = run_facts({"": {"torch": torch.__version__}}, {"faults": options.faults})
    namespaces.end_in_order_on_signals()  # ranks are ended with this
    lines = [measured(scene, options) for scene in options.scenes.split(",")]
    keep(options.records, facts, lines)
    sys.exit(any(line["hangs"] or line["wrong"] or line["left"] for line in lines))
