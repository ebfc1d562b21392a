"""backend="cuda" on one GPU that several ranks share, as threads and as processes; on several GPUs
where there are some."""

import os
import threading

import pytest
import torch

import dpcore
from dpcore.comm.communicators.device import on_device
from tests.comm import matrix
from tests.cuda.on_gpu import GPUS, OnGpu, settle, use_gpu_of
from tests.cuda.training import inputs, small_model, train, train_part
from tests.cuda_host.test_nccl import device_cases
from tests.cuda_host.test_push import assert_same_bits, every_collective, ordinary


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch):
    """with_device() sets the variable, which threads of this process share."""
    monkeypatch.setenv("DPCORE_CUDA_SYNC", "auto")


CAPTURING = threading.Lock()
PATIENCE = 30.0  # of communicators: a test that hangs says where before its own time is over


def ways(worlds):
    """(world, mode, the barrier between ranks). On one GPU, kernels that wait can run side by side
    only as those of one process: of several, one at a time has the GPU."""
    found = []
    for world in worlds:
        for mode in ("threads", "processes"):
            for barrier in ("stream", "fused"):
                alone = mode == "processes" and barrier == "fused" and world > GPUS
                reason = f"needs {world} GPUs: kernels of several processes take turns on one"
                mark = pytest.mark.skipif(alone, reason=reason)
                found.append(pytest.param(world, mode, barrier, marks=mark))
    return found


def with_device(control, body, *args, barrier="auto"):
    """Runs the body on the GPU with the rank's number, or all on one. Each rank in a stream of its
    own: in one that threads share, the wait of one rank would stand before the work of another."""
    os.environ["DPCORE_CUDA_SYNC"] = barrier
    device = use_gpu_of(control.rank)
    settings = {"timeout": PATIENCE, "algorithm": "auto", "deterministic": False}
    comm = on_device(control, "cuda", device, **settings)
    try:
        with torch.cuda.stream(torch.cuda.Stream(device)):
            return body(comm, *args)
    finally:
        comm.close()


def run_cases(comm, cases):
    return matrix.run_cases(OnGpu(comm), cases)


def run_with(control, barrier, body, *args):
    return with_device(control, body, *args, barrier=barrier)


@pytest.mark.parametrize(("world", "mode", "barrier"), ways([2, 3, 4, 8]))
def test_every_pair_of_values_gives_what_the_reference_gives(world, mode, barrier):
    cases = device_cases(world)
    if mode == "processes":
        cases = cases[::5]  # ranks that are processes take turns on a GPU
    results = dpcore.spawn(run_with, world, barrier, run_cases, cases, mode=mode, timeout=120.0)
    problems = [problem for _, of_rank in results for problem in of_rank]
    assert not problems, "\n".join(problems[:20])


def bits(comm):
    generator = torch.Generator().manual_seed(comm.rank)
    results = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(100_003, generator=generator).to(dtype)
        comm.all_reduce(x, "mean")
        results.append(x.view(torch.uint8))
    return results


def test_the_bits_are_those_of_the_processor():
    on_host = dpcore.spawn(bits, 3, mode="threads")
    on_gpu = dpcore.spawn(with_device, 3, lambda comm: bits(OnGpu(comm)), mode="threads")
    for host, gpu in zip(on_host, on_gpu, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(host, gpu, strict=True))


def in_arena(comm):
    return every_collective(comm, lambda n, dtype: settled(comm.empty(n, dtype=dtype)))


def in_ordinary_memory(comm):
    return every_collective(
        comm, lambda n, dtype: settled(torch.zeros(n, dtype=dtype, device=comm.device))
    )


def settled(tensor):
    settle()
    return tensor


@pytest.mark.parametrize(("world", "mode", "barrier"), ways([2, 3, 4, 8]))
def test_mapped_memory_has_the_bits_of_the_processor(world, mode, barrier):
    host = dpcore.spawn(lambda comm: every_collective(comm, ordinary), world, mode="threads")
    for body, path in ((in_ordinary_memory, "two_shot/stage"), (in_arena, "direct/push")):
        device = dpcore.spawn(run_with, world, barrier, body, mode=mode, timeout=120.0)
        assert_same_bits(host, device)
        assert all(path in paths for _, paths in device)


def captured(comm, together):
    """Ranks that are threads of one process: torch waits for the whole device when a capture
    begins, and nobody may wait for the device while one goes on. So all come to each step before
    the next."""
    stream = torch.cuda.current_stream()
    x = torch.full((3_000_000,), comm.rank + 1.0, device=comm.device)
    comm.all_reduce(x)
    comm.all_reduce(torch.ones(1000, device=comm.device))
    stream.synchronize()
    together.wait(30)
    graph = torch.cuda.CUDAGraph()
    # In a stream of its own: torch's is shared.
    with (
        CAPTURING,
        torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"),
    ):
        comm.all_reduce(x, "mean")
        x.add_(1)
    together.wait(30)
    for _ in range(3):
        graph.replay()
        comm.all_reduce(torch.ones(1000, device=comm.device))  # between two replays
    stream.synchronize()
    return x.unique().tolist()


def test_captured_into_a_graph_where_kernels_meet():
    together = threading.Barrier(2)
    results = dpcore.spawn(run_with, 2, "fused", captured, together, mode="threads")
    assert results == [[6.0], [6.0]]


@pytest.mark.parametrize("world", [2, 4])
def test_training_with_several_ranks_is_training_in_one_process(world):
    alone = train(small_model(), inputs(), lambda module: module)
    for parameters in dpcore.spawn(with_device, world, train_part, timeout=120.0):
        assert torch.allclose(parameters, alone, rtol=1e-10)
