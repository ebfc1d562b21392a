"""Every feature of DataParallel on a GPU: the bodies of tests/data_parallel, made there."""

import pytest
import torch

import dpcore
from tests.cuda.test_mapped import with_device
from tests.data_parallel import contract
from tests.data_parallel.test_everywhere import FEATURES, Ranks, all_features


def wrap(module, comm):
    return dpcore.DataParallel(module, comm=comm, bucket_cap_mb=0.01)


def features(comm):
    with torch.device(comm.device):
        return all_features(Ranks(comm.rank, comm.world_size, comm=comm))


def keeps(comm, checks):
    with torch.device(comm.device):
        for check in checks:
            check(comm, wrap)


def test_every_feature_over_nccl_in_a_world_of_one(comm):
    assert features(comm) == len(FEATURES)


@pytest.mark.parametrize("world", [2, 4])
def test_every_feature_over_mapped_memory(world):
    results = dpcore.spawn(with_device, world, features, mode="processes", timeout=120.0)
    assert results == [len(FEATURES)] * world


# After a fault nothing more can be done over a communicator; all else needs two processes only.
@pytest.mark.parametrize(
    "checks",
    [contract.VALUES, *([check] for check in contract.GUARDS)],
    ids=["values", *(check.__name__ for check in contract.GUARDS)],
)
def test_contract_over_mapped_memory(checks):
    dpcore.spawn(with_device, 2, keeps, checks, mode="processes", timeout=70.0)
