"""A wrapped model beside Accelerate's loader and optimizer, against one process with all rows."""

import importlib.util
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dpcore
from tests.test_lightning import free_port

RATE, ROWS = 0.1, torch.arange(48.0).view(16, 3) / 16
is_missing = importlib.util.find_spec("accelerate") is None
pytestmark = [
    pytest.mark.skipif(is_missing, reason="needs accelerate: pip install accelerate"),
    pytest.mark.usefixtures("mistakes_are_errors"),
]


def model():
    torch.manual_seed(1)
    return nn.Linear(3, 1)


def train(network, optimizer, batches, backward):
    for x in batches:
        optimizer.zero_grad()
        backward(network(x).square().mean())
        optimizer.step()


def body(comm, port):
    rank = comm.rank
    dpcore.finalize()
    said = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    said |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in said.items()})
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    wrapped = dpcore.DataParallel(model())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=RATE)
    loader = torch.utils.data.DataLoader(ROWS, batch_size=2)
    optimizer, loader = accelerator.prepare(optimizer, loader)
    train(wrapped, optimizer, loader, accelerator.backward)
    alone = model()
    sgd = torch.optim.SGD(alone.parameters(), lr=RATE)
    train(alone, sgd, ROWS.split(4), lambda loss: loss.backward())
    torch.testing.assert_close(
        dict(accelerator.unwrap_model(wrapped).state_dict()), dict(alone.state_dict())
    )
    twice = accelerator.prepare(dpcore.DataParallel(model()))
    with pytest.raises(dpcore.Unsupported, match="Wrap the model once"):
        twice(ROWS)
    dist.destroy_process_group()


def test_accelerate():
    dpcore.spawn(body, 2, free_port())
