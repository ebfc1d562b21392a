"""What does other load on the machine do to training? `python -m benchmarks.neighbours`

Two ranks, alone on the machine and then beside busy loops, one per processor, which this program
starts and ends. dpcore and Gloo take turns in the same processes. A quiet turn and a loaded one of
each are next to each other, since the speed of a virtual machine changes within seconds:

    all-reduce    of ordinary tensors: dpcore's communicator, torch.distributed over Gloo
    DataParallel  a step with the default, beside torch DDP over Gloo
    FSDP2         a step with torch's fully_shard, over the backend "dpcore" and over Gloo
    computing     the ranks compute and say nothing to each other

    of Gloo        time over Gloo's in the same round. Target when loaded: at most 1.
    of fair share  loaded over quiet, over what that is for computing alone: what the load costs
                   beyond the machine's share. Target: at most 1.3.

Medians over rounds, of the slowest rank, with 95% intervals, or their range if there are fewer than
6 rounds.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from benchmarks.harness.figures import ends
from benchmarks.harness.neighbours import neighbours
from benchmarks.harness.options import script_parser
from dpcore.tools.compare.training.models import MODELS
from dpcore.tools.compare.training.ranks import (
    ALONE,
    DEFAULT,
    SETTLING_STEPS,
    TORCH,
    WARM_STEPS,
    beside_gloo,
    spawn,
    step_of,
    steps_in,
)
from dpcore.tools.ratios import Estimate, of_slowest_rank, paired
from dpcore.tools.records import ROOT, keep, run_facts
from dpcore.tools.sizes import parse_sizes, size_text

COMPUTING = "computing"
OURS, PEER = "dpcore", "Gloo"
OF_GLOO_AT_MOST = 1.0  # when loaded
OF_FAIR_SHARE_AT_MOST = 1.3

Key = tuple[str, str]  # what is done, and by whom
Calls = dict[Key, Callable[[], Any]]
Times = dict[str, list[float]]  # by "what/who/quiet" or ".../loaded"


def sharded_step(model_name: str, group: Any) -> Callable[[], None]:
    """A step of torch's FSDP2 over a group: every layer of the transformer by itself."""
    module, forward = MODELS[model_name]()
    mesh = DeviceMesh.from_group(group, "cpu")
    for part in module.modules():
        if isinstance(part, torch.nn.TransformerEncoderLayer):
            fully_shard(part, mesh=mesh)
    fully_shard(module, mesh=mesh)

    def step() -> None:
        module.zero_grad()
        forward(module).backward()

    return step


