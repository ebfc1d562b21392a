"""Large gradients cut into slices: the schedules of P3 and of ByteScheduler, beside ``priority``.

    python examples/slices.py [ranks]
    dpcore simulate run.json --link 1gbit,50us --schedule priority,examples/slices.py:P3
    dpcore compare transformer --link 1gbit,50us --contenders priority,examples/slices.py:P3

A slice is an operation of its own, so one half of it can travel while the other half of the slice
before it does, and what the next forward needs first overtakes the rest between two slices.

``P3`` launches all slices of a bucket as soon as that is ready, those that forward needs first
before others (Jayarajan et al., arXiv 1905.03960). ``ByteScheduler`` keeps no more than ``credit``
of them in flight while backward runs (Peng et al., SOSP 2019). In the paper, the most urgent slice
gets the next credit. Here ranks have to launch in one order, that of ``slices()``, and urgency is
the priority among those in flight: so at the end of backward the rest is launched at once.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

import dpcore as dp


class P3(dp.LaunchSchedule):
    def __init__(self, slice_bytes: int = 1 << 18) -> None:
        self._most = slice_bytes

    def phases(self) -> list[str]:
        return ["all_reduce", "update"]

    def slices(self, sizes: Sequence[int]) -> list[tuple[int, int, int]]:
        return [
            (bucket, begin, min(begin + self._most, size))
            for bucket, size in enumerate(sizes)
            for begin in range(0, size, self._most)
        ]

    def bucket_ready(self, control: dp.LaunchControl, bucket: int) -> None:
        control.launch(bucket, priority=bucket)  # the last buckets are needed first

    def forward_begin(self, control: dp.LaunchControl, module: int) -> None:
        for gradient in control.gradients_of_module(module):
            bucket = control.bucket_of(gradient)
            if bucket is not None and control.next_phase(bucket):
                control.wait(bucket)
                control.update(bucket)


class ByteScheduler(P3):
    def __init__(self, slice_bytes: int = 1 << 18, credit: int = 4) -> None:
        super().__init__(slice_bytes)
        self._credit, self._next = credit, (0, 0)  # a bucket, and a slice of it

    def bucket_ready(self, control: dp.LaunchControl, bucket: int) -> None:
        if self._next[0] >= control.buckets:  # of the step before
            self._next = (0, 0)
        self._send(control)

    def slice_complete(self, control: dp.LaunchControl, bucket: int, slice: int) -> None:
        self._send(control)

    def backward_end(self, control: dp.LaunchControl) -> None:
        for bucket in range(control.buckets):
            if control.next_phase(bucket) == "all_reduce":
                control.launch(bucket, priority=bucket)  # what is left of it
        self._next = (control.buckets, 0)

    def _send(self, control: dp.LaunchControl) -> None:
        bucket, number = self._next
        while bucket < control.buckets and control.is_complete(bucket):
            if control.in_flight >= self._credit:
                break
            control.launch(bucket, priority=bucket, slice=number)
            is_last = number + 1 == len(control.slices(bucket))
            bucket, number = (bucket + 1, 0) if is_last else (bucket, number + 1)
        self._next = bucket, number


def train(comm: dp.Communicator, schedule: str | dp.LaunchSchedule) -> tuple[int, float, float]:
    """Operations of a step, milliseconds of one, and the last loss."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    widths = [256, 256, 256, 2048, 256]  # two of its gradients are as large as 16 others
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(widths)]
    model = dp.DataParallel(
        nn.Sequential(*layers), comm=comm, schedule=schedule, bucket_cap_mb=0.25, deterministic=True
    )
    optimizer = dp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    batch = torch.randn(64, 256)

    def step() -> float:
        optimizer.zero_grad()
        loss = (model(batch) - batch).square().mean()
        torch.autograd.backward(loss)
        optimizer.step()
        return loss.item()

    for _ in range(5):  # these learn, and touch memory
        step()
    comm.barrier()
    begin = time.perf_counter()
    for _ in range(10):
        step()
    taken = (time.perf_counter() - begin) / 10
    model.flush()
    with dp.trace() as trace:
        loss = step()
        model.flush()
    sent = len([event for event in trace.events if event.kind == "operation"])
    return sent, taken * 1e3, loss


def compare(comm: dp.Communicator) -> list[tuple[str, int, float, float]]:
    schedules = ("priority", P3(), ByteScheduler())
    return [(s if isinstance(s, str) else type(s).__name__, *train(comm, s)) for s in schedules]


if __name__ == "__main__":
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    print(f"{ranks} ranks over a link of 1 Gbit/s and 100 us that is emulated")
    print(f"{'schedule':<14}{'operations':>12}{'step ms':>10}{'loss':>14}")
    for name, sent, milliseconds, loss in dp.spawn(compare, ranks, link="1gbit,100us")[0]:
        print(f"{name:<14}{sent:>12}{milliseconds:>10.2f}{loss:>14.9f}")
