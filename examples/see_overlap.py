"""Two traces of one model over an emulated link of 4 Gbit/s: sent in buckets, and all at the end.

python examples/see_overlap.py
dpcore show bucketed.json sequential.json --open
"""

import sys
from pathlib import Path

import torch

import dpcore
from dpcore import Communicator

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()


def train(comm: Communicator, schedule: str) -> tuple[float, float]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers = [torch.nn.Linear(512, 512) for _ in range(12)]
    model = dpcore.DataParallel(
        torch.nn.Sequential(*layers), comm=comm, schedule=schedule, bucket_cap_mb=1
    )
    batch = torch.randn(256, 512)

    def step() -> None:
        model.zero_grad()
        model(batch).square().mean().backward()

    for _ in range(2):  # buckets are rebuilt in the second
        step()
    with dpcore.trace(FOLDER / f"{schedule}.json", comm=comm) as t:
        for _ in range(4):
            step()
    return t.exposed_ms / 4, t.communication_ms / 4


for schedule in ("bucketed", "sequential"):
    exposed, communication = dpcore.spawn(train, 2, schedule, link="4gbit,50us")[0]
    print(f"{schedule:12} exposed {exposed:5.1f} of {communication:5.1f} ms per step")
