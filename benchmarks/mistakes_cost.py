"""What does it cost to look for mistakes? `python -m benchmarks.mistakes_cost`

The calls that a step makes for it, timed alone in a loop: the word, the digest of parameters and
the looks before and after an optimizer's step. Beside them whole steps with mistakes="warn" and
with "ignore", in turn. A processor has slow minutes, so the loops are spread over all rounds. The
aim: 100 us in a step at most, 7 us for the model of many small tensors.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

import dpcore as dp
from benchmarks.harness.cost_of_step import command
from dpcore.ddp.mistakes import local_notes, not_finite
from dpcore.tools.compare.training.models import MODELS
from dpcore.tools.compare.training.ranks import SETTLING_STEPS, spawn, steps_in
from dpcore.tools.ratios import in_turn, of_slowest_rank

LOOPS = 20  # in a round, of so many calls; the fastest counts, and short ones are seldom disturbed
CALLS = 200


class Trained:
    """A wrapped model with an optimizer, and its steps."""

    def __init__(self, name: str, comm: Any, mistakes: str) -> None:
        module, self.forward = MODELS[name]()
        self.model = dp.DataParallel(module, comm=comm, mistakes=mistakes)
        self.optimizer = torch.optim.SGD(module.parameters(), lr=1e-6)

    def step(self) -> None:
        self.optimizer.zero_grad()
        torch.autograd.backward(self.forward(self.model))
        self.optimizer.step()

    def seconds_of_calls(self) -> float:
        """What one step calls to look for mistakes, without the step."""
        model, optimizer, observer = self.model, self.optimizer, self.model._observer
        sample = (torch.ones(8, 8),)
        taken = []
        for _ in range(LOOPS):
            begin = time.perf_counter()
            for _ in range(CALLS):
                observer.before_forward()
                observer.after_forward(sample, {})
                not_finite.check(model, optimizer)
                observer.before_step(optimizer)
                local_notes.before_step(optimizer, [model], list)
                observer.after_step(optimizer)
            taken.append((time.perf_counter() - begin) / CALLS)
        return min(taken)


def measured(comm: Any, name: str, rounds: int, seconds: float, folder: str) -> dict[str, Any]:
    """On a rank: seconds per step without and with, and of the calls."""
    contenders = {"without": Trained(name, comm, "ignore"), "with": Trained(name, comm, "warn")}
    called = Trained(name, comm, "warn")  # takes no steps of its own after these
    for trained in (*contenders.values(), called):
        for _ in range(SETTLING_STEPS):
            trained.step()
    count = steps_in(seconds, contenders["without"].step, comm)
    found: dict[str, Any] = {"without": [], "with": [], "calls": []}
    for number in range(rounds):
        for contender in in_turn(("without", "with"), number):
            comm.barrier()
            begin = time.perf_counter()
            for _ in range(count):
                contenders[contender].step()
            found[contender].append((time.perf_counter() - begin) / count)
        comm.barrier()
        found["calls"].append(called.seconds_of_calls())
    comm.barrier()
    return found


def cost(name: str, world: int, rounds: int, seconds: float) -> dict[str, Any]:
    ranks = spawn(measured, world, name, rounds, seconds)
    times = {key: of_slowest_rank(rank[key] for rank in ranks) for key in ranks[0]}
    pairs = zip(times["with"], times["without"], strict=True)
    return {
        "model": name,
        "world": world,
        "step_s": statistics.median(times["without"]),
        "calls_s": max(min(rank["calls"]) for rank in ranks),
        "ratio_of_steps": statistics.median(own / plain for own, plain in pairs),
        "rounds_s": times,
    }


def row(line: dict[str, Any]) -> str:
    return (
        f"{line['step_s'] * 1e3:>10.2f}{line['calls_s'] * 1e6:>10.2f}"
        f"{line['ratio_of_steps']:>16.3f}"
    )


if __name__ == "__main__":
    command(
        __doc__,
        "mistakes_cost",
        cost,
        f"{'step ms':>10}{'calls us':>10}{'with / without':>16}",
        row,
    )
