"""Communication under the next forward: the schedules across steps, and one of your own.

    python examples/across_steps.py [ranks]

``Own`` is "zero1" in a few lines of Python. A bucket goes from phase to phase: its gradients are
reduced and scattered under backward, each rank updates its part in ``optimizer.step()``, and the
new parameters are gathered under the next forward, where each module waits for what it needs.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import nn

import dpcore as dp


class Own(dp.LaunchSchedule):
    def phases(self) -> list[str]:
        return ["reduce_scatter", "update", "all_gather"]

    def bucket_ready(self, control: dp.LaunchControl, bucket: int) -> None:
        control.launch(bucket, priority=control.buckets + bucket)

    def optimizer_step(self, control: dp.LaunchControl) -> None:
        for bucket in range(control.buckets):
            control.wait(bucket)
            control.update(bucket)
            control.launch(bucket, priority=bucket)  # the last buckets are needed first

    def forward_begin(self, control: dp.LaunchControl, module: int) -> None:
        for gradient in control.gradients_of_module(module):
            bucket = control.bucket_of(gradient)
            if bucket is not None:
                control.wait(bucket)


def train(comm: dp.Communicator, schedule: str | dp.LaunchSchedule) -> tuple[float, float, float]:
    """Milliseconds of a step, the last loss, and MB of the optimizer's state on this rank."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8)]
    model = dp.DataParallel(
        nn.Sequential(*layers), comm=comm, schedule=schedule, bucket_cap_mb=0.25, deterministic=True
    )
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3)
    late = schedule != "bucketed"
    optimizer: torch.optim.Optimizer = dp.DistributedOptimizer(plain, model) if late else plain
    batch = torch.randn(256, 256)
    loss, begin = torch.zeros(()), 0.0
    for step in range(20):
        if step == 5:  # the first ones learn, and touch memory
            comm.barrier()
            begin = time.perf_counter()
        optimizer.zero_grad()
        loss = (model(batch) - batch).square().mean()
        torch.autograd.backward(loss)
        optimizer.step()
    model.flush()
    taken = (time.perf_counter() - begin) / 15
    state = [t for one in plain.state.values() for t in one.values() if torch.is_tensor(t)]
    return taken * 1e3, loss.item(), sum(t.numel() for t in state) * 4e-6


def compare(comm: dp.Communicator) -> list[tuple[str, float, float, float]]:
    schedules = ("bucketed", "priority", "dear", "zero1", Own())
    return [(s if isinstance(s, str) else type(s).__name__, *train(comm, s)) for s in schedules]


if __name__ == "__main__":
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    print(f"{ranks} ranks over a link of 1 Gbit/s and 100 us that is emulated")
    print(f"{'schedule':<12}{'step ms':>10}{'loss':>14}{'state MB':>10}")
    for name, milliseconds, loss, megabytes in dp.spawn(compare, ranks, link="1gbit,100us")[0]:
        print(f"{name:<12}{milliseconds:>10.2f}{loss:>14.9f}{megabytes:>10.2f}")
