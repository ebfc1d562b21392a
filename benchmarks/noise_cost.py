"""What does `dp.gradient_noise_scale` cost? `python -m benchmarks.noise_cost`

Steps of one and the same model within the block and outside of it, in turn: the share of a step
that measuring takes. A step is zero_grad, forward and backward, so an optimizer makes the share
smaller. The aim is below 1 % of a step.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import dpcore as dp
from dpcore.compare.collectives.options import script_parser
from dpcore.compare.ratios import of_slowest_rank, paired
from dpcore.compare.records import ROOT, keep, run_facts
from dpcore.compare.training.models import MODELS
from dpcore.compare.training.ranks import WARM_STEPS, steps_in

PLAIN, MEASURED = "plain", "measured"


def measure(comm: Any, model_name: str, rounds: int, seconds: float) -> dict[str, list[float]]:
    """On a rank: seconds per step, by round."""
    torch.set_num_threads(1)
    torch.manual_seed(comm.rank)
    module, forward = MODELS[model_name]()
    model = dp.DataParallel(module, comm=comm, schedule="bucketed")

    def step() -> None:
        module.zero_grad()
        torch.autograd.backward(forward(model))

    for _ in range(WARM_STEPS):
        step()
    with dp.gradient_noise_scale(model):
        step()
    count = steps_in(seconds, step, comm)
    times: dict[str, list[float]] = {PLAIN: [], MEASURED: []}
    for number in range(rounds):
        for name in sorted(times, reverse=number % 2 == 0):
            comm.barrier()
            begin = time.perf_counter()
            is_measured = name == MEASURED
            with dp.gradient_noise_scale(model) if is_measured else contextlib.nullcontext():
                for _ in range(count):
                    step()
            times[name].append((time.perf_counter() - begin) / count)
    return times


def cost(model: str, world: int, rounds: int, seconds: float) -> dict[str, Any]:
    of_ranks = dp.spawn(measure, world, model, rounds, seconds, timeout=300)
    times = {name: of_slowest_rank(one[name] for one in of_ranks) for name in (PLAIN, MEASURED)}
    return {
        "model": model,
        "world": world,
        "step_s": statistics.median(times[PLAIN]),
        "ratio": asdict(paired(times[MEASURED], times[PLAIN])),
        "rounds_s": times,
    }


def main() -> None:
    made = script_parser(__doc__)
    made.add_argument("--models", default="mlp,transformer", help="default: %(default)s")
    made.add_argument("--world", type=int, default=2, help="ranks (default: %(default)s)")
    made.add_argument("--rounds", type=int, default=41, help="default: %(default)s")
    made.add_argument("--seconds", type=float, default=0.3, help="of a turn (default: %(default)s)")
    made.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/noise_cost.jsonl")
    options = made.parse_args()
    if unknown := [name for name in options.models.split(",") if name not in MODELS]:
        made.error(f"no model {', '.join(unknown)}; choose of {', '.join(MODELS)}")
    if options.world < 2:
        made.error("a world of one has one gradient in a step: --world 2 or more")
    facts = run_facts(
        {"": {"torch": torch.__version__}}, {"rounds": options.rounds, "seconds": options.seconds}
    )
    print(f"{'':14}{'step ms':>10}{'cost':>9}{'95%':>18}")
    for model in options.models.split(","):
        line = cost(model, options.world, options.rounds, options.seconds)
        ratio = line["ratio"]
        interval = f"{ratio['low'] - 1:.2%} to {ratio['high'] - 1:.2%}"
        print(
            f"{model:14}{line['step_s'] * 1e3:>10.2f}{ratio['median'] - 1:>9.2%}{interval:>18}",
            flush=True,
        )
        keep(options.json, facts, [line])


if __name__ == "__main__":
    main()
