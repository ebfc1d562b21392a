"""Trains the same model under any launcher, and goes on from its last checkpoint.

    python examples/train.py                                          # one process
    torchrun --standalone --nproc-per-node 2 examples/train.py     # others: docs/running.md

The last line has a digest of the parameters: it is the same whether a run was interrupted or not.
"""

import argparse
import hashlib
import os
from pathlib import Path

import torch
from torch import nn

import dpcore as dp

ROWS = 960  # of the whole batch; ranks must divide it, or samples would weigh unequally


def batch(step: int, comm: dp.Communicator) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's rows: a function of the step alone, so that a run can go on anywhere."""
    x = torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(step))
    mine = x[comm.rank :: comm.world_size]
    return mine, mine.sin().sum(1, keepdim=True)


def save(path: Path, **state: object) -> None:
    """Whole or not at all: a rank may die at any time."""
    torch.save(state, unfinished := path.with_suffix(".unfinished"))
    unfinished.replace(path)


def digest_of(model: nn.Module) -> str:
    values = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(values).hexdigest()[:12]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--checkpoint", type=Path, help="a file that all hosts see")
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--backend", default="native", help="native or mpi")
    parser.add_argument("--fail-at", type=int, help="after this step the last rank dies, once")
    options = parser.parse_args()

    comm = dp.init(backend=options.backend)
    if ROWS % comm.world_size:
        parser.error(f"{comm.world_size} ranks can't have equal shares of {ROWS} rows")
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    first = 0
    if options.checkpoint is not None and options.checkpoint.exists():
        saved = torch.load(options.checkpoint)
        module.load_state_dict(saved["module"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    model = dp.DataParallel(module)

    loss = torch.zeros(1)
    for step in range(first, options.steps):
        x, y = batch(step, comm)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        if options.checkpoint is not None and comm.rank == 0 and (step + 1) % options.every == 0:
            state = {"module": module.state_dict(), "optimizer": optimizer.state_dict()}
            save(options.checkpoint, step=step + 1, **state)
        if step + 1 == options.fail_at and first == 0 and comm.rank == comm.world_size - 1:
            os._exit(1)

    total = loss.detach().clone()
    comm.all_reduce(total, "mean")
    if comm.rank == 0:
        ran = f"steps {first + 1} to {options.steps} on {comm.world_size} ranks, {comm.backend}"
        print(f"{ran}: loss {total.item():.4f}, parameters {digest_of(module)}")
    dp.finalize()


if __name__ == "__main__":
    main()
