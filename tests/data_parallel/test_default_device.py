"""A program may have said where tensors are made by default: what DataParallel makes for itself is
where it has to be all the same."""

import pytest
import torch
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision

import dpcore
from tests.data_parallel.models import Small, batch, part
from tests.ranks.devices import on_devices

NARROW = _MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16)
OPTIONS = (
    {},
    {"find_unused_parameters": True},
    {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
    {"static_graph": True},
    {"bucket_cap_mb": "auto"},
    {"gradient_as_bucket_view": False, "batched_grad_copy": True},
    {"mixed_precision": NARROW},
    {"schedule": "per_parameter"},
)


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.SyncBatchNorm(6).double()
        self.small = Small()

    def forward(self, x):
        return self.small(self.norm(x))


def train(model, inputs):
    for x in inputs:
        model.zero_grad()
        model(x).square().sum().backward()


def gradients(body, backend):
    first, second = (
        on_devices(body, 2, backend="cuda")
        if backend == "a device"
        else dpcore.spawn(body, 2, mode="threads")
    )
    assert first == second and len(first) > 5


def sums_of(module):
    return [p.grad.double().sum().item() for p in module.parameters() if p.grad is not None]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
@pytest.mark.parametrize("backend", ("shared memory", "a device"))
def test_training(options, backend):
    def body(comm):
        narrow = "mixed_precision" in options
        module = Small(seed=7 + comm.rank).float() if narrow else Normalised()
        inputs = [part(batch(step)[0], comm) for step in range(3)]
        inputs = [x.float() for x in inputs] if narrow else inputs
        with torch.device("meta"):  # nothing can be computed with what is made there
            train(dpcore.DataParallel(module, comm=comm, **options), inputs)
        return sums_of(module)

    gradients(body, backend)


@pytest.mark.parametrize("backend", ("shared memory", "a device"))
def test_uneven_inputs(backend):
    def body(comm):
        module = Small(seed=7 + comm.rank)
        inputs = [part(batch(step)[0], comm) for step in range(1 + comm.rank)]
        with torch.device("meta"):
            model = dpcore.DataParallel(module, comm=comm)
            with model.join():
                train(model, inputs)
            train(model, inputs[:1])
        return sums_of(module)

    gradients(body, backend)
