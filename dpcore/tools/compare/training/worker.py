r"""One rank of a training benchmark, as a process of its own: so it can live in a namespace.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=... MASTER_PORT=... \
        python -m dpcore.tools.compare.training.worker JSON

Rank 0 prints a line of JSON per step, then one with everything. All contenders exist at once and
take turns, a few steps each. Both use torch's rendezvous; dpcore connects through its store.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import os
import socket
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import dpcore as dp
from dpcore.base.user_code import names_code
from dpcore.ddp.overlap import finish_device
from dpcore.errors import Error
from dpcore.tools.compare.training.bare import Bare, LastGradient, on_gradient
from dpcore.tools.compare.training.clock import Clock, HostClock, clock_of
from dpcore.tools.compare.training.making import Made, Stepping, made
from dpcore.tools.compare.training.ranks import (
    TORCH,
    TORCH_OVER_OURS,
    steps_in,
    torch_ddp,
    warm_steps,
)
from dpcore.tools.compare.training.recipes import trained
from dpcore.tools.compare.training.text import Text, language_model, loss_of
from dpcore.tools.compare.training.torch_trace import TorchTrace
from dpcore.tools.ratios import in_turn, turns

_RAW_BYTES = 16 << 20
_TRACES, _TRACED_STEPS = 3, 4  # of each contender, in turn, and the steps of one
_PATIENCE_SECONDS = 120.0  # a rank that does not come at all is an error, too


@dataclass(frozen=True)
class Job:
    """What all ranks do; travels as JSON. `model`: "text", which learns, or what `made` takes."""

    model: str
    contenders: list[str]
    rounds: int
    steps: int  # of one contender in a round
    folder: str  # of the traces; "": none are made
    world: int = 2
    seconds: float = 0.0  # where given: as many steps in a round as the first contender makes in it
    threads: int = 1  # of torch; 0: what it has by itself, and with dpcore what init() leaves it
    threads_of_ddp: int = 0  # torch's DDP where that is another number
    sequences: int = 8
    init: dict[str, Any] = field(default_factory=dict)  # options of dpcore.init
    raw_port: int = 0  # measures what the network carries, where given
    optimizer: str = "adamw"  # of recipes.OPTIMIZERS, whose step is a part of every step; "": none
    every: int = 1  # a round given in seconds has a multiple of so many steps
    device: str = "cpu"  # or "cuda": rank r on GPU r, around where there are fewer
    amp: bool = False  # steps run under torch.autocast in bfloat16
    first_round: int = 0  # the rounds before were measured by an earlier job
    around: bool = False  # the first contender has a turn before and after every other's
    by_round: bool = False  # tells every round as it ends, with the time after the last gradient

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class Contender:
    """A model of its own with its wrapper and optimizer. Where no optimizer changes weights, they
    are those of `first`: only gradients take memory once per contender."""

    def __init__(
        self,
        job: Job,
        name: str,
        comm: Any,
        text: Text,
        first: Contender | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.name = name
        self._text, self._job, self._comm = text, job, comm
        self._number = 0
        self._device = device_of(job, comm.rank)
        torch.manual_seed(comm.rank)  # inputs of its own
        autocast = self._device.type if job.amp else ""
        self._stepping = Stepping(job.model, self._made(), autocast)
        module = self._module = self._stepping.module
        module.to(self._device)
        begin_alike(module, comm)
        self._shares_weights = first is not None and not job.optimizer
        if first is not None and self._shares_weights:
            for mine, its in zip(module.parameters(), first._module.parameters(), strict=True):
                mine.data = its.data
        options: dict[str, Any] = {}
        if names_code(job.model):
            self._stepping.look()
            if some_rank(comm, self._stepping.unused):
                options["find_unused_parameters"] = True
        self._last_gradient = LastGradient(module, clock or HostClock()) if job.by_round else None
        self._trace: TorchTrace | None = None
        self.model: Any
        if name.startswith(TORCH_OVER_OURS) and self._is_traced:
            # Its one hook averages by ours in either case; this one can record as well, later.
            self.model = torch_ddp(name, module, **options)
            self._trace = TorchTrace(self.model, comm)
            self._optimizer: Any = torch.optim.AdamW(module.parameters(), lr=1e-3)
            self._block: Any = contextlib.nullcontext()
        else:
            made_by = trained(name, module, comm, job.optimizer or "adamw", options)
            self.model, self._optimizer, self._block = made_by
        self.threads = (job.threads_of_ddp if name.startswith(TORCH) else 0) or job.threads

    @property
    def gradient_bytes(self) -> int:
        parameters = (p for p in self._module.parameters() if p.requires_grad)
        return sum(p.numel() * p.element_size() for p in parameters)

    @property
    def uncounted_bytes(self) -> int:
        """Memory that torch did not allocate for it: weights that all contenders share, and buckets
        that all ranks have mapped."""
        counted = 0
        if self._shares_weights:
            counted += sum(p.numel() * p.element_size() for p in self._module.parameters())
        is_mapped = getattr(self._comm, "backend", "") == "cuda"
        if is_mapped and isinstance(self.model, dp.DataParallel):
            counted += sum(bucket.bytes for bucket in self.model.bucket_report())
        return counted

    @property
    def _is_traced(self) -> bool:
        """TorchTrace looks at the processor's clock, which says nothing of a GPU."""
        return bool(self._job.folder) and self._job.device == "cpu"

    @property
    def has_trace(self) -> bool:
        """Whether ``trace`` can write one."""
        return self.name.startswith("dpcore") or (self.name.startswith("torch") and self._is_traced)

    @property
    def unused(self) -> list[str]:
        """Parameters that this rank's step gives no gradient."""
        return self._stepping.unused

    def _made(self) -> Made:
        job, comm, text = self._job, self._comm, self._text
        if job.model != "text":
            return made(job.model, comm.rank, comm.world_size, self._device)

        def loss(model: torch.nn.Module) -> torch.Tensor:
            batch = text.batch(self._number, comm.rank, comm.world_size, job.sequences)
            return loss_of(model, batch.to(self._device))

        return Made(language_model(text), loss)

    @property
    def _goes_across_steps(self) -> bool:
        return isinstance(self.model, dp.DataParallel) and self.model._across is not None

    @property
    def taken(self) -> int:
        """The steps that it has made."""
        return self._number

    def settle(self) -> None:
        """Ends the warm-up."""
        if self._last_gradient is not None:
            self._last_gradient.settle()

    def last_gradient(self) -> Any:
        """The clock's mark of the last gradient in the step that has ended; None if unknown."""
        return None if self._last_gradient is None else self._last_gradient.taken()

    def choice(self) -> dict[str, Any] | None:
        """How this rank cuts and sends now, where the wrapper tells."""
        if not isinstance(self.model, dp.DataParallel):
            return None
        report = self.model.bucket_report()
        heading = str(report).partition("bucket  ")[0].strip()
        sizes = [bucket.bytes for bucket in report]
        return {"schedule": self.model.schedule, "bucket_bytes": sizes, "said": heading}

    def step(self, recorded: bool = False) -> Any:
        """Forward, backward and optimizer; the loss, which a GPU may still have to compute."""
        torch.set_num_threads(self.threads)
        self._optimizer.zero_grad()
        if recorded and self._trace is not None:
            loss = self._trace.step(lambda: self._stepping.loss(self.model)).detach()
        else:
            loss = self._stepping.step(self.model)
        is_ours = isinstance(self.model, dp.DataParallel)
        if self._job.by_round and is_ours and not self._goes_across_steps:
            self.model._reducer.wait_for_gradients()  # which a schedule may leave to an optimizer
        if self._job.optimizer:
            self._optimizer.step()
        self._number += 1
        return loss

    def finish(self) -> None:
        """Ends what the last step has left in flight."""
        if self._goes_across_steps:
            self.model.flush()

    def close(self) -> None:
        """At the end, on all ranks."""
        self._block.__exit__(None, None, None)

    def trace(self, path: Path) -> float:
        """A file of a few steps, and the median of their seconds. All ranks begin together: rank 0
        may come later, since it wrote the file before, and the others' first step would show how
        they wait for it. Torch DDP gets its hooks only here: they would slow down the steps that
        are measured."""
        if self._trace is None and self.name.startswith("torch") and self._is_traced:
            self._trace = TorchTrace(self.model)
        self._comm.barrier()
        if self._trace is not None:
            self._trace.watch_gradients()
            taken = [self._seconds_of_step(recorded=True) for _ in range(_TRACED_STEPS)]
            self._trace.write(path)
        else:
            with dp.trace(path, comm=self._comm):
                taken = [self._seconds_of_step() for _ in range(_TRACED_STEPS)]
                self.finish()
        return statistics.median(taken)

    def _seconds_of_step(self, recorded: bool = False) -> float:
        begin = time.perf_counter()
        self.step(recorded)
        finish_device(self._device)
        return time.perf_counter() - begin


