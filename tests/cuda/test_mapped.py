"""backend="cuda" on one GPU that several ranks share, as threads and as processes; on several GPUs
where there are some."""

import pytest
import torch
from torch import nn

import dpcore
from dpcore.device_communicator import on_device
from tests.comm import matrix
from tests.cuda.on_gpu import OnGpu
from tests.cuda_host.test_nccl import device_cases

GPUS = max(torch.cuda.device_count(), 1)


def with_device(control, body, *args):
    """Runs the body on the GPU with the rank's number, or all on one. Each rank in a stream of its
    own: in one that threads share, the wait of one rank would stand before the work of another."""
    device = torch.device("cuda", control.rank % GPUS)
    torch.cuda.set_device(device)
    settings = {"timeout": 60.0, "algorithm": "auto", "deterministic": False}
    comm = on_device(control, "cuda", device, **settings)
    try:
        with torch.cuda.stream(torch.cuda.Stream(device)):
            return body(comm, *args)
    finally:
        comm.close()


def run_cases(comm, cases):
    return matrix.run_cases(OnGpu(comm), cases)


@pytest.mark.parametrize("mode", ["threads", "processes"])
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_every_pair_of_values_gives_what_the_reference_gives(world, mode):
    cases = device_cases(world)
    if mode == "processes":
        cases = cases[::5]  # ranks that are processes take turns on a GPU
    results = dpcore.spawn(with_device, world, run_cases, cases, mode=mode, timeout=120.0)
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


def train(module, inputs, wrap):
    model = wrap(module.cuda())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        model(inputs.cuda()).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten().cpu() for p in module.parameters()])


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8)).double()


def train_part(comm):
    inputs = torch.arange(32.0 * 64).view(32, 64).double() / 2048
    part = inputs.chunk(comm.world_size)[comm.rank]
    return train(small_model(), part, lambda m: dpcore.DataParallel(m, comm=comm))


@pytest.mark.parametrize("world", [2, 4])
def test_training_with_several_ranks_is_training_in_one_process(world):
    inputs = torch.arange(32.0 * 64).view(32, 64).double() / 2048
    alone = train(small_model(), inputs, lambda module: module)
    for parameters in dpcore.spawn(with_device, world, train_part, timeout=120.0):
        assert torch.allclose(parameters, alone, rtol=1e-10)
