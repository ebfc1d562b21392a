"""The smallest things first, each alone and with little patience: on a machine where something of
CUDA does not work as thought, this says which of it."""

import pytest
import torch

import dpcore
from dpcore import _C
from dpcore.comm.communicators.device import on_device
from tests.cuda.on_gpu import GPUS, settle, use_gpu_of

PATIENCE = 8.0
MEMORY = {"threads": ["address", "descriptor"], "processes": ["descriptor", "ipc"]}
WAYS = [
    (mode, barrier, memory)
    for mode in ("threads", "processes")
    for barrier in ("stream", "fused")
    for memory in MEMORY[mode]
    if mode == "threads" or barrier == "stream" or GPUS > 1
]


def test_a_kernel_runs():
    assert _C.cuda_probe()["problem"] == ""


def test_a_reduction():
    x, y, out = (torch.full((1003,), value, device="cuda") for value in (1.0, 2.0, 0.0))
    _C._reduce(
        "float32", "sum", [x.data_ptr(), y.data_ptr()], [out.data_ptr()], 1003, device="cuda:0"
    )
    assert out.unique().tolist() == [3.0]


def start(control, environment):
    import os

    os.environ.update(environment)
    device = use_gpu_of(control.rank)
    torch.ones(2, device=device).unique().tolist()  # pinned memory may wait for the device
    settings = {"timeout": PATIENCE, "algorithm": "auto", "deterministic": False}
    return on_device(control, "cuda", device, **settings)


def each_step(control, environment):
    """What was reached, in order."""
    comm = start(control, environment)
    reached = [comm.stats()["library"]]
    try:
        with torch.cuda.stream(torch.cuda.Stream(comm.device)):
            comm.barrier()
            reached.append("barrier")
            for shared in (False, True):
                make = comm.empty if shared else torch.empty
                where = {} if shared else {"device": comm.device}
                for count in (5, 1_000_000):
                    x = make(count, dtype=torch.float32, **where).fill_(comm.rank + 1.0)
                    comm.all_reduce(x)
                    settle()
                    assert x.unique().tolist() == [3.0], x
                    reached.append(f"{count} elements{' of the arena' if shared else ''}")
            x = torch.full((7,), float(comm.rank), device=comm.device)
            y = torch.empty_like(x)
            comm.exchange(sends=[(x, 1 - comm.rank)], receives=[(y, 1 - comm.rank)])
            settle()
            assert y.unique().tolist() == [1.0 - comm.rank]
            reached.append("messages")
    except Exception as problem:
        raise AssertionError(f"rank {comm.rank} came behind {reached}: {problem}") from problem
    finally:
        comm.close()
    return reached


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("mode", "barrier", "memory"), WAYS)
def test_two_ranks(mode, barrier, memory, monkeypatch, record_property):
    environment = {"DPCORE_CUDA_SYNC": barrier, "DPCORE_CUDA_MEMORY": memory}
    for name in environment:
        monkeypatch.setenv(name, "")  # as it was, behind ranks that are threads
    results = dpcore.spawn(each_step, 2, environment, mode=mode, timeout=20.0)
    assert results[0][-1] == results[1][-1] == "messages"
    assert f"({memory}), barrier: {barrier}" in results[0][0]
    record_property("library", results[0][0])


@pytest.mark.timeout(60)
def test_nccl_alone(record_property):
    comm = dpcore.init("nccl", rank=0, world_size=1, device="cuda:0", timeout=PATIENCE)
    try:
        x = torch.full((1003,), 3.0, device="cuda")
        comm.all_reduce(x, "mean")
        assert x.unique().tolist() == [3.0]
        record_property("library", comm.stats()["library"])
    finally:
        dpcore.finalize()


def test_the_device_that_is_current_stays_so():
    if GPUS < 2:
        pytest.skip("needs 2 GPUs")
    before = torch.cuda.current_device()
    x = torch.full((3,), 2.0, device="cuda:1")
    _C._reduce("float32", "sum", [x.data_ptr()], [x.data_ptr()], 3, device="cuda:1")
    assert torch.cuda.current_device() == before
