"""Does the simulator say what a run takes? `python -m benchmarks.simulated`

Each *column* is a model on some ranks over a network, and each of its *cells* a way to train it
there. All cells of a column take turns in the same processes with `oracle`, which communicates
nothing. What the simulator is told comes from `oracle` alone: a trace of some of its steps, and how
long its steps took in the same minutes; of torch DDP it is told what torch's profiler wrote of its
own steps, and how busy `oracle` kept a core, which no profiler writes. What communication costs
processors comes from `dpcore calibrate`, at the begin of the script. It then predicts all cells.

    host             ranks of this machine, over mapped memory
    1gbit,50us       ranks of this machine, over a link that dpcore emulates
    shaped 1gbit     a network namespace for each rank, whose card the kernel shapes; real TCP

Layers that sleep take no processor, so that two cores hold eight ranks; the other models compute.
A step is zero_grad, forward, backward and an AdamW step, of the slowest rank. A cell counts if two
halves of its run, each divided by its own `oracle`, differ by at most 2%: a prediction can't be
held to a figure that does not hold itself. COLUMNS lists all cells, in harness/simulated_cells.py.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

import dpcore as dp
from benchmarks.across_steps import ORACLE, Contender, taking_turns
from benchmarks.harness.options import script_parser
from benchmarks.harness.shaped import on_hosts
from benchmarks.harness.simulated_cells import COLUMNS, LOCAL, TORCH, Column, judged
from dpcore.base.link import parse_speed
from dpcore.tools import hosts as namespaces
from dpcore.tools.compare.training.ranks import beside_gloo
from dpcore.tools.ratios import of_slowest_rank
from dpcore.tools.records import ROOT, keep, run_facts
from dpcore.tools.simulate import gradients_of
from dpcore.tools.simulate.processors import calibrated

TRACED_STEPS = 8
OF_TORCH = ".pt.trace.json"


class Local(Contender):
    """Trains alone and averages parameters every few steps."""

    def __init__(self, name: str, model: str, comm: Any) -> None:
        super().__init__(ORACLE, model, comm)
        self.name = name
        every = int(name.rpartition(" ")[2])
        self.averaging = dp.LocalSGD(self.model.module, self.optimizer, every, comm=comm)
        self.averaging.__enter__()


def contender(name: str, model: str, comm: Any) -> Contender:
    return (Local if name == LOCAL else Contender)(name, model, comm)


@beside_gloo
def measure(
    comm: Any, model: str, contenders: Sequence[str], rounds: int, steps: int, folder: str
) -> dict[str, Any]:
    """On a rank: seconds per step, by contender and round, and of the optimizer's part. A trace of
    `oracle` is written into the folder, and a profile of torch DDP if it takes part."""
    torch.set_num_threads(1)
    made = [contender(name, model, comm) for name in contenders]
    times = taking_turns(made, comm, rounds, steps)
    oracle = next(one for one in made if one.name == ORACLE)
    for one in made:
        if isinstance(one, Local):
            one.averaging.__exit__(None, None, None)
        if one.name == TORCH:
            profile(one, comm, Path(folder))
    del made, one  # they would be in the trace as well
    updates = []
    with dp.trace(Path(folder) / "oracle.json", comm=comm):
        for _ in range(TRACED_STEPS):
            comm.barrier()
            oracle.optimizer.zero_grad()
            torch.autograd.backward(oracle.run(oracle.model))
            begin = time.perf_counter()
            oracle.optimizer.step()
            updates.append(time.perf_counter() - begin)
    comm.barrier()
    return {"times": times, "update_s": statistics.median(updates)}


def profile(torch_ddp: Contender, comm: Any, folder: Path) -> None:
    """As docs/show.md says it, in a file for each rank."""
    cpu = [torch.profiler.ProfilerActivity.CPU]
    comm.barrier()
    with torch.profiler.profile(activities=cpu, record_shapes=True) as profiler:
        for _ in range(TRACED_STEPS):
            torch_ddp.step()
            profiler.step()
    profiler.export_chrome_trace(str(folder / f"rank{comm.rank}{OF_TORCH}"))


def run(column: Column, rounds: int, steps: int) -> dict[str, Any]:
    """Measures a column: its record."""
    with tempfile.TemporaryDirectory(prefix="dpcore-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that oracle averages nothing
        asked = {
            "model": column.model, "contenders": [ORACLE, *column.contenders], "rounds": rounds,
            "steps": steps, "folder": folder,
        }  # fmt: skip
        goodput: float | None = None
        if rate := column.shaped_rate:
            bandwidth = parse_speed(rate).bytes_per_second
            found, goodput = on_hosts(measure, column.world, rate, bandwidth, **asked)
        else:
            link = {} if column.is_host else {"link": column.place}
            found = dp.spawn(measure, column.world, *asked.values(), timeout=600, **link)
        works = {"work": gradients_of(Path(folder) / "oracle.json")}
        if profiles := sorted(Path(folder).glob(f"*{OF_TORCH}")):
            works["torch_work"] = gradients_of(*profiles)
    slowest = {
        name: of_slowest_rank(one["times"][name] for one in found) for name in found[0]["times"]
    }
    return {
        "place": column.place,
        "world": column.world,
        "model": column.model,
        "goodput_bytes_per_s": goodput,
        **{name: asdict(replace(work, spread=())) for name, work in works.items()},
        "update_s": [one["update_s"] for one in found],
        "rounds_s": slowest,
    }


def calibration() -> dict[str, Any]:
    """What `dpcore calibrate` finds; the engine, which goes by its defaults, is not told."""
    with tempfile.TemporaryDirectory(prefix="dpcore-") as folder:
        file = Path(folder) / "calibration.json"
        command = [sys.executable, "-m", "dpcore", "calibrate", "--file", str(file)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found = asdict(calibrated(file).processors)
    del found["costs"]
    return found


def chosen(options: argparse.Namespace) -> list[Column]:
    def is_wanted(column: Column) -> bool:
        asked = (options.places, options.models, options.worlds)
        has = (column.place, column.model, str(column.world))
        return all(not wish or one in wish.split(";") for wish, one in zip(asked, has, strict=True))

    return [column for column in COLUMNS if is_wanted(column)]


def main() -> int:
    made = script_parser(__doc__)
    made.add_argument("--places", default="", help="of the columns, with ; between (default: all)")
    made.add_argument("--models", default="", help="the same of models")
    made.add_argument("--worlds", default="", help="the same of numbers of ranks")
    made.add_argument("--rounds", type=int, default=8, help="in which all take turns")
    made.add_argument(
        "--steps-per-round", type=int, default=4, help="of a turn, after one more: a multiple of 4"
    )
    made.add_argument("--records", type=Path, default=ROOT / "benchmarks/results/simulated.jsonl")
    options = made.parse_args()
    if options.steps_per_round % 4:
        made.error("--steps-per-round: a multiple of 4, after which local updates average")
    columns = chosen(options)
    if any(column.shaped_rate for column in columns) and (reason := namespaces.why_not()):
        print(f"simulated: {reason}", file=sys.stderr)
        return 1
    facts = run_facts(
        {"": {"torch": torch.__version__}},
        {"rounds": options.rounds, "steps": options.steps_per_round},
    )
    processors = calibration()
    for column in columns:
        record = {"processors": processors} | run(column, options.rounds, options.steps_per_round)
        keep(options.records, facts, [record])
        print(f"{column.place}, {column.world} ranks, {column.model}")
        for cell in judged(record):
            print(f"  {cell}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
