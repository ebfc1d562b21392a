"""backend="nccl" on real GPUs: the CPU's bodies, order among streams, graphs, training."""

import os

import pytest
import torch

import dpcore
from dpcore.communicators.nccl import nccl_library
from tests.comm import matrix
from tests.cuda.dropped_work import keeps_memory_of_dropped_work
from tests.cuda.on_gpu import OnGpu
from tests.cuda.training import inputs, small_model, train
from tests.cuda_host.test_nccl import device_cases

GPUS = torch.cuda.device_count()
SHARES_GPU = (
    os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    and GPUS > 0
    and tuple(map(int, (nccl_library()["version"] or "0").split("."))) >= (2, 30, 3)
)


def assert_right(results):
    problems = [problem for _, of_rank in results for problem in of_rank]
    assert not problems, "\n".join(problems[:20])


def test_every_pair_of_values_in_a_world_of_one(comm):
    assert_right([matrix.run_cases(OnGpu(comm), device_cases(1))])


def body_of_rank(control, cases):
    """On the GPU with the rank's number, or all on one."""
    device = torch.device("cuda", control.rank % GPUS)
    torch.cuda.set_device(device)
    from dpcore.communicators.device import on_device

    comm = on_device(control, "nccl", device, timeout=30.0, algorithm="auto", deterministic=False)
    result = matrix.run_cases(OnGpu(comm), cases)
    comm.close()
    return result


@pytest.mark.parametrize("world", [2, 4, 8])
def test_every_pair_of_values_between_ranks(world):
    if world > GPUS and not (world == 2 and SHARES_GPU):
        pytest.skip(
            f"needs {world} GPUs (two ranks share one with NCCL 2.30.3 and "
            "NCCL_MULTI_RANK_GPU_ENABLE=1)"
        )
    assert_right(dpcore.spawn(body_of_rank, world, device_cases(world), timeout=120.0))


def test_a_call_does_not_wait_and_what_follows_does(comm):
    """Behind a long kernel: the host is back at once, the result is that of what came before."""
    x = torch.zeros(1 << 20, device="cuda")
    comm.all_reduce(x)  # connections, memory
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # about 0.1 s
    x.fill_(3)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work = comm.all_reduce(x, "mean", async_op=True)
    assert not work.is_completed(), "the call has waited for the GPU"
    work.wait()
    x.mul_(2)
    end.record()
    torch.cuda.synchronize()
    assert work.is_completed() and torch.equal(x, torch.full_like(x, 6))


def test_memory_that_is_freed_early_is_not_used_again(comm):
    keeps_memory_of_dropped_work(comm)


def test_captured_into_a_graph(comm):
    x = torch.ones(1000, device="cuda")
    comm.all_reduce(x, "mean", algorithm="ring/moves")
    comm.all_reduce(x, "mean")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
        comm.all_reduce(x, "mean")
        comm.all_reduce(x, "mean", algorithm="ring/moves")
    x.zero_()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(x, torch.full_like(x, 3))


def test_training_in_a_world_of_one_is_training_alone(comm):
    alone = train(small_model(), inputs(), lambda module: module)
    assert torch.equal(
        alone, train(small_model(), inputs(), lambda m: dpcore.DataParallel(m, comm=comm))
    )
