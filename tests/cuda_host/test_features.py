"""Every feature of DataParallel over communicators for devices: what tests/data_parallel does over
those of the host."""

import pytest

import dpcore
from dpcore.ddp.torch_face.sync_batch_norm import torch_can
from tests.data_parallel import contract
from tests.data_parallel.test_everywhere import FEATURES, Ranks, all_features
from tests.ranks.devices import on_devices

WAYS = ("nccl", "streams", "kernels")  # of the last two: on one GPU, on one each


def over(way, body, world):
    if way == "nccl":
        return on_devices(body, world)
    uuids = ["one gpu"] * world if way == "streams" else None
    return on_devices(body, world, backend="cuda", uuids=uuids)


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("world", (1, 2, 3))
@pytest.mark.parametrize("way", WAYS)
def test_every_feature(way, world):
    def body(comm):
        return all_features(Ranks(comm.rank, comm.world_size, comm=comm))

    assert over(way, body, world) == [len(FEATURES)] * world


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("check", contract.GUARDS, ids=lambda check: check.__name__)
def test_faults_that_would_pass_in_silence(check, way):
    def wrap(module, comm):
        return dpcore.DataParallel(module, comm=comm, bucket_cap_mb=0.01)

    over(way, lambda comm: check(comm, wrap), 3)


def test_who_normalises_over_ranks():
    """torch's layer is silent where it does not: on a GPU without torch.distributed."""
    group = object()
    assert torch_can("cuda", group)
    assert not torch_can("cuda", None)
    assert not torch_can("cpu", group) and not torch_can("cpu", None)
