"""How soon do the others go on when a rank dies? `python -m benchmarks.survivors`

In each trial a rank of a fresh job kills itself in a loop of all-reduces. Counted is the time from
its kill to the end of the first all-reduce in the communicator that `shrink()` returns, on the
slowest of the ranks that live, and how much of it passes before they raise and in `shrink()`.

With `--training` a rank of a small transformer under `dp.elastic` dies at any moment of a step.
Counted is the time to the next step that the others have finished.

With `--cost` nothing dies. Counted is the time that `dp.elastic` itself takes of each step, outside
of the model's forward and the optimizer's step, with and without a door for ranks that join.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import dpcore as dp
from benchmarks.harness.options import script_parser
from dpcore.comm.launch.spawn import run_processes
from dpcore.tools.compare.training.models import transformer
from dpcore.tools.records import ROOT, keep, run_facts

cloudpickle.register_pickle_by_value(sys.modules[__name__])

KILLED_AT = 50  # steps
TRAINED_UNTIL = 16  # steps of a training
SEQUENCES = 4  # of a rank's batch
_PARTS = 4  # of a step that are timed: its start, forward, the optimizer's step, its end

Moment = tuple[float, int, int]  # when a batch began, steps finished before it, ranks


def measured(comm: Any, victim: int, elements: int, stamp: str) -> dict[str, float]:
    """On a rank that lives: seconds after the kill."""
    tensor = comm.empty(elements).fill_(1)
    step = 0
    try:
        while True:
            if comm.rank == victim and step == KILLED_AT:
                Path(stamp).write_text(str(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
            comm.all_reduce(tensor)
            step += 1
    except dp.PeerLost:
        raised = time.monotonic()
        comm = comm.shrink()
    shrunk = time.monotonic()
    tensor = comm.empty(elements).fill_(1)
    comm.all_reduce(tensor)
    done = time.monotonic()
    if not tensor.eq(comm.world_size).all():
        raise RuntimeError(f"rank {comm.rank}: wrong sums after shrink()")
    killed = float(Path(stamp).read_text())
    return {"raised": raised - killed, "shrunk": shrunk - killed, "reduced": done - killed}


def loop(
    comm: Any, steps: int, begins: Any = None, door: str | None = None, spent: Any = None
) -> list[Moment]:
    """The moments of all batches of a training under dp.elastic."""
    torch.manual_seed(0)
    module, _ = transformer()
    samples = TensorDataset(torch.randn(SEQUENCES * comm.world_size * steps, 64, 256))
    sampler: Any = DistributedSampler(samples, comm.world_size, comm.rank)
    loader = DataLoader(samples, SEQUENCES, sampler=sampler)
    model = dp.DataParallel(module, comm=comm, schedule="bucketed")
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    moments: list[Moment] = []
    with dp.elastic(model, optimizer, sampler, door=door) as run:
        if spent is not None:
            timed(run, model, spent)
        for (x,) in run.batches(loader):
            moments.append((time.monotonic(), run.step, run.comm.world_size))
            if begins is not None:
                begins(moments)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    return moments


def trained(comm: Any, victim: int, fraction: float, stamp: str) -> dict[str, float]:
    """On a rank that lives: seconds after the kill, and of the median step before."""

    def begins(moments: list[Moment]) -> None:
        if comm.rank == victim and moments[-1][1] == TRAINED_UNTIL:
            after = max(fraction * median_step(moments), 1e-5)
            Path(stamp).write_text(str(time.monotonic() + after))
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, after)

    moments = loop(comm, TRAINED_UNTIL + 4, begins)
    killed = float(Path(stamp).read_text())
    rest = [at for at, _, ranks in moments if ranks < comm.world_size]
    step = median_step([one for one in moments if one[2] == comm.world_size])
    return {"again": rest[0] - killed, "stepped": rest[1] - killed, "step": step}


def median_step(moments: list[Moment]) -> float:
    late = [at for at, done, _ in moments if done >= TRAINED_UNTIL // 2]
    return statistics.median(after - before for before, after in pairwise(late))


def timed(run: Any, model: Any, spent: list[float]) -> None:
    """Adds to `spent` what each part of `run` takes, less the calls of the model and optimizer."""
    within = [0.0]

    def inner(call: Any) -> Any:
        def timed_call(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                within[0] += time.perf_counter() - began

        return timed_call

    def outer(call: Any) -> Any:
        def timed_call(*arguments: Any, **named: Any) -> Any:
            began, before = time.perf_counter(), within[0]
            try:
                return call(*arguments, **named)
            finally:
                spent.append(time.perf_counter() - began - (within[0] - before))

        return timed_call

    class Timed(dp.DataParallel):
        forward = inner(dp.DataParallel.forward)

    model.__class__ = Timed
    model.forward = outer(run._forward)
    run._optimizers_step = inner(run._optimizers_step)
    run._step_optimizer = outer(run._step_optimizer)
    run._end_step = outer(run._end_step)
    run._start.take = outer(run._start.take)


def cost(comm: Any, door: str | None) -> tuple[float, float]:
    """Seconds of a step that are `dp.elastic`'s own, and of the whole step: medians."""
    spent: list[float] = []
    moments = loop(comm, 40, door=door, spent=spent)
    of_steps = [sum(spent[at : at + _PARTS]) for at in range(0, len(spent) - _PARTS, _PARTS)]
    return statistics.median(of_steps[5:]), median_step(moments)


