"""Torch DDP in the eyes of dpcore.trace: the same file, so that both can be shown side by side.

Torch records no overlap on the CPU. A communication hook that does what DDP does without one tells
when each bucket is sent and complete; hooks of the parameters tell when gradients are there. It
sends over torch's group, or over a communicator of ours, where the network is a paced one. From
the last gradient to the end of backward the program can only wait: that is exposed. (What DDP does
after the last bucket came is in it, microseconds where gradients are views.)
"""

# No `from __future__ import annotations`: torch looks at those of the hook, and wants types.
import os
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dpcore.recorder import file as trace_file
from dpcore.recorder.file import Event, RankRecord
from dpcore.recorder.torch_trace import gather_bytes


class TorchTrace:
    """Watches the buckets of one model from now on; a DDP takes one hook for its life."""

    def __init__(self, model: torch.nn.parallel.DistributedDataParallel, comm: Any = None) -> None:
        """`comm`: what carries the buckets instead of torch's group."""
        self._comm = comm
        self._events: list[Event] = []
        self._recording = self._watches = False
        self._last_gradient_ns = 0
        self._bucket = self._operation = 0
        self._parameters = [(n, p) for n, p in model.module.named_parameters() if p.requires_grad]
        model.register_comm_hook(None, self._send)

    def watch_gradients(self) -> None:
        """The single gradients as well, which costs a call each, from the first time on."""
        if self._watches:
            return
        self._watches = True
        for number, (_, parameter) in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(self._arrival_of(number))

    def _arrival_of(self, number: int) -> Callable[[torch.Tensor], None]:
        def arrives(parameter: torch.Tensor) -> None:
            if self._recording:
                now = self._last_gradient_ns = time.monotonic_ns()
                nbytes = parameter.numel() * parameter.element_size()
                self._add("gradient ready", "ready", number, nbytes, now, now)

        return arrives

    def _send(
        self,
        _: None,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[torch.Tensor]:
        flat = bucket.buffer()
        if self._comm is None:
            flat.div_(dist.get_world_size())
        begin, nbytes = time.monotonic_ns(), flat.numel() * flat.element_size()
        recording, number, operation = self._recording, self._bucket, self._operation
        self._bucket, self._operation = number + 1, operation + recording
        if recording:
            self._last_gradient_ns = begin
            self._add("bucket launch", "launch", number, nbytes, begin, begin)

        def complete(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            if recording:
                end = time.monotonic_ns()
                self._add("all_reduce", "operation", operation, nbytes, begin, end)
            return future.value()[0]

        if self._comm is None:
            sent = dist.all_reduce(flat, async_op=True)
        else:
            sent = self._comm.all_reduce(flat, "mean", async_op=True)
        told: torch.futures.Future[torch.Tensor] = sent.get_future().then(complete)
        return told

    def step(self, forward: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Forward and backward, recorded."""
        self._recording, self._bucket = True, 0
        begin = time.monotonic_ns()
        loss = forward()
        middle = time.monotonic_ns()
        torch.autograd.backward(loss)
        end = time.monotonic_ns()
        self._recording = False
        computed = max(self._last_gradient_ns, middle)
        self._add("forward", "compute", 0, 0, begin, middle)
        self._add("backward", "compute", 0, 0, middle, computed)
        self._add("all_reduce", "exposed", 0, 0, computed, end)
        return loss

    def write(self, path: Path) -> None:
        """On all ranks; rank 0 writes what was recorded since the last file."""
        main = threading.get_native_id()
        events = sorted(self._events, key=lambda event: event.begin_ns)
        self._events = []
        mine = RankRecord(dist.get_rank(), os.getpid(), {main: "main"}, 0, events)
        parts = gather_bytes(pickle.dumps(mine), dist.group.WORLD)
        if parts:
            records = [pickle.loads(part) for part in parts]
            way = "gloo" if self._comm is None else self._comm.transport
            facts = {"transport": way, "paths": {"all_reduce": {way: self._operation}}}
            facts |= {"link": "" if self._comm is None else self._comm._link}
            trace_file.write(path, records, len(parts), facts)
        self._operation = 0

    def _add(self, name: str, kind: str, number: int, nbytes: int, begin: int, end: int) -> None:
        thread = threading.get_native_id()
        self._events.append(Event(name, kind, -1, thread, number, nbytes, begin, end))
