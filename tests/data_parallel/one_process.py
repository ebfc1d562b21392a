"""Runs a program over ranks and as one process with the whole batch, and compares the results."""

import torch

import dpcore
from tests.data_parallel.models import Small, batch, part

WORLD = 2


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def compare_with_one_process(run, make=Small, **options):
    """``run(model, inputs)`` returns tensors; ``inputs(n)`` is the rank's part of batch ``n``."""

    def body(comm):
        model = dpcore.DataParallel(make(), comm=comm, **{"bucket_cap_mb": 0.01, **options})
        got = run(model, lambda n: [part(t, comm) for t in batch(n)])
        wanted = run(make(), batch)
        for number, (mine, other) in enumerate(zip(got, wanted, strict=True)):
            torch.testing.assert_close(
                torch.as_tensor(mine), torch.as_tensor(other), msg=lambda m, n=number: f"{n}: {m}"
            )
        return model

    dpcore.spawn(body, WORLD, mode="threads")


def backward(model, x_and_y):
    x, y = x_and_y
    (model(x) - y).square().mean().backward()
