"""The ladder of data parallel training in one table. `python -m benchmarks.ladder`

From one all-reduce per parameter after backward to buckets that travel meanwhile, in plain Python
(dpcore/reference/ladder.py), then dpcore.DataParallel, then torch DDP: the time of a step, how many
all-reduces of how many bytes it makes, how long of it the computation stood still. On this machine,
and on links whose bandwidth and latency are emulated; there torch's reducer sends its buckets
through our communicator, since Gloo has no such link.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import dpcore as dp
from benchmarks.harness.options import script_parser
from dpcore.tools import argument_types as types
from dpcore.tools.compare.training.models import MODELS
from dpcore.tools.compare.training.ranks import (
    ALONE,
    STEPS_OF_THE_LADDER,
    TORCH,
    TORCH_OVER_OURS,
    WARM_STEPS,
    beside_gloo,
    measure,
    of_slowest,
    spawn,
    step_of,
)
from dpcore.tools.records import ROOT, keep, run_facts

BUCKETED = ("BucketedDDP", "dpcore bucketed", TORCH, TORCH_OVER_OURS)
OURS = (*STEPS_OF_THE_LADDER, "dpcore sequential", "dpcore bucketed")
MACHINE = "machine"  # no link in between

Figures = tuple[int, int, float]  # all-reduces, their bytes, exposed milliseconds


@beside_gloo
def counted(comm: Any, model: str, contenders: Sequence[str], folder: str) -> dict[str, Figures]:
    """On a rank: what one step of each contender does. What Gloo does is not in our traces."""
    figures = {}
    for name in contenders:
        step = step_of(name, model, comm)
        for _ in range(WARM_STEPS):
            step()
        comm.barrier()
        with dp.trace(comm=comm) as trace:
            step()
        made = trace.by_operation().get("all_reduce", {"count": 0, "bytes": 0})
        figures[name] = (made["count"], made["bytes"], trace.exposed_ms)
    return figures


def rung(name: str, seconds: Sequence[float], seen: Figures | None) -> dict[str, Any]:
    step = {"contender": name, "step_s": statistics.median(seconds), "rounds_s": list(seconds)}
    if seen is None:
        return step
    count, size, exposed = seen
    return step | {"all_reduces": count, "bytes": size, "exposed_ms": exposed}


def show(line: dict[str, Any]) -> None:
    row = f"{line['contender']:22}{line['step_s'] * 1e3:>10.2f}"
    if "bytes" in line:
        row += f"{line['all_reduces']:>13}{line['bytes'] / 2**20:>9.1f}{line['exposed_ms']:>12.2f}"
    else:
        row += f"{'-':>13}{'-':>9}{'-':>12}"
    print(row, flush=True)


def main() -> None:
    made = script_parser(__doc__)
    made.add_argument("--model", default="transformer", choices=list(MODELS))
    made.add_argument("--world", type=int, default=2)
    types.add(made, "--link", "none,1gbit,50us")
    made.add_argument("--bucket-mb", type=float, default=2.0, help="for all, MiB: %(default)s")
    made.add_argument("--rounds", type=int, default=7)
    made.add_argument("--seconds", type=float, default=0.3, help="of one contender in a round")
    made.add_argument("--records", type=Path, default=ROOT / "benchmarks/results/ladder.jsonl")
    options = made.parse_args()
    facts = run_facts(
        {"": {"torch": torch.__version__}}, {"rounds": options.rounds, "seconds": options.seconds}
    )
    for link in options.link:
        emulated = {"link": link} if link else {}
        place = link or MACHINE
        torch_ddp = TORCH_OVER_OURS if emulated else TORCH
        contenders = [
            f"{name} {options.bucket_mb:g}" if name in BUCKETED else name
            for name in (ALONE, *OURS, torch_ddp)
        ]
        watched = contenders[1:] if emulated else contenders[1:-1]
        rounds = (options.model, contenders, options.rounds, options.seconds)
        times = of_slowest(spawn(measure, options.world, *rounds, **emulated))
        figures = spawn(counted, options.world, options.model, watched, **emulated)[0]
        print(f"\n{options.model}, {options.world} ranks, {place}")
        print(f"{'':22}{'step ms':>10}{'all-reduces':>13}{'MiB':>9}{'exposed ms':>12}")
        lines = [rung(name, times[name], figures.get(name)) for name in contenders]
        for line in lines:
            show(line)
        cell = {"model": options.model, "world": options.world, "link": place}
        keep(options.records, facts, [cell | line for line in lines])


if __name__ == "__main__":
    main()
