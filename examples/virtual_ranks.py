"""The same weights, to the bit, on any number of ranks.

    for n in 1 2 3 4 8; do torchrun --nproc-per-node $n examples/virtual_ranks.py; done

Each run prints the sha256 of the weights, and all are equal.
"""

import hashlib

import torch
from torch import nn

import dpcore as dp

SHARDS, SAMPLES, STEPS = 8, 64, 20


def main() -> None:
    torch.set_num_threads(1)  # how kernels add depends on it
    comm = dp.init()
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Linear(4, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1)
    )
    model = dp.DataParallel(module, virtual_ranks=SHARDS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batches = torch.Generator().manual_seed(1)  # every rank reads the same ones
    for _ in range(STEPS):
        x = torch.randn(SAMPLES, 4, generator=batches)
        optimizer.zero_grad()
        for inputs, targets in model.shards((x, x.sum(1, keepdim=True).sin())):
            nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    weights = b"".join(tensor.numpy().tobytes() for tensor in module.state_dict().values())
    if comm.rank == 0:
        print(f"{comm.world_size} ranks: sha256 {hashlib.sha256(weights).hexdigest()}")
    dp.finalize()


if __name__ == "__main__":
    main()
