"""backend="cupy" on a real GPU, where CuPy is: results, order among streams, memory."""

import importlib.util

import pytest
import torch

import dpcore
from dpcore.comm.communicators.device import on_device
from tests.cuda.dropped_work import keeps_memory_of_dropped_work
from tests.cuda.on_gpu import GPUS, NEEDS, has_room_for, use_gpu_of


def why_not():
    """Why there is nothing to test, or nothing."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed"
    if GPUS == 0:
        return "torch sees no GPU"  # and CuPy would only be loaded for nothing
    try:
        from cupy.cuda import nccl
    except ImportError as problem:
        return f"CuPy can't be imported: {problem}"
    return "" if getattr(nccl, "available", True) else "this CuPy was built without NCCL"


WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "CuPy is there")


@pytest.fixture
def comm():
    yield dpcore.init("cupy", rank=0, world_size=1, device="cuda:0")
    dpcore.finalize()


def test_reductions_in_a_world_of_one(comm):
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32):
        x = torch.arange(1, 1004, device="cuda").to(dtype)
        for op in ("sum", "prod", "min", "max", "mean"):
            whole, part = x.clone(), torch.zeros_like(x)
            comm.all_reduce(whole, op)
            comm.reduce(whole, 0, op)
            comm.reduce_scatter(part, x, op)
            assert torch.equal(whole, x) and torch.equal(part, x), (dtype, op)
            comm.reduce_scatter(part.zero_(), x, op, sizes=[1003])
            assert torch.equal(part, x), (dtype, op)


def test_copies_in_a_world_of_one(comm):
    x = torch.arange(1003.0, device="cuda")
    calls = {
        "all_gather": lambda out: comm.all_gather(out, x),
        "all_gather of sizes": lambda out: comm.all_gather(out, x, sizes=[1003]),
        "gather": lambda out: comm.gather(out, x),
        "scatter": lambda out: comm.scatter(out, x),
        "all_to_all": lambda out: comm.all_to_all(out, x),
    }
    for name, call in calls.items():
        out = torch.zeros_like(x)
        call(out)
        assert torch.equal(out, x), name
    comm.broadcast(x)
    part = comm.split(0)
    part.all_reduce(x)
    part.close()
    assert torch.equal(x, torch.arange(1003.0, device="cuda"))


def test_a_call_does_not_wait_and_what_follows_does(comm):
    x, out = torch.zeros(1 << 20, device="cuda"), torch.zeros(1 << 20, device="cuda")
    comm.all_gather(out, x)  # connections, memory
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # about 0.1 s
    x.fill_(3)
    work = comm.all_gather(out, x, async_op=True)
    assert not work.is_completed(), "the call has waited for the GPU"
    work.wait()
    out.mul_(2)
    torch.cuda.synchronize()
    assert work.is_completed() and torch.equal(out, torch.full_like(out, 6))


def test_memory_of_dropped_work_is_not_used_again(comm):
    keeps_memory_of_dropped_work(comm)


def between_ranks(control):
    device = use_gpu_of(control.rank)
    comm = on_device(control, "cupy", device, timeout=30.0, algorithm="auto", deterministic=False)
    x = torch.full((5,), comm.rank + 1.0, device=device)
    comm.all_reduce(x)
    whole = torch.zeros(3, device=device) if comm.rank == 1 else None
    comm.gather(whole, x[: comm.rank + 1], 1, sizes=[1, 2])
    own = torch.zeros(comm.rank + 1, device=device)
    comm.scatter(own, whole, 1, sizes=[1, 2])
    torch.cuda.synchronize()
    comm.close()
    return x.tolist(), own.tolist()


@pytest.mark.skipif(not has_room_for(2), reason=f"needs 2 {NEEDS}")
def test_between_two_ranks():
    results = dpcore.spawn(between_ranks, 2, timeout=60.0)
    assert results == [([3.0] * 5, [3.0]), ([3.0] * 5, [3.0, 3.0])]
