"""Local updates over communicators for devices: the same training as over dpcore's core."""

import pytest
from torch import nn

import dpcore as dp
from tests.local_updates.test_local_values import diloco, local_sgd
from tests.local_updates.twin import distance, outer_nesterov
from tests.ranks.devices import on_devices

pytestmark = pytest.mark.usefixtures("fake")
STREAMED = {"fragments": 2, "fragment_sync_delay": 1}


def both(comm, **options):
    return nn.ModuleList([local_sgd(comm, 4), diloco(comm, outer_nesterov, 4, **options)])


@pytest.mark.parametrize("backend", ("nccl", "cuda"))
@pytest.mark.parametrize("options", ({}, STREAMED, STREAMED | {"bits": 8}), ids=str)
def test_devices_train_the_same(backend, options):
    models = on_devices(lambda comm: both(comm, **options), 2, backend=backend)
    assert distance(models[0], models[1]) == 0
    on_cpus = dp.spawn(lambda comm: both(comm, **options), 2, mode="threads")
    assert distance(models[0], on_cpus[0]) < 1e-6
