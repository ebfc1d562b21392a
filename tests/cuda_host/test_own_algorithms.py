"""Algorithms of a program's own on devices: by default, in groups and in a call."""

from functools import partial

import pytest
import torch

import dpcore
from tests.ranks.devices import on_devices
from tests.swing import SWING

pytestmark = pytest.mark.usefixtures("fake")


def pairs(world):
    return [(0, 0, 1, 0, True), (0, 1, 0, 0, True)]


def summed(comm, **options):
    tensor = torch.arange(100.0) + comm.rank
    comm.all_reduce(tensor, **options)
    return tensor.sum().item() == comm.world_size * 4950 + 100 * sum(range(comm.world_size))


@pytest.mark.parametrize("backend", ["cuda", "nccl"])
def test_devices_run_it_too(backend):
    def body(comm):
        comm._run_by_default(SWING)
        half = comm.split(comm.rank // 2)
        assert summed(comm) and summed(half)
        assert summed(half, algorithm=partial(pairs))
        with pytest.raises(dpcore.Unsupported, match="algorithm pairs for 4 ranks is wrong"):
            comm.all_reduce(torch.ones(5), algorithm=pairs)
        return half.stats()["paths"]

    for ran in on_devices(body, 4, backend=backend):
        assert backend == "nccl" or ran == {"moves": 2}