def run(job: Job) -> dict[str, Any]:
    by_itself = torch.get_num_threads()
    device = device_of(job, int(os.environ["RANK"]))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if has_own_gpus(job) else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=_PATIENCE_SECONDS))
    comm = dp.init(timeout=_PATIENCE_SECONDS, **job.init)
    if not job.threads:
        job = replace(job, threads=torch.get_num_threads(), threads_of_ddp=by_itself)
    result = measured(job, comm, clock_of(device))
    report(comm, {"result": result})
    gc.collect()  # models that refer to themselves: torch DDP holds the group, which has to go
    comm.barrier()
    dp.finalize()
    dist.destroy_process_group()
    return result


def measured(job: Job, comm: Any, clock: Clock) -> dict[str, Any]:
    """What this rank reports. Models live no longer than this call."""
    text = Text()
    contenders: list[Contender | Bare] = []
    first: Contender | None = None
    memory = dict.fromkeys(job.contenders, 0)  # of a contender at its most
    for name in job.contenders:
        before = clock.held_bytes()
        if first is not None and Bare.is_one(name):
            device = device_of(job, comm.rank)
            contenders.append(Bare(name, first.gradient_bytes, comm, device))
        else:
            made_one = Contender(job, name, comm, text, first, clock)
            contenders.append(made_one)
            first = first or made_one
        memory[name] += clock.held_bytes() - before
    assert first is not None
    warm = [warm_steps(name, comm.world_size) for name in job.contenders]
    # Those that learn take the same steps, so that losses compare.
    for contender, own in zip(contenders, warm, strict=True):
        before = clock.held_bytes()
        count = max(warm) if job.optimizer else own
        for number in range(count):
            if job.by_round:
                report(comm, {"warming": contender.name, "at": number, "of": count})
            contender.step()
        contender.settle()
        memory[contender.name] += clock.held_bytes() - before
    choices = {contender.name: [contender.choice()] for contender in contenders}

    def settled_step() -> None:
        contenders[0].step()
        clock.settle()

    steps = steps_in(job.seconds, settled_step, on_host(comm)) if job.seconds else job.steps
    steps = -(-steps // job.every) * job.every
    for contender in contenders if job.optimizer else ():
        for _ in range(contender.taken, first.taken):
            contender.step()
    seconds: dict[str, list[float]] = {name: [] for name in job.contenders}
    losses: dict[str, list[float]] = {name: [] for name in job.contenders}
    tails: dict[str, list[float]] = {name: [] for name in job.contenders}
    above = dict.fromkeys(job.contenders, 0)  # what a step takes for a while
    raw = []
    for number in range(job.first_round, job.rounds):
        if job.raw_port:
            raw.append(raw_bytes_per_second(comm.rank, job.raw_port))
        for contender in turns(contenders, number) if job.around else in_turn(contenders, number):
            before = clock.held_bytes()
            clock.peak_bytes()
            for step in turn(contender, steps, comm, clock, job.by_round):
                seconds[contender.name].append(step.seconds)
                tails[contender.name].append(step.tail)
                losses[contender.name].append(step.loss)
            above[contender.name] = max(above[contender.name], clock.peak_bytes() - before)
        if job.by_round:
            told = {"seconds": of_round(seconds, steps), "tails": of_round(tails, steps)}
            report(comm, {"round": number, **told})
    for contender in contenders:
        choices[contender.name].append(contender.choice())
    if job.folder:
        traced = [c for c in contenders if isinstance(c, Contender) and c.has_trace]
        medians = {name: statistics.median(taken) for name, taken in seconds.items() if taken}
        trace_in_turn(traced, medians, Path(job.folder), comm)
    taken = first.taken
    first_gradients = [first_gradient_seconds(first)] if job.raw_port else []
    for contender in contenders:
        if on_host(comm) is not comm:  # on GPUs, where torch counts what it allocates
            memory[contender.name] += contender.uncounted_bytes + above[contender.name]
        contender.close()
    return {
        "seconds": everybodys(seconds),
        "losses": everybodys(losses),
        "taken": taken,
        "raw": everybodys({"": raw})[""],
        "first_gradient": everybodys({"": first_gradients})[""],
        "gradient_bytes": first.gradient_bytes,
        "unused": first.unused,
        "choices": choices,
        "steps": steps,
        "threads": {one.name: one.threads for one in contenders if isinstance(one, Contender)},
        "memory": everybodys({name: [size] for name, size in memory.items()}),
    }


class Taken(NamedTuple):
    """A step: its time, the time from its last gradient to its end, and its loss."""

    seconds: float
    tail: float
    loss: float


def turn(
    contender: Contender | Bare, steps: int, comm: Any, clock: Clock, by_round: bool
) -> Iterator[Taken]:
    """So many steps, of which the last one ends all that is left in flight."""
    marks = []
    for number in range(steps):
        if number == 0 or clock.begins_together:
            comm.barrier()
        begin = clock.mark()
        loss = contender.step()
        done = end = clock.mark()
        if number == steps - 1:
            contender.finish()
            end = clock.mark()
        marks.append((begin, contender.last_gradient(), done, end, loss))
        if not by_round:  # the program that reads every line runs beside what is measured
            report(comm, {"step": contender.name})
    clock.settle()
    for begin, last, done, end, loss in marks:
        tail = 0.0 if last is None else clock.seconds(last, done)
        yield Taken(clock.seconds(begin, end), tail, float(loss))


def trace_in_turn(
    contenders: Sequence[Contender], medians: dict[str, float], folder: Path, comm: Any
) -> None:
    """Of each contender the one file, of several, whose steps took what those of the rounds did,
    or nearest to it: what is shown beside the rounds is no odd moment."""
    found: dict[str, list[tuple[float, Path]]] = {one.name: [] for one in contenders}
    for number in range(_TRACES):
        for contender in in_turn(contenders, number):
            report(comm, {"tracing": contender.name})
            path = folder / f"{contender.name.replace(' ', '-')}-{number}.json"
            apart = abs(contender.trace(path) - medians[contender.name])
            found[contender.name].append((apart, path))
    for name, paths in found.items() if comm.rank == 0 else ():
        (_, nearest), *others = sorted(paths)
        nearest.rename(folder / f"{name.replace(' ', '-')}.json")
        for _, other in others:
            other.unlink()


def some_rank(comm: Any, found: Sequence[Any]) -> bool:
    """Whether some rank has found something. On all ranks."""
    most = torch.tensor([len(found)])
    on_host(comm).all_reduce(most, op="max")
    return bool(most)


def on_host(comm: Any) -> Any:
    """What ranks on GPUs agree over: they have a communicator on the host beside the other one."""
    return getattr(comm, "_on_host", comm)


def begin_alike(module: torch.nn.Module, comm: Any) -> None:
    """All ranks with rank 0's weights, whatever a contender does about them."""
    for parameter in module.parameters() if comm.world_size > 1 else ():
        value = parameter.detach().cpu().contiguous()
        on_host(comm).broadcast(value, 0)
        parameter.detach().copy_(value)


def device_of(job: Job, rank: int) -> torch.device:
    if job.device == "cpu":
        return torch.device("cpu")
    return torch.device(job.device, rank % torch.cuda.device_count())


def has_own_gpus(job: Job) -> bool:
    """NCCL wants a GPU for each rank."""
    return job.device == "cuda" and torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])


