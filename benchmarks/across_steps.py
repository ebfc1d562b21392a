"""What is won when communication goes on under the next forward?

    python -m benchmarks.across_steps

Two network namespaces with shaped cards, as in `benchmarks.shaped_link`, or "host": two ranks of
this machine. Everybody trains a model of the same kind with AdamW, in turns of some steps:

    dpcore oracle    no communication: what computing takes
    dpcore ...       bucketed, and the schedules across steps, with buckets of 1 MiB, or one of
                     your own, such as "dpcore examples/slices.py:P3"
    torch N          torch DDP over Gloo with buckets of N MiB
    torch zero N     the same, with torch's ZeroRedundancyOptimizer
    torch fsdp       torch's fully_shard of each layer and the rest, over Gloo
    torch/dpcore ... torch's over our backend; "zero overlap N", the ZeroRedundancyOptimizer that
                     updates under backward, runs over no other: Gloo refuses it

A step is zero_grad, forward, backward and step, of the slowest rank. The first of a turn is left
out and no barrier stands between the others, so that the next one pays for what a step leaves in
flight.

    bound = max(computing, all bytes + forward and backward of the module that is needed last)
            + all bytes of the module that is needed first

where bytes go at the goodput of a raw TCP stream in the same run. The network has nothing to do
while the module that is needed last computes; and what the first one needs has gradients when
backward is over, so nothing can hide it. Both are seen in a step without communication.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import dpcore as dp
from benchmarks.harness.figures import ends
from benchmarks.harness.options import script_parser
from benchmarks.harness.shaped import on_hosts
from benchmarks.harness.sleeping import SLEEPING
from benchmarks.harness.torch_strategies import zero_optimizer
from dpcore.base.link import parse_speed
from dpcore.ddp.wrapper.launch_schedule import ACROSS_STEPS
from dpcore.ddp.wrapper.needs import Needs
from dpcore.tools import hosts as namespaces
from dpcore.tools.compare.training.bare import on_gradient
from dpcore.tools.compare.training.models import MODELS
from dpcore.tools.compare.training.ranks import (
    OVER_DPCORE,
    beside_gloo,
    goes_across_steps,
    wrapped,
)
from dpcore.tools.ratios import in_turn, of_slowest_rank, paired
from dpcore.tools.records import ROOT, keep, run_facts

HOST = "host"
ORACLE, BUCKETED = "dpcore oracle", "dpcore bucketed 1"
LATE = tuple(f"dpcore {name}" for name in ACROSS_STEPS)
CONTENDERS = (
    *(ORACLE, BUCKETED, *LATE, "torch 1", "torch 4", "torch 25", "torch zero 1", "torch fsdp"),
    *("torch/dpcore zero overlap 1", "torch/dpcore fsdp"),
)
WARM_STEPS = 4


class Contender:
    """A model of its own, its wrapper and its optimizer."""

    def __init__(self, name: str, model: str, comm: Any) -> None:
        self.name = name
        torch.manual_seed(0)
        self.module, self.run = (SLEEPING | MODELS)[model]()
        self.model: Any = self.module
        self.steps_in_backward = "zero overlap" in name
        if name.endswith("fsdp"):
            shard_layers(self.module, group_of(name))
            self.optimizer = adam(self.module)
        elif " zero " in name:
            ddp = name.replace(" overlap", "").replace(" zero", "")
            self.model = wrapped(ddp, self.module, comm)
            overlaps = self.steps_in_backward
            self.optimizer = zero_optimizer(self.model, torch.optim.AdamW, overlaps, lr=1e-4)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that oracle averages nothing
                self.model = wrapped(name, self.module, comm)
            self.optimizer = adam(self.module)
            if goes_across_steps(name):
                self.optimizer = dp.DistributedOptimizer(self.optimizer, self.model)

    def step(self) -> None:
        self.optimizer.zero_grad()
        torch.autograd.backward(self.run(self.model))
        if not self.steps_in_backward:
            self.optimizer.step()

    def end_turn(self) -> None:
        """Nothing stays in flight."""
        if isinstance(self.model, dp.DataParallel):
            self.model.flush()

    def state_bytes(self) -> int:
        """Of the optimizer, on this rank."""
        inner = getattr(self.optimizer, "optim", self.optimizer)
        held = [value for state in inner.state.values() for value in state.values()]
        return bytes_of([t for t in map(part_here, held) if isinstance(t, torch.Tensor)])


def adam(module: nn.Module) -> Any:
    return torch.optim.AdamW(module.parameters(), lr=1e-4)


def group_of(name: str) -> Any:
    """torch's: Gloo's is there, one of ours is made."""
    return dist.new_group(backend="dpcore") if name.startswith(OVER_DPCORE) else dist.group.WORLD


def shard_layers(module: nn.Module, group: Any) -> None:
    """Shards each layer of the model's list of layers, then what is left of the model."""
    mesh = DeviceMesh.from_group(group, "cpu")
    lists = (m for m in module.modules() if isinstance(m, (nn.ModuleList, nn.Sequential)))
    for layer in next(lists, ()):
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)


