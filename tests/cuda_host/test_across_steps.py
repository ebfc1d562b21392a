"""Schedules across steps on devices of the host, where operations run beside the caller: every
program gives the bits of "bucketed"."""

import pytest
import torch
from torch import nn

import dpcore
from tests.across_steps.programs import CASES
from tests.across_steps.test_equal import SCHEDULES, gives_what_bucketed_gives
from tests.cuda_host.gradient_copies import counted
from tests.ranks.devices import on_devices

pytestmark = pytest.mark.usefixtures("fake")
# Carriers differ in how halves travel, and not in what a program does between them.
OVER_MAPPED_MEMORY = ("plain", "accumulation", "clipping", "unused", "zeroed in place")
WAYS = [*((name, "nccl") for name in CASES), *((name, "cuda") for name in OVER_MAPPED_MEMORY)]


@pytest.mark.parametrize(("name", "backend"), WAYS)
def test_every_program_gives_the_bits_of_bucketed(name, backend):
    on_devices(gives_what_bucketed_gives, 2, CASES[name], backend=backend)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_launch_brings_all_gradients_of_a_bucket(schedule):
    def body(comm):
        module = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
        model = dpcore.DataParallel(module, comm=comm, schedule=schedule, bucket_cap_mb=0.004)
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = dpcore.DistributedOptimizer(plain, model)

        def step():
            optimizer.zero_grad()
            model(torch.ones(2, 16)).sum().backward()
            optimizer.step()

        step()  # buckets are cut in its forward
        copies = counted(model, step)
        buckets = len(model.bucket_report())
        assert buckets > 1
        assert copies == {"launches": buckets, "together": 12, "alone": 0}

    on_devices(body, 2)
