"""Does the simulator say what a run takes? `python -m benchmarks.simulated`

Two ranks over emulated links, every schedule of launches, steps in turn. The simulator is told the
times at which gradients got ready in the run of `sequential`, where nothing runs beside backward,
and predicts all others.

    pauses       layers that sleep in backward: nothing but the links takes time
    transformer  a real model: what communication costs processors is on top of the prediction
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dpcore as dp
from benchmarks.harness.options import script_parser
from dpcore.base.link import parse_speed
from dpcore.tools import argument_types as types
from dpcore.tools.compare.training.models import MODELS
from dpcore.tools.ratios import in_turn, of_slowest_rank
from dpcore.tools.records import ROOT, keep, run_facts
from dpcore.tools.simulate import gradients_of, predict

SCHEDULES = ("sequential", "bucketed", "per_parameter", "flat")
CAP_MB = 1.0


class Pause(torch.autograd.Function):
    """Takes its time in backward, and no processor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return grads[0], None


class Pauses(nn.Module):
    """Layers of `mib` MiB, with a pause of `seconds` in front of each one's gradient."""

    def __init__(self, layers: int = 6, mib: float = 0.75, seconds: float = 0.01) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(256, int(mib * 1024), bias=False) for _ in range(layers)
        )
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = Pause.apply(layer(x)[:, :256], self.seconds)
        return x


def make(model: str) -> tuple[nn.Module, Any]:
    if model == "pauses":
        x = torch.randn(1, 256)
        return Pauses(), lambda wrapped: wrapped(x).square().sum()
    return MODELS[model]()


def measure(comm: Any, model: str, schedules: tuple[str, ...], steps: int, folder: str) -> Any:
    """Seconds of the steps, by schedule; a trace of `sequential` is written into the folder."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    times: dict[str, list[float]] = {name: [] for name in schedules}
    runs = {}
    for name in schedules:
        module, forward = make(model)
        wrapped = dp.DataParallel(module, comm=comm, schedule=name, bucket_cap_mb=CAP_MB)
        runs[name] = (module, wrapped, forward)
    for number in range(-2, steps):  # the first two build and rebuild buckets
        for name in in_turn(schedules, number):
            module, wrapped, forward = runs[name]
            module.zero_grad()
            comm.barrier()
            begin = time.perf_counter()
            forward(wrapped).backward()
            if number >= 0:
                times[name].append(time.perf_counter() - begin)
    # Other models of this process would be in the trace as well.
    module, wrapped, forward = runs["sequential"]
    del runs
    with dp.trace(Path(folder) / "sequential.json", comm=comm):
        for _ in range(steps):
            module.zero_grad()
            comm.barrier()
            forward(wrapped).backward()
    return times


def compare(model: str, link: str, schedules: tuple[str, ...], steps: int) -> list[dict[str, Any]]:
    """A record per schedule: predicted and measured milliseconds of a step."""
    with tempfile.TemporaryDirectory() as folder:
        measured = dp.spawn(
            measure, 2, model, schedules, steps, folder, link=link, mode="threads", timeout=120
        )
        work = gradients_of(Path(folder) / "sequential.json")
    lines = []
    for name in schedules:
        predicted = predict(work, parse_speed(link), name, CAP_MB)
        of_slowest = [seconds * 1e3 for seconds in of_slowest_rank(t[name] for t in measured)]
        line = {"model": model, "link": link, "schedule": name, "world": 2}
        line |= {"predicted_ms": predicted.step_ms, "bound_ms": predicted.bound_ms}
        line |= {"measured_ms": statistics.median(of_slowest), "least_ms": min(of_slowest)}
        lines.append(line)
    return lines


def main() -> None:
    made = script_parser(__doc__)
    made.add_argument("--models", default="pauses,transformer", help="of %(default)s")
    types.add(made, "--link", "100mbit,100us,1gbit,50us,10gbit,20us")
    made.add_argument("--steps", type=int, default=7)
    made.add_argument("--records", type=Path, default=ROOT / "benchmarks/results/simulated.jsonl")
    options = made.parse_args()
    facts = run_facts({"": {"torch": torch.__version__}}, {"steps": options.steps, "cap": CAP_MB})
    print(f"{'model':14}{'link':18}{'schedule':16}{'predicted':>11}{'measured':>11}{'ratio':>8}")
    for model in options.models.split(","):
        for link in options.link:
            lines = compare(model, link, SCHEDULES, options.steps)
            for line in lines:
                ratio = line["measured_ms"] / line["predicted_ms"]
                print(
                    f"{model:14}{line['link']:18}{line['schedule']:16}{line['predicted_ms']:>11.1f}"
                    f"{line['measured_ms']:>11.1f}{ratio:>8.2f}",
                    flush=True,
                )
            keep(options.records, facts, lines)


if __name__ == "__main__":
    main()