def part_here(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def seen_alone(model: str) -> dict[str, Any]:
    """On a rank, of a model that is not wrapped: what the bound is made of."""
    torch.manual_seed(0)
    module, run = (SLEEPING | MODELS)[model]()
    parameters = list(module.parameters())
    needs = Needs(module, parameters)
    needs.watch(lambda: run(module))
    first, last = needs.modules[0], needs.modules[-1]
    came: dict[str, float] = {}
    hooks: list[Any] = [
        last[0].register_forward_pre_hook(lambda *_: came.update(begin=time.perf_counter()))
    ]
    hooks += [
        on_gradient(parameters[number], lambda _: came.update(end=time.perf_counter()))
        for number in last[1]
    ]
    taken = []
    for _ in range(7):
        module.zero_grad()
        torch.autograd.backward(run(module))
        taken.append(came["end"] - came["begin"])
    for hook in hooks:
        hook.remove()
    names = {part: name for name, part in module.named_modules()}
    return {
        "bytes": bytes_of(parameters),
        "first_bytes": bytes_of([parameters[number] for number in first[1]]),
        "first_module": names[first[0]],
        "last_s": statistics.median(taken),
        "last_module": names[last[0]],
    }


def bytes_of(parameters: Sequence[torch.Tensor]) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


@beside_gloo
def measure(
    comm: Any, model: str, contenders: Sequence[str], rounds: int, steps: int, folder: str
) -> dict[str, Any]:
    """On a rank: seconds per step, by contender and round."""
    torch.set_num_threads(1)
    alone = seen_alone(model)
    made = [Contender(name, model, comm) for name in contenders]
    times = taking_turns(made, comm, rounds, steps)
    states = {contender.name: contender.state_bytes() for contender in made}
    comm.barrier()
    return {"times": times, "states": states, "alone": alone}


def taking_turns(
    made: Sequence[Contender], comm: Any, rounds: int, steps: int
) -> dict[str, list[float]]:
    """Seconds per step, by contender and round."""
    for contender in made:
        turn(contender, comm, WARM_STEPS)
    times: dict[str, list[float]] = {contender.name: [] for contender in made}
    for number in range(rounds):
        for contender in in_turn(made, number):
            times[contender.name].append(turn(contender, comm, steps))
    return times


def turn(contender: Contender, comm: Any, steps: int) -> float:
    """Seconds per step."""
    comm.barrier()
    contender.step()
    begin = time.perf_counter()
    for _ in range(steps):
        contender.step()
    taken = (time.perf_counter() - begin) / steps
    contender.end_turn()
    return taken


def bound_of(result: Sequence[dict[str, Any]], goodput: float | None) -> dict[str, Any]:
    """Seconds, and what they are made of; `goodput` is None where memory is the network."""
    computing = statistics.median(of_slowest_rank(one["times"][ORACLE] for one in result))
    alone = result[0]["alone"]
    last = max(one["alone"]["last_s"] for one in result)
    made = {
        "computing_s": computing,
        "last_s": last,
        **{name: alone[name] for name in ("bytes", "first_bytes", "first_module", "last_module")},
    }
    if goodput is None:
        return made | {"bound_s": computing}
    world = len(result)
    per_byte = 2 * (world - 1) / world / goodput  # a reduce-scatter and an all-gather
    bound = max(computing, alone["bytes"] * per_byte + last) + alone["first_bytes"] * per_byte
    return made | {"goodput_bytes_per_s": goodput, "bound_s": bound}


def records(
    place: str, model: str, result: Sequence[dict[str, Any]], goodput: float | None
) -> list[dict[str, Any]]:
    common = {"place": place, "model": model, "world": len(result), **bound_of(result, goodput)}
    rounds = {
        name: of_slowest_rank(one["times"][name] for one in result) for name in result[0]["times"]
    }
    lines = []
    for name, times in rounds.items():
        step = statistics.median(times)
        line = common | {"contender": name, "step_s": step, "rounds_s": times}
        line |= {"of_bound": step / common["bound_s"]}
        line |= {"state_bytes": max(one["states"][name] for one in result)}
        if BUCKETED in rounds and name != BUCKETED:
            line |= {"of_bucketed": asdict(paired(times, rounds[BUCKETED]))}
        lines.append(line)
    return lines


def table(lines: Sequence[dict[str, Any]]) -> str:
    one = lines[0]
    text = [
        f"{one['place']}, {one['model']}: bound {one['bound_s'] * 1e3:.1f} ms; computing "
        f"{one['computing_s'] * 1e3:.1f} ms, {one['bytes'] / 1e6:.1f} MB; first needed "
        f"{one['first_module'] or 'the model'} with {one['first_bytes'] / 1e6:.2f} MB, last "
        f"{one['last_module'] or 'the model'} for {one['last_s'] * 1e3:.1f} ms",
        f"{'':22}{'step ms':>9}{'of bound':>10}{'of bucketed':>13}"
        f"{ends(lines):>19}{'state MB':>10}",
    ]
    for line in lines:
        row = f"{line['contender']:22}{line['step_s'] * 1e3:>9.1f}{line['of_bound']:>10.3f}"
        if ratio := line.get("of_bucketed"):
            row += f"{ratio['median']:>13.3f}{ratio['low']:>12.3f} - {ratio['high']:.3f}"
        else:
            row += f"{'':>32}"
        text.append(row + f"{line['state_bytes'] / 1e6:>10.1f}")
    return "\n".join(text)


def run(place: str, model: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    contenders = options.contenders.split(",")
    with tempfile.TemporaryDirectory(prefix="dpcore-") as folder:
        asked = {
            "model": model, "contenders": contenders, "rounds": options.rounds,
            "steps": options.steps_per_round, "folder": folder,
        }  # fmt: skip
        if place == HOST:
            found: list[Any] = dp.spawn(measure, 2, *asked.values(), timeout=300)
            return records(place, model, found, None)
        rate = parse_speed(place).bytes_per_second
        found, goodput = on_hosts(measure, 2, place, rate, **asked)
        return records(place, model, found, goodput)


def checked(options: argparse.Namespace, complain: Callable[[str], Any]) -> None:
    known = SLEEPING | MODELS
    if unknown := [name for name in options.models.split(",") if name not in known]:
        complain(f"no model {', '.join(unknown)}; there are {', '.join(known)}")
    if ORACLE not in options.contenders.split(","):
        complain(f"one of the contenders has to be {ORACLE}: the bound is made of it")
    kinds = ("dpcore", "torch", OVER_DPCORE)
    if unknown := [n for n in options.contenders.split(",") if n.split()[0] not in kinds]:
        complain(f"no contender {', '.join(unknown)}; choose from {', '.join(CONTENDERS)}")


def main() -> int:
    made = script_parser(__doc__)
    add = made.add_argument
    add("--places", default="1gbit", help=f"rates, or {HOST}; default: %(default)s")
    add("--models", default="transformer,sleeping,sleeping_short", help="default: %(default)s")
    add("--contenders", default=",".join(CONTENDERS), help="of %(default)s")
    add("--rounds", type=int, default=9, help="in which all take turns (default: %(default)s)")
    add(
        "--steps-per-round",
        type=int,
        default=4,
        help="of a turn, after one more (default: %(default)s)",
    )
    add("--records", type=Path, default=ROOT / "benchmarks/results/across_steps.jsonl")
    options = made.parse_args()
    checked(options, made.error)
    places = options.places.split(",")
    if any(place != HOST for place in places) and (reason := namespaces.why_not()):
        print(f"across_steps: {reason}", file=sys.stderr)
        return 1
    facts = run_facts(
        {"": {"torch": torch.__version__}},
        {"rounds": options.rounds, "steps": options.steps_per_round},
    )
    for place in places:
        for model in options.models.split(","):
            lines = run(place, model, options)
            print(table(lines), "\n", flush=True)
            keep(options.records, facts, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