def trial(number: int, options: Any, folder: str) -> dict[str, float]:
    victim, stamp = number % options.world, str(Path(folder) / str(number))
    fraction = random.Random(number).random()
    outcomes = run_processes(
        trained if options.training else measured,
        options.world,
        (victim, fraction if options.training else options.elements, stamp),
        options={"transport": options.transport},
        deadline=120.0,
        grace=100.0,
    )
    lives = [outcome for outcome in outcomes if outcome.rank != victim]
    for outcome in lives:
        if outcome.error is not None:
            raise outcome.error
    return {name: max(outcome.result[name] for outcome in lives) for name in lives[0].result}


if __name__ == "__main__":
    made = script_parser(__doc__)
    made.add_argument("--world", type=int, default=4)
    made.add_argument("--kills", type=int, default=100)
    made.add_argument("--elements", type=int, default=4_700_000, help="of float32; %(default)s")
    made.add_argument("--training", action="store_true", help="a transformer under dp.elastic")
    made.add_argument("--cost", action="store_true", help="of a training without a death")
    made.add_argument("--transport", default="shm", choices=("shm", "tcp"))
    made.add_argument("--records", type=Path, default=ROOT / "benchmarks/results/survivors.jsonl")
    options = made.parse_args()
    facts = run_facts({"": {"torch": torch.__version__}}, {"kills": options.kills})
    line: dict[str, Any] = {"world": options.world, "transport": options.transport}
    line |= {"training": "transformer"} if options.training else {"elements": options.elements}
    if options.cost:
        del line["elements"]
        for name, door in (("own", None), ("own_with_door", f"cost-{os.getpid()}")):
            own, step = dp.spawn(cost, 2, door)[0]
            line |= {"world": 2, "training": "transformer", f"{name}_s": own, "step_s": step}
            print(f"{name}: {own * 1e6:.0f} us of a step of {step * 1e3:.1f} ms: {own / step:.4%}")
        keep(options.records, facts, [line])
        sys.exit()
    with tempfile.TemporaryDirectory() as folder:
        trials = [trial(number, options, folder) for number in range(options.kills)]
    for name in trials[0]:
        line[f"{name}_s"] = sorted(one[name] for one in trials)
        print(f"{name:8} median {statistics.median(line[f'{name}_s']) * 1e3:7.1f} ms, "
              f"slowest {line[f'{name}_s'][-1] * 1e3:7.1f} ms")  # fmt: skip
    if options.training:
        beyond = sorted(one["stepped"] - one["step"] for one in trials)
        line["beyond_a_step_s"] = beyond
        print(f"beyond a step: median {statistics.median(beyond) * 1e3:.1f} ms, "
              f"slowest {beyond[-1] * 1e3:.1f} ms")  # fmt: skip
    keep(options.records, facts, [line])
