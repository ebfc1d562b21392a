"""What does data parallel training add to a step? `python -m benchmarks.ddp_step`

    alone       no communication, all ranks computing at once: what is subtracted
    alone warm  the same with dp.warm_memory(); all others have malloc as it is
    torch       torch DDP over Gloo, gradients as views of buckets; "torch 100" with 100 MiB buckets
    dpcore      dpcore.DataParallel without an argument; "dpcore ..." with a schedule, and "dpcore
                copied" with gradients="copied"

The figure is the overhead: a contender's step minus that of `alone`, of the slowest rank, medians
over rounds in which all take turns. It is compared with the best of torch. With --memory the
most memory that all ranks of a contender hold together, instead of the time.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.options import script_parser
from benchmarks.training.memory import peak
from dpcore.base.user_code import names_code, without_folders
from dpcore.tools.compare.training.models import MODELS
from dpcore.tools.compare.training.ranks import (
    ALONE,
    ALONE_WARM,
    COPIED,
    DEFAULT,
    Times,
    measure,
    of_slowest,
    overheads,
    spawn,
)
from dpcore.tools.records import ROOT, keep, run_facts

CONTENDERS = (
    ALONE, ALONE_WARM, "torch", "torch 100",
    DEFAULT, COPIED, "dpcore bucketed", "dpcore sequential",
)  # fmt: skip
TARGETS = {"mlp": 0.3, "transformer": 0.5, "many": 0.3}  # of torch's overhead, 2 ranks


def report(
    model: str, world: int, rounds: Times, yardstick: Sequence[str], targets: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Prints the table of one cell and returns its records."""
    over = overheads(rounds)
    best_of_torch = min(over[name] for name in yardstick if name in over)
    target = f", target {targets[model]} of torch" if world == 2 and model in targets else ""
    print(f"\n{without_folders(model)}, {world} ranks{target}")
    alone = statistics.median(rounds[ALONE])
    print(f"{'':20}{'step ms':>10}{'of alone':>10}{'overhead ms':>13}{'of torch':>10}")
    lines = []
    for name, times in rounds.items():
        step = statistics.median(times)
        ratio = None if name == ALONE else over[name] / best_of_torch
        shown = "" if ratio is None else f"{ratio:.2f}"
        times_ms = f"{step * 1e3:>10.2f}{step / alone:>10.2f}{over[name] * 1e3:>13.2f}"
        print(f"{name:20}{times_ms}{shown:>10}", flush=True)
        lines.append(
            {
                "model": without_folders(model),
                "world": world,
                "contender": name,
                "step_s": step,
                "step_of_alone": step / alone,
                "overhead_s": over[name],
                "overhead_of_torch": ratio,
                "rounds_s": times,
            }
        )
    return lines


def report_memory(model: str, world: int, contenders: Sequence[str]) -> list[dict[str, Any]]:
    print(f"\n{model}, {world} ranks, at most in use")
    lines = []
    for name in contenders:
        most = sum(spawn(peak, world, model, name))
        print(f"{name:20}{most / 2**20:>10.1f} MiB", flush=True)
        lines.append({"model": model, "world": world, "contender": name, "peak_bytes": most})
    return lines


def compare(
    description: str,
    contenders: Sequence[str],
    yardstick: Sequence[str],
    targets: Mapping[str, float],
    results: str,
    worlds: str,
) -> None:
    """A benchmark of steps: all contenders in turn, told as parts of the best of `yardstick`."""
    made = script_parser(description)
    made.add_argument("--models", default=",".join(MODELS), help="of %(default)s, or file.py:make")
    made.add_argument("--world", default=worlds, metavar="N,...", help="ranks, %(default)s")
    made.add_argument("--contenders", default=",".join(contenders), help="of %(default)s")
    made.add_argument("--rounds", type=int, default=11, help="in which all take turns")
    made.add_argument("--seconds", type=float, default=0.4, help="of one contender in a round")
    made.add_argument("--memory", action="store_true", help="measure memory, not time")
    made.add_argument("--records", type=Path, default=ROOT / "benchmarks/results" / results)
    options = made.parse_args()
    chosen = options.contenders.split(",")
    models = options.models.split(",")
    if unknown := [name for name in models if name not in MODELS and not names_code(name)]:
        made.error(f"no model {', '.join(unknown)}; choose from {', '.join(MODELS)}")
    if ALONE not in chosen or not set(yardstick) & set(chosen):
        made.error(f"{ALONE} is subtracted, and {' or '.join(yardstick)} is what is compared with")
    facts = run_facts(
        {"": {"torch": torch.__version__}}, {"rounds": options.rounds, "seconds": options.seconds}
    )
    for model in models:
        for world in map(int, options.world.split(",")):
            if options.memory:
                lines = report_memory(model, world, chosen)
            else:
                times = spawn(measure, world, model, chosen, options.rounds, options.seconds)
                lines = report(model, world, of_slowest(times), yardstick, targets)
            keep(options.records, facts, lines)


if __name__ == "__main__":
    compare(__doc__ or "", CONTENDERS, ("torch", "torch 100"), TARGETS, "ddp_step.jsonl", "2,4")
