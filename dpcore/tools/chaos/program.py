"""What ``dpcore chaos`` trains where no command is given, and what its ranks have to arrive at.

    python -m dpcore.tools.chaos.program        one rank, of a plain launch

It tells of a digest of its weights with each step. ``replayed`` computes the same in one process,
from nothing but the ranks that took part in each step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SAMPLES, BATCH, EPOCHS, WIDTH = 4096, 8, 100_000, 256
TIMEOUT = 30.0


def _data() -> TensorDataset:
    x = torch.randn(SAMPLES, 32, generator=torch.Generator().manual_seed(3))
    return TensorDataset(x, x.sin().sum(1, keepdim=True))


def _parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.set_num_threads(1)
    torch.manual_seed(5)
    module = nn.Sequential(
        nn.Linear(32, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)
    )
    return module, torch.optim.SGD(module.parameters(), lr=0.001, momentum=0.9)


def digest_of(module: nn.Module) -> str:
    """Of the weights, to the bit."""
    raw = b"".join(one.detach().numpy().tobytes() for one in module.parameters())
    return hashlib.sha256(raw).hexdigest()


def train() -> None:
    """On a rank, until it is ended."""
    import dpcore as dp
    from dpcore.ddp.elastic.progress import teller

    comm, tell = dp.init(timeout=TIMEOUT), teller()
    module, optimizer = _parts()
    samples = _data()
    sampler: DistributedSampler[torch.Tensor] = DistributedSampler(
        samples, comm.world_size, comm.rank
    )
    loader = DataLoader(samples, BATCH, sampler=sampler)
    model = dp.DataParallel(module, deterministic=True)
    torch.set_num_threads(1)
    ranks: tuple[int, ...] = ()
    with dp.elastic(model, optimizer, sampler) as run:
        for epoch in range(EPOCHS):
            sampler.set_epoch(epoch)
            for x, y in run.batches(loader):
                if tell is not None and ranks:
                    digest = digest_of(module)
                    tell("digest", step=run.step, ranks=ranks, number=run.number, digest=digest)
                ranks = run.ranks
                optimizer.zero_grad()
                loss: Any = nn.functional.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()


def replayed(ranks_of_step: Mapping[int, Sequence[int]], last: int) -> str:
    """The digest after step ``last`` (from 1 on)."""
    module, optimizer = _parts()
    x, y = _data().tensors
    step = 0
    for epoch in range(EPOCHS):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch)).tolist()
        used = 0
        while used < SAMPLES:
            if step == last:
                return digest_of(module)
            step += 1
            ranks = ranks_of_step[step]
            mine = order[used : used + BATCH * len(ranks)]
            mine += order[: -len(mine) % len(ranks)]
            used += BATCH * len(ranks)
            gradients = []
            for place in range(len(ranks)):
                numbers = mine[place :: len(ranks)]
                module.zero_grad()
                loss: Any = nn.functional.mse_loss(module(x[numbers]), y[numbers])
                loss.backward()
                gradients.append([one.grad for one in module.parameters()])
            for parameter, *each in zip(module.parameters(), *gradients, strict=True):
                total = each[0].clone()
                for gradient in each[1:]:
                    total += gradient
                parameter.grad = total * (1 / len(ranks))
            optimizer.step()
    raise ValueError(f"step {last} is beyond {EPOCHS} epochs")


if __name__ == "__main__":
    train()
