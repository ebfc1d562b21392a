"""What does a line while training cost? `python -m benchmarks.monitor_cost`

Steps of data parallel training with `dpcore.monitor` and without, in turn, and the time that its
own calls take in a step. The aim is below 0.5 % of a step.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

import dpcore as dp
from benchmarks.harness.cost_of_step import command
from dpcore.tools.compare.training.models import MODELS
from dpcore.tools.compare.training.ranks import SETTLING_STEPS, spawn, steps_in
from dpcore.tools.ratios import in_turn, of_slowest_rank

LINES_EVERY = 50  # steps, the default


def measured(comm: Any, name: str, rounds: int, seconds: float, folder: str) -> dict[str, Any]:
    """On a rank: seconds per step without and with a monitor, and in its calls."""
    module, forward = MODELS[name]()
    model = dp.DataParallel(module, comm=comm)

    def step() -> None:
        model.zero_grad()
        torch.autograd.backward(forward(model))

    def steps() -> float:
        comm.barrier()
        begin = time.perf_counter()
        for _ in range(count):
            step()
        return (time.perf_counter() - begin) / count

    for _ in range(SETTLING_STEPS):
        step()
    count = max(LINES_EVERY + 1, steps_in(seconds, step, comm))
    found: dict[str, Any] = {"without": [], "with": [], "in_calls": []}
    for number in range(rounds):
        for contender in in_turn(("without", "with"), number):
            if contender == "without":
                found["without"].append(steps())
                continue
            with dp.monitor(model, LINES_EVERY, to=None) as monitor:
                in_calls = timed(monitor, model)
                found["with"].append(steps())
                found["in_calls"].append(sum(in_calls) / count)
    return found


def timed(monitor: Any, model: Any) -> list[float]:
    """Seconds of each call, from now on."""
    taken: list[float] = []
    call = monitor._before_forward
    monitor._hook.remove()

    def around(*arguments: Any) -> None:
        begin = time.perf_counter()
        call(*arguments)
        taken.append(time.perf_counter() - begin)

    monitor._hook = model.register_forward_pre_hook(around)
    return taken


def cost(name: str, world: int, rounds: int, seconds: float) -> dict[str, Any]:
    ranks = spawn(measured, world, name, rounds, seconds)
    times = {key: of_slowest_rank(rank[key] for rank in ranks) for key in ranks[0]}
    step = statistics.median(times["without"])
    pairs = zip(times["with"], times["without"], strict=True)
    return {
        "model": name,
        "world": world,
        "step_s": step,
        "cost_of_step": statistics.median(own - plain for own, plain in pairs) / step,
        "cost_of_calls": statistics.median(times["in_calls"]) / step,
        "rounds_s": times,
    }


def row(line: dict[str, Any]) -> str:
    return (
        f"{line['step_s'] * 1e3:>10.2f}{line['cost_of_step']:>10.2%}{line['cost_of_calls']:>11.3%}"
    )


if __name__ == "__main__":
    command(__doc__, "monitor_cost", cost, f"{'step ms':>10}{'by turns':>10}{'its calls':>11}", row)
