"""Three launch schedules of the literature, each in a few lines, side by side.

    python examples/launch_schedules.py [ranks]
    dpcore simulate run.json --link 1gbit,50us --schedule examples/launch_schedules.py:Merging

``Window`` has no more than two operations in flight, so that what comes next can still be chosen.
``Adaptive`` tries whether sending during backward pays on this machine, and keeps the better way.
``Merging`` lets a gradient wait for the next one when that costs less than another message, as
MG-WFBP does.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import nn

import dpcore as dp


class Window(dp.LaunchSchedule):
    def __init__(self, most: int = 2) -> None:
        self._most = most
        self._next = 0

    def bucket_ready(self, control: dp.LaunchControl, bucket: int) -> None:
        self._send(control)

    def bucket_complete(self, control: dp.LaunchControl, bucket: int) -> None:
        self._send(control)

    def backward_end(self, control: dp.LaunchControl) -> None:
        control.wait_for_all()  # each one that is complete lets the next one leave
        self._next = 0

    def _send(self, control: dp.LaunchControl) -> None:
        while self._next < control.buckets and control.is_complete(self._next):
            if control.in_flight == self._most:
                return
            self._next += 1
            control.launch(self._next - 1)


class Adaptive(dp.LaunchSchedule):
    def __init__(self, steps: int = 5) -> None:
        self._steps = steps  # of each way, after one to warm up
        self._times: list[float] = []

    def _overlaps(self) -> bool:
        tried, n = self._times[1:], self._steps
        if len(tried) < 2 * n:
            return len(tried) < n
        return min(tried[:n]) <= min(tried[n:])

    def bucket_ready(self, control: dp.LaunchControl, bucket: int) -> None:
        if self._overlaps():
            control.launch(bucket)

    def backward_end(self, control: dp.LaunchControl) -> None:
        for bucket in range(control.buckets):
            control.launch(bucket, background=False)
        control.wait_for_all()
        if len(self._times) <= 2 * self._steps:
            self._times += control.max_over_ranks([control.elapsed_ms])


class Merging(dp.LaunchSchedule):
    def __init__(self, message_ms: float = 0.05, ms_per_mb: float = 8.0) -> None:
        self._message, self._per_byte = message_ms, ms_per_mb * 1e-6
        self._ready: dict[int, float] = {}
        self._ranges: dict[int, range] = {}  # by bucket: what it is sent with

    def caps(self, wanted: object) -> list[int]:
        return [0]  # a bucket per gradient: which ones go together is decided here

    def bucket_ready(self, control: dp.LaunchControl, bucket: int) -> None:
        self._ready[bucket] = control.elapsed_ms
        together = self._ranges.get(bucket, range(bucket, bucket + 1))
        if all(control.is_complete(each) for each in together):
            control.launch(together, priority=together[-1])

    def backward_end(self, control: dp.LaunchControl) -> None:
        control.wait_for_all()
        ready = control.max_over_ranks([self._ready[b] for b in range(control.buckets)])
        first, free = 0, 0.0  # of those that are being put together; when the network is free
        for bucket in range(control.buckets):
            begin = max(free, ready[bucket])
            is_last = bucket + 1 == control.buckets
            if is_last or ready[bucket + 1] > begin + self._message:  # would begin no sooner
                together = range(first, bucket + 1)
                self._ranges.update(dict.fromkeys(together, together))
                nbytes = sum(control.bytes(each) for each in together)
                first, free = bucket + 1, begin + self._message + nbytes * self._per_byte


def train(comm: dp.Communicator, schedule: str | dp.LaunchSchedule) -> tuple[int, float]:
    """Operations of a step, and its milliseconds."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(160, 160), nn.Tanh()) for _ in range(12)]
    model = dp.DataParallel(nn.Sequential(*layers), comm=comm, schedule=schedule, bucket_cap_mb=0)
    batch = torch.randn(64, 160)
    times = []
    for _ in range(20):
        model.zero_grad()
        comm.barrier()
        begin = time.perf_counter()
        model(batch).square().mean().backward()
        times.append(time.perf_counter() - begin)
    with dp.trace() as trace:
        model(batch).square().mean().backward()
    sent = len([event for event in trace.events if event.kind == "operation"])
    return sent, sorted(times[-7:])[3] * 1e3


def compare(comm: dp.Communicator) -> list[tuple[str, int, float]]:
    schedules = ("sequential", "bucketed", Window(), Adaptive(), Merging())
    return [(s if isinstance(s, str) else type(s).__name__, *train(comm, s)) for s in schedules]


if __name__ == "__main__":
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    print(f"{ranks} ranks over a link of 1 Gbit/s and 100 us that is emulated")
    print(f"{'schedule':<12}{'operations':>12}{'step ms':>10}")
    for name, sent, milliseconds in dp.spawn(compare, ranks, link="1gbit,100us")[0]:
        print(f"{name:<12}{sent:>12}{milliseconds:>10.2f}")
