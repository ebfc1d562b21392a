"""``dpcore.trace`` of torch's own DDP: records with torch's profiler, writes dpcore's file.

    with dpcore.trace("run.json"):  # torch.distributed is initialised, dpcore.init() was not called
        for batch in batches:
            train_step(batch)

A communication hook would not do: DDP takes only one, which belongs to the program, and it would
change the rounding. The profiler changes no result: it records operators of torch, calls of
torch.distributed and, on GPUs, kernels, at some microseconds each. ``profile_events.py`` makes
events of them. DDP's log of the order in which gradients became ready names their parameters.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpcore.errors import Error
from dpcore.recorder.facts import machine_of
from dpcore.recorder.file import RankRecord, unix_minus_monotonic
from dpcore.recorder.profile_clocks import align, wait_for_the_last
from dpcore.recorder.profile_events import RankProfile, described, rank_profile
from dpcore.recorder.profile_file import profile_of
from dpcore.recorder.profiled import ProfileFacts
from dpcore.recorder.recording import Trace, thread_names

_PATIENCE_SECONDS = 1.0  # for tensors that Gloo holds
_ORDER = "prev_iteration_grad_ready_order_indices"


class TorchGroup:
    """A process group of torch with the attributes of a communicator that a trace reads."""

    closed = False

    def __init__(self, group: Any = None) -> None:
        import torch.distributed as dist

        self.group = group if group is not None else dist.group.WORLD
        self.rank = dist.get_rank(self.group)
        self.world_size = dist.get_world_size(self.group)
        self.transport = self.backend = str(dist.get_backend(self.group))


def is_initialised() -> bool:
    """Whether torch.distributed is initialised. Does not import it, which would take seconds."""
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized()


def group_of(given: Any) -> TorchGroup | None:
    """The group of a process group or a DDP of torch; None of anything else."""
    if isinstance(given, TorchGroup):
        return given
    if not is_initialised():
        return None
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    if isinstance(given, DistributedDataParallel) and hasattr(given, "process_group"):
        given = given.process_group
    return TorchGroup(given) if isinstance(given, dist.ProcessGroup) else None


class ProfilerTrace(Trace):
    """A trace that torch's profiler records."""

    _comm: Any  # a TorchGroup
    _profile: RankProfile

    def _start(self) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        if torch.autograd.profiler._is_profiler_enabled:
            raise Error(
                "trace: torch's profiler is recording already, and there is one per process; "
                "`dpcore show` reads the files that it writes"
            )
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profiler = profile(activities=activities, record_shapes=True)
        self._profiler.start()

    def _stop(self) -> RankRecord:
        self._profiler.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rank.json"
            self._profiler.export_chrome_trace(str(path))
            content = json.loads(path.read_bytes(), strict=False)
        profile = rank_profile(profile_of(content))
        self._profile = replace(
            profile,
            rank=self._comm.rank,
            world_size=self._comm.world_size,
            host=os.uname().nodename,
        )
        to_monotonic = -unix_minus_monotonic()
        own = {event.name for event in self._own}  # a program's own "forward" replaces DDP's
        found = [
            event.moved(to_monotonic)
            for event in profile.events
            if event.kind != "compute" or event.name not in own
        ]
        merged = sorted([*found, *self._own], key=lambda event: event.begin_ns)
        kept = merged[-self._capacity :]
        return RankRecord(
            rank=self._comm.rank,
            process=os.getpid(),
            threads=thread_names({e.thread for e in kept}, self._comm),
            dropped=len(merged) - len(kept) + self._own_count - len(self._own),
            events=kept,
            profiled=profile.facts.moved(to_monotonic),
        )

    def _has_failed(self) -> bool:
        return not is_initialised()

    def _facts(self) -> dict[str, Any]:
        gradients = self._profile.gradients
        names = _names_by_number()
        if len(names) == len(gradients):
            gradients = [(name, size) for name, (_, size) in zip(names, gradients, strict=True)]
        return {
            "machine": machine_of(int(os.environ.get("LOCAL_WORLD_SIZE", "0"))),  # of torchrun
            "backend": self._comm.backend,
            "transport": self._comm.transport,
            "link": "",
            "models": described(self._profile.layouts, gradients),
        }

    def _exchange(self) -> list[RankRecord]:
        """Everybody's events on rank 0, on its clock."""
        mine = (self._profile.host, self._ended())
        parts = gather_bytes(pickle.dumps(mine), self._comm.group)
        return _on_one_clock([pickle.loads(part) for part in parts], self._profile) if parts else []


