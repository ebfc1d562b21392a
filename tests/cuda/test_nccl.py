"""backend="nccl" on real GPUs: the CPU's bodies, order among streams, graphs, training."""

import time

import pytest
import torch

import dpcore
from dpcore.comm.communicators.device import on_device
from tests.comm import matrix
from tests.cuda.dropped_work import keeps_memory_of_dropped_work
from tests.cuda.on_gpu import NEEDS, OnGpu, has_room_for, settle, use_gpu_of
from tests.cuda.training import inputs, small_model, train, train_part
from tests.cuda_host.test_nccl import device_cases


def assert_right(results):
    problems = [problem for _, of_rank in results for problem in of_rank]
    assert not problems, "\n".join(problems[:20])


def test_every_pair_of_values_in_a_world_of_one(comm):
    assert_right([matrix.run_cases(OnGpu(comm), device_cases(1))])


def of_rank(control, body, *args):
    """On the GPU with the rank's number, or all on one."""
    device = use_gpu_of(control.rank)
    comm = on_device(control, "nccl", device, timeout=30.0, algorithm="auto", deterministic=False)
    try:
        return body(comm, *args)
    finally:
        comm.close()


def cases_of_rank(comm, cases):
    return matrix.run_cases(OnGpu(comm), cases)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_every_pair_of_values_between_ranks(world):
    if not has_room_for(world):
        pytest.skip(f"needs {world} {NEEDS}")
    cases = device_cases(world)
    assert_right(dpcore.spawn(of_rank, world, cases_of_rank, cases, timeout=120.0))


@pytest.mark.skipif(not has_room_for(2), reason=f"needs 2 {NEEDS}")
def test_training_with_two_ranks_is_training_in_one_process():
    alone = train(small_model(), inputs(), lambda module: module)
    for parameters in dpcore.spawn(of_rank, 2, train_part, timeout=60.0):
        assert torch.allclose(parameters, alone, rtol=1e-10)


def what_a_rank_alone_hears(comm, peer_aborts):
    """NCCL's kernel waits on the GPU for a peer that never comes."""
    x = torch.ones(1 << 20, device=comm.device)
    comm.all_reduce(x)  # connections, memory
    settle()
    if comm.rank == 1:
        time.sleep(1.0)
        if peer_aborts:
            comm.abort("enough")
        else:
            time.sleep(4.0)
        return ""
    with pytest.raises(dpcore.Error) as caught:
        comm.all_reduce(x, async_op=True, timeout=20.0 if peer_aborts else 2.0).wait(30.0)
    with pytest.raises(dpcore.Error):
        comm.all_reduce(x)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.skipif(not has_room_for(2), reason=f"needs 2 {NEEDS}")
@pytest.mark.parametrize("peer_aborts", [True, False], ids=["gives up", "never comes"])
def test_what_waits_on_the_gpu_is_aborted(peer_aborts):
    said, _ = dpcore.spawn(of_rank, 2, what_a_rank_alone_hears, peer_aborts, timeout=60.0)
    if peer_aborts:
        assert said.startswith("PeerLost") and "rank 1 gave up: enough" in said
    else:
        assert said.startswith("Timeout") and "rank 1 has not called it" in said


def test_abort_ends_what_is_in_flight(comm):
    x = torch.zeros(1 << 20, device="cuda")
    comm.all_reduce(x)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # about 0.1 s
    work = comm.all_reduce(x, async_op=True)
    comm.abort("enough")
    with pytest.raises(dpcore.PeerLost, match="gave up: enough"):
        work.wait(20.0)
    with pytest.raises(dpcore.PeerLost, match="gave up: enough"):
        comm.all_reduce(x)


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