def first_gradient_seconds(contender: Contender) -> float:
    """From the begin of a step to its first gradient, on this rank; the median of three."""
    seen: list[float] = []
    hooks = [
        on_gradient(parameter, lambda _: seen.append(time.perf_counter()))
        for parameter in contender._module.parameters()
    ]
    took = []
    for _ in range(3):
        seen.clear()
        begin = time.perf_counter()
        contender.step()
        took.append(seen[0] - begin)
    for hook in hooks:
        hook.remove()
    return sorted(took)[1]


def of_round(mine: dict[str, list[float]], steps: int) -> dict[str, list[list[float]]]:
    """What all ranks saw in the last steps."""
    return everybodys({name: times[-steps:] for name, times in mine.items()})


def everybodys(mine: dict[str, list[float]]) -> dict[str, list[list[float]]]:
    """The lists of all ranks, by name."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    return {name: [part[name] for part in parts] for name in mine}


def report(comm: Any, line: dict[str, Any]) -> None:
    if comm.rank == 0:
        print(json.dumps(line), flush=True)


def raw_bytes_per_second(rank: int, port: int) -> float:
    """What a TCP stream of rank 0 to rank 1 carries: the goodput that nothing can beat."""
    addresses: list[Any] = [None, None]
    if rank == 1:
        with socket.create_server(("", port)) as server:
            dist.all_gather_object(addresses, "listening")
            peer, _ = server.accept()
            with peer:
                return _timed(lambda: _receive(peer, _RAW_BYTES))
    dist.all_gather_object(addresses, "connecting")
    with socket.create_connection((os.environ["RANK_1_ADDR"], port)) as peer:
        return _timed(lambda: _send(peer, _RAW_BYTES))


def _receive(peer: socket.socket, nbytes: int) -> None:
    left = nbytes
    while left > 0:
        left -= len(peer.recv(min(left, 1 << 20)))
    peer.sendall(b"!")


def _send(peer: socket.socket, nbytes: int) -> None:
    peer.sendall(bytes(nbytes))
    peer.recv(1)


def _timed(transfer: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    transfer()
    return _RAW_BYTES / (time.perf_counter() - begin)


def main() -> int:
    try:
        run(Job(**json.loads(sys.argv[1])))
    except Error as problem:  # says what to do, and a traceback into dpcore would not
        print(json.dumps({"error": str(problem)}), flush=True)
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
