"""What does `dp.gradient_noise_scale` cost? `python -m benchmarks.noise_cost`

Ten steps of one and the same model without it, with it in each step, and with it in one step of
ten, which is the default, in turn. The cost is the processor time that it adds, as a share of a
step: other work on the machine makes steps longer and shorter by more than what is looked for here.
A step is zero_grad, forward and backward, so an optimizer makes the share smaller.

The bound is the time to read all gradients twice, on all ranks at once, and nothing else.
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
from benchmarks.harness.options import script_parser
from dpcore.tools.compare.training.models import MODELS
from dpcore.tools.compare.training.ranks import WARM_STEPS
from dpcore.tools.ratios import ends_of, estimate, in_turn, of_slowest_rank
from dpcore.tools.records import ROOT, keep, run_facts

PLAIN, BOUND = "without", "two reads"
CONTENDERS = {PLAIN: 0, "every step": 1, "one of ten": 10}
STEPS = 10  # of a turn


def measure(comm: Any, model_name: str, rounds: int) -> dict[str, dict[str, list[float]]]:
    """On a rank: seconds per step and of them on processors, by contender and round. The bound is
    one of them."""
    torch.set_num_threads(1)
    torch.manual_seed(comm.rank)
    module, forward = MODELS[model_name]()
    model = dp.DataParallel(module, comm=comm, schedule="bucketed")

    def turn(every: int, steps: int) -> tuple[float, float]:
        comm.barrier()
        begin, used = time.perf_counter(), time.process_time()
        with dp.gradient_noise_scale(model, every=every) if every else contextlib.nullcontext():
            for _ in range(steps):
                module.zero_grad()
                torch.autograd.backward(forward(model))
        return (time.perf_counter() - begin) / steps, (time.process_time() - used) / steps

    turn(0, WARM_STEPS)
    turn(1, 1)
    found: dict[str, dict[str, list[float]]] = {
        name: {"wall": [], "cpu": []} for name in (*CONTENDERS, BOUND)
    }
    for number in range(rounds):
        for name in in_turn(list(CONTENDERS), number):
            wall, cpu = turn(CONTENDERS[name], STEPS)
            found[name]["wall"].append(wall)
            found[name]["cpu"].append(cpu)
        wall, cpu = two_reads(comm, module)
        found[BOUND]["wall"].append(wall)
        found[BOUND]["cpu"].append(cpu)
    return found


def two_reads(comm: Any, module: torch.nn.Module) -> tuple[float, float]:
    """Seconds, and of them on processors, of reading all gradients twice."""
    flat = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
    comm.barrier()
    begin, used = time.perf_counter(), time.process_time()
    for _ in range(2):
        torch.dot(flat, flat)
    return time.perf_counter() - begin, time.process_time() - used


def cost(model: str, world: int, rounds: int) -> dict[str, Any]:
    return costs_of(dp.spawn(measure, world, model, rounds, timeout=300), model)


def costs_of(of_ranks: list[dict[str, dict[str, list[float]]]], model: str) -> dict[str, Any]:
    """From the rounds of all ranks. Those of one round are one value, their mean: they see the same
    moment of the machine."""
    processors = {
        name: list(map(statistics.mean, zip(*(one[name]["cpu"] for one in of_ranks), strict=True)))
        for name in of_ranks[0]
    }
    step = statistics.median(of_slowest_rank(one[PLAIN]["wall"] for one in of_ranks))
    costs = {}
    for name in list(CONTENDERS)[1:]:
        added = [
            (mine - plain) / step
            for mine, plain in zip(processors[name], processors[PLAIN], strict=True)
        ]
        costs[name] = asdict(estimate(added))
    bound = statistics.median(processors[BOUND]) / step
    found = {"model": model, "world": len(of_ranks), "step_s": step, "bound": bound}
    return {**found, "costs": costs, "ranks": of_ranks}


def main() -> None:
    made = script_parser(__doc__)
    made.add_argument("--models", default="mlp,transformer", help="default: %(default)s")
    made.add_argument("--world", type=int, default=2, help="ranks (default: %(default)s)")
    made.add_argument("--rounds", type=int, default=9, help="default: %(default)s")
    made.add_argument("--records", type=Path, default=ROOT / "benchmarks/results/noise_cost.jsonl")
    options = made.parse_args()
    if unknown := [name for name in options.models.split(",") if name not in MODELS]:
        made.error(f"no model {', '.join(unknown)}; choose from {', '.join(MODELS)}")
    if options.world < 2:
        made.error("a world of one has one gradient in a step: --world 2 or more")
    facts = run_facts({"": {"torch": torch.__version__}}, {"rounds": options.rounds})
    print(f"{'':14}{'step ms':>10}{'':4}{'measured in':14}{'cost':>8}{ends_of(options.rounds):>19}")
    for model in options.models.split(","):
        line = cost(model, options.world, options.rounds)
        for name, of in line["costs"].items():
            print(
                f"{model:14}{line['step_s'] * 1e3:>10.2f}{'':4}{name:14}{of['median']:>8.2%}"
                f"{of['low']:>10.2%} to {of['high']:.2%}",
                flush=True,
            )
        print(f"{'':28}{BOUND:14}{line['bound']:>8.2%}", flush=True)
        keep(options.records, facts, [line])


if __name__ == "__main__":
    main()
