"""A schedule of your own: send gradients in the order in which the next forward needs them.

    python examples/reverse_order.py [ranks]

Backward makes the last layer's gradients first, so buckets are usually sent from the last layer to
the first. This schedule sends them the other way round: a bucket that is complete is held back
until those before it in order() are sent. Nothing then overlaps with backward, which is what one
pays for having the first layer's gradients first. The results are the same.
"""

import sys
from typing import Any

import torch
from torch import nn

import dpcore as dp

STEPS = 3


class ReverseOrder(dp.LaunchSchedule):
    def order(self, buckets: int) -> list[int]:
        return list(reversed(range(buckets)))

    def bucket_ready(self, control: Any, bucket: int) -> None:
        control.launch(bucket, priority=bucket)  # held back until those before it in order()

    def backward_end(self, control: Any) -> None:
        for bucket in self.order(control.buckets):
            control.wait(bucket)


def train(comm: dp.Communicator, schedule: Any) -> tuple[list[int], torch.Tensor]:
    torch.manual_seed(1)
    layers = [nn.Linear(64, 64) for _ in range(6)]
    model = dp.DataParallel(nn.Sequential(*layers), bucket_cap_mb=0.02, schedule=schedule)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(comm.rank)
    with dp.trace() as trace:
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(8, 64, generator=generator)).square().mean().backward()
            optimizer.step()
    sent = [event.operation for event in trace.events if event.kind == "launch"]
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return sent[-len(model.bucket_report()) :], weights


def compare(comm: dp.Communicator) -> tuple[list[int], list[int], bool]:
    usual_order, usual = train(comm, "bucketed")
    own_order, own = train(comm, ReverseOrder())
    return usual_order, own_order, torch.equal(usual, own)


if __name__ == "__main__":
    world = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    for rank, (usual, own, equal) in enumerate(dp.spawn(compare, world)):
        print(f"rank {rank}: bucketed sends {usual}, ReverseOrder {own};", end=" ")
        print("the weights are equal" if equal else "the weights DIFFER")