def _on_one_clock(parts: Sequence[tuple[str, RankRecord]], like: RankProfile) -> list[RankRecord]:
    records = [record for _, record in parts]
    profiles = [
        replace(
            like,
            rank=record.rank,
            host=host,
            steps=[],
            events=record.events,
            facts=record.profiled or ProfileFacts(),
        ).moved(record.unix_minus_monotonic)
        for host, record in parts
    ]
    base = unix_minus_monotonic()
    shifts = align(profiles).shifts
    shifted = [one.moved(shift - base) for one, shift in zip(profiles, shifts, strict=True)]
    for record, profile in zip(records, wait_for_the_last(shifted), strict=True):
        record.events, record.unix_minus_monotonic = profile.events, base
        record.profiled = profile.facts
    return records


def _names_by_number() -> list[str]:
    """The parameters' names, from the last gradient to arrive to the first. Empty if the process
    has no DDP or several, or DDP has logged no iteration yet."""
    from torch.nn.parallel import DistributedDataParallel

    found = (x for x in gc.get_objects() if issubclass(type(x), DistributedDataParallel))
    wrapped: list[Any] = [model for model in found if hasattr(model, "reducer")]
    if len(wrapped) != 1:
        return []
    order = str(wrapped[0]._get_ddp_logging_data().get(_ORDER, ""))
    ignored: set[str] = getattr(wrapped[0], "parameters_to_ignore", set())
    names = [
        name
        for name, parameter in wrapped[0].module.named_parameters()
        if parameter.requires_grad and name not in ignored
    ]
    numbers = [int(number) for number in order.replace(",", " ").split()]
    if sorted(numbers) != list(range(len(names))):
        return []
    return [names[number] for number in reversed(numbers)]


# ---- over a process group of torch -------------------------------------------------------------


def gather_bytes(mine: bytes, group: Any) -> list[bytes]:
    """Bytes of all ranks on the first one, in their order; nothing on the others. All of them call
    it.

    torch's gather_object() would do, but for how it ends over Gloo. A thread of Gloo's lets go of
    the tensors some time after the call has returned, and needs Python's lock for that. Should the
    program end in between, Python ends that thread instead, and with it the process ("terminate
    called without an active exception"). So these tensors are waited for.
    """
    import torch
    import torch.distributed as dist

    takes_cpu = "cpu:" in dist.get_backend_config(group)
    device = torch.device("cpu" if takes_cpu else f"cuda:{torch.cuda.current_device()}")
    first = dist.get_global_rank(group, 0)
    size = torch.tensor([len(mine)], device=device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    data = torch.zeros(max(int(one) for one in sizes), dtype=torch.uint8, device=device)
    data[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
    parts = [torch.empty_like(data) for _ in sizes] if dist.get_rank(group) == 0 else []
    dist.gather(data, parts or None, dst=first, group=group)
    gathered = [
        part[: int(one)].cpu().numpy().tobytes() for part, one in zip(parts, sizes, strict=False)
    ]
    _wait_until_free([size, *sizes, data, *parts])
    return gathered


def _wait_until_free(tensors: Iterable[Any]) -> None:
    """Until nothing but the caller holds them."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    for tensor in tensors:
        while tensor._use_count() > 1 and time.monotonic() < deadline:
            time.sleep(1e-4)
