"""The ladder of data parallel training in one table. `python -m benchmarks.ladder`

From one all-reduce per parameter after backward to buckets that travel meanwhile, in plain Python
(dpcore/reference/ladder.py), then dpcore.DataParallel, then torch DDP over Gloo: the time of a
step, how many all-reduces of how many bytes it makes, how long of it the computation stood still.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import dpcore as dp
from benchmarks.training.models import MODELS
from benchmarks.training.ranks import (
    ALONE,
    STEPS_OF_THE_LADDER,
    WARM_STEPS,
    gloo,
    measure,
    of_slowest,
    spawn,
    step_of,
)

CONTENDERS = (ALONE, *STEPS_OF_THE_LADDER, "dpcore sequential", "dpcore bucketed", "torch")


def counted(comm: Any, model: str, contenders: list[str], folder: str) -> dict[str, Any]:
    """On a rank: all-reduces, their bytes, and exposed milliseconds of one step."""
    figures = {}
    with gloo(comm, folder):
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


def main() -> None:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--model", default="transformer", choices=list(MODELS))
    made.add_argument("--world", type=int, default=2)
    made.add_argument("--rounds", type=int, default=7)
    made.add_argument("--seconds", type=float, default=0.3, help="of one contender in a round")
    options = made.parse_args()
    contenders = list(CONTENDERS)
    times = of_slowest(
        spawn(measure, options.world, options.model, contenders, options.rounds, options.seconds)
    )
    figures = spawn(counted, options.world, options.model, contenders)[0]
    print(f"{options.model}, {options.world} ranks")
    print(f"{'':20}{'step ms':>10}{'all-reduces':>13}{'MiB':>9}{'exposed ms':>12}")
    for name in contenders:
        count, size, exposed = figures[name]
        row = f"{name:20}{statistics.median(times[name]) * 1e3:>10.2f}"
        if name == "torch":  # what Gloo does is not in our traces
            row += f"{'-':>13}{'-':>9}{'-':>12}"
        elif name != ALONE:
            row += f"{count:>13}{size / 2**20:>9.1f}{exposed:>12.2f}"
        print(row)


if __name__ == "__main__":
    main()