def calls(
    comm: Any, model: str, questions: Sequence[str], sizes: Sequence[int]
) -> dict[Key, Callable[[], Any]]:
    """What is measured, by what it is and who does it."""
    made: Calls = {(COMPUTING, COMPUTING): step_of(ALONE, model, comm)}
    if "all-reduce" in questions:
        for size in sizes:
            tensor = torch.zeros(size // 4)
            name = f"all-reduce {size_text(size)}"
            made[name, OURS] = lambda tensor=tensor: comm.all_reduce(tensor)
            made[name, PEER] = lambda tensor=tensor: dist.all_reduce(tensor)
    if "DataParallel" in questions:
        made["DataParallel", OURS] = step_of(DEFAULT, model, comm)
        made["DataParallel", PEER] = step_of(TORCH, model, comm)
    if "FSDP2" in questions:
        made["FSDP2", OURS] = sharded_step(model, dist.new_group(backend="dpcore"))
        made["FSDP2", PEER] = sharded_step(model, dist.group.WORLD)
    return made


@beside_gloo
def measure(
    comm: Any, model: str, questions: Sequence[str], sizes: Sequence[int], rounds: int,
    seconds: float, folder: str,
) -> Times:  # fmt: skip
    """On a rank: seconds of a call, round by round."""
    torch.set_num_threads(1)
    times: Times = {}
    with neighbours() if comm.rank == 0 else contextlib.nullcontext() as load:
        made = calls(comm, model, questions, sizes)
        counts = {}
        for key, call in made.items():
            for _ in range(SETTLING_STEPS if key == ("DataParallel", OURS) else WARM_STEPS):
                call()
            counts[key] = steps_in(seconds, call, comm)
        for number in range(rounds):
            for key in list(made)[:: -1 if number % 4 > 1 else 1]:
                for state in ("quiet", "loaded")[:: -1 if number % 2 else 1]:
                    if load is not None:
                        load.busy(state == "loaded")
                    taken = seconds_of(made[key], counts[key], comm)
                    times.setdefault("/".join((*key, state)), []).append(taken)
    return times


def seconds_of(call: Callable[[], Any], count: int, comm: Any) -> float:
    comm.barrier()
    for _ in range(1 + count // 4):  # the kernel finds a place for everything that now runs
        call()
    comm.barrier()
    begin = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - begin) / count


def records(of_ranks: Sequence[Times]) -> Iterator[dict[str, Any]]:
    """One per question and contender."""
    rounds = {name: of_slowest_rank(times[name] for times in of_ranks) for name in of_ranks[0]}
    share = slowdown(rounds, COMPUTING, COMPUTING)
    for name in rounds:
        what, who, state = name.rsplit("/", 2)
        if state != "quiet":
            continue
        quiet, loaded = rounds[name], rounds[f"{what}/{who}/loaded"]
        line = {"what": what, "contender": who, "world": len(of_ranks)}
        line |= {"quiet_s": statistics.median(quiet), "loaded_s": statistics.median(loaded)}
        line |= {"slowdown": asdict(paired(loaded, quiet))}
        line |= {"of_fair_share": asdict(paired(slowdown(rounds, what, who), share))}
        if who == OURS:
            for state, ours in (("quiet", quiet), ("loaded", loaded)):
                line[f"{state}_of_gloo"] = asdict(paired(ours, rounds[f"{what}/{PEER}/{state}"]))
        yield line | {"rounds_s": {"quiet": quiet, "loaded": loaded}}


def slowdown(rounds: Times, what: str, who: str) -> list[float]:
    """Loaded over quiet, round by round."""
    quiet, loaded = (rounds[f"{what}/{who}/{state}"] for state in ("quiet", "loaded"))
    return [slow / fast for slow, fast in zip(loaded, quiet, strict=True)]


def shown(ratio: dict[str, float] | None, at_most: float = float("inf")) -> str:
    """The median, and in brackets where it lies; a star where all of that misses the target."""
    if ratio is None:
        return ""
    made = Estimate(**ratio)
    mark = "*" if made.low > at_most else " "
    return f"{made.median:.2f} ({made.low:.2f}-{made.high:.2f}){mark}"


def table(lines: Sequence[dict[str, Any]]) -> str:
    text = [
        f"{'':22}{'':10}{'quiet ms':>9}{'loaded ms':>11}{'quiet of Gloo':>20}"
        f"{'loaded of Gloo':>20}{'of fair share':>20}"
    ]
    for line in lines:
        text.append(
            f"{line['what']:22}{line['contender']:10}{line['quiet_s'] * 1e3:>9.3f}"
            f"{line['loaded_s'] * 1e3:>11.3f}{shown(line.get('quiet_of_gloo')):>20}"
            f"{shown(line.get('loaded_of_gloo'), OF_GLOO_AT_MOST):>20}"
            f"{shown(line['of_fair_share'], OF_FAIR_SHARE_AT_MOST):>20}"
        )
    share = next(line for line in lines if line["what"] == COMPUTING)["slowdown"]["median"]
    text.append(f"computing alone takes {share:.2f} times as long when loaded; * misses the target")
    text.append(f"in brackets: {ends(lines)}")
    return "\n".join(text)


def main() -> int:
    made = script_parser(__doc__)
    add = made.add_argument
    add("--questions", default="all-reduce,DataParallel,FSDP2", help="of %(default)s")
    add("--sizes", type=parse_sizes, default=parse_sizes("4K,1M,16M"), help="4K,1M,16M")
    add("--model", choices=MODELS, default="transformer", help="that is trained")
    add("--rounds", type=int, default=40, help="each quiet and loaded (default: %(default)s)")
    add("--seconds", type=float, default=0.1, help="of one contender in a quiet round")
    add("--quick", action="store_true", help="3 short rounds")
    add("--records", type=Path, default=ROOT / "benchmarks/results/neighbours.jsonl")
    options = made.parse_args()
    if options.quick:
        options.rounds, options.seconds = 3, 0.05
    facts = run_facts(
        {"": {"torch": torch.__version__}},
        {"rounds": options.rounds, "seconds": options.seconds, "model": options.model},
    )
    questions = options.questions.split(",")
    asked = options.model, questions, options.sizes, options.rounds, options.seconds
    of_ranks = spawn(measure, 2, *asked)
    lines = list(records(of_ranks))
    print(table(lines), flush=True)
    keep(options.records, facts, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
