"""DataParallel over a communicator for devices: the contract of all implementations, and what is
different where work is ordered by streams."""

import threading
from functools import partial

import pytest
import torch
from torch import nn

import dpcore
from tests.data_parallel import contract
from tests.ranks.devices import calls, on_devices

pytestmark = pytest.mark.usefixtures("fake")


def wrap(schedule, module, comm):
    return dpcore.DataParallel(module, comm=comm, bucket_cap_mb=0.01, schedule=schedule)


@pytest.mark.parametrize("schedule", ["bucketed", "sequential"])
@pytest.mark.parametrize("check", contract.VALUES, ids=lambda check: check.__name__)
def test_contract(check, schedule):
    on_devices(lambda comm: check(comm, partial(wrap, schedule)), 3)


def train(comm, **options):
    module = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 3))
    generator = torch.Generator().manual_seed(0)  # torch's own is shared by ranks that are threads
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    model = dpcore.DataParallel(module, comm=comm, bucket_cap_mb=0.0005, **options)
    for step in range(3):
        model.zero_grad()
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + comm.rank))
        model(x).square().sum().backward()
    return model, torch.cat([p.grad.flatten() for p in model.parameters()])


def test_one_operation_per_bucket_and_registered_memory(fake):
    def body(comm):
        model, _ = train(comm)
        assert model.backend == "nccl"
        return len(model.bucket_report())

    buckets = on_devices(body, 2)[0]
    own = calls(fake)
    averages = [call for call in own if call.startswith("AllReduce") and call.endswith("op 4")]
    # Three in the first step, which cuts in the order of registration (bucket_plan.h).
    assert buckets == 2 and len(averages) == 3 + 2 * buckets
    registered = [call for call in own if call.startswith("CommRegister")]
    assert len(registered) == sum(call == "CommDeregister" for call in own) >= buckets


def test_memory_that_the_library_does_not_register_is_used_all_the_same(fake):
    fake.fake_nccl_fail(b"CommRegister", 4)
    first, second = on_devices(lambda comm: train(comm)[1], 2)
    assert torch.equal(first, second)


def test_deterministic_has_the_bits_of_the_processor():
    def body(comm):
        return train(comm, deterministic=True)[1]

    on_host = dpcore.spawn(body, 3, mode="threads")
    for host, device in zip(on_host, on_devices(body, 3), strict=True):
        assert torch.equal(host.view(torch.int32), device.view(torch.int32))


def test_an_error_names_the_bucket(fake):
    both_have_trained = threading.Barrier(2)

    def body(comm):
        model, _ = train(comm)
        both_have_trained.wait(60)
        fake.fake_nccl_fail(b"AllReduce", 4)
        with pytest.raises(
            dpcore.Error, match=r"bucket \d \(.*\), step \d+: .*ncclAllReduce: inv"
        ) as e:
            model(torch.ones(4, 8)).sum().backward()
        return str(e.value)

    # It fails at the first bucket of some rank; the other one hears of it there or in its next.
    assert any(said.startswith("bucket 0 (") for said in on_devices(body, 2))


def test_a_module_elsewhere_is_refused():
    def body(comm):
        with pytest.raises(dpcore.Unsupported, match=r"works on cpu, the parameters are on meta"):
            dpcore.DataParallel(nn.Linear(2, 2, device="meta"), comm=comm, init_sync=False)

    on_devices(body, 1)
