"""A little of everything that launches a kernel of ours, for NVIDIA's compute-sanitizer.

    compute-sanitizer --tool memcheck python -m tests.cuda.every_kernel

Reductions of every type with tails and odd offsets, and unless --reductions is given copies of many
tensors, and a training of two ranks: threads, or with --processes processes. These wait for each
other in their streams: kernels that wait for each other would wait for ever, since the tools let
one run at a time. Prints "done" when results were right.
"""

import sys

import torch

import dpcore
from dpcore import _C
from tests.cuda.on_gpu import settle
from tests.cuda.test_mapped import run_with
from tests.cuda_host.test_elements import VALID, ordinary

PLACE = "cuda:0"
COUNT = 1003  # whole packs of 16 bytes, and a tail


def reductions():
    generator = torch.Generator().manual_seed(0)
    for dtype, op in VALID:
        inputs = [ordinary(dtype, COUNT + 1, generator).to(PLACE) for _ in range(2)]
        output = torch.zeros_like(inputs[0])
        for offset in (0, 1):
            at = [x[offset:].data_ptr() for x in (*inputs, output)]
            _C._reduce(dtype, op, at[:2], at[2:], COUNT, device=PLACE)
    torch.cuda.synchronize()


def layers(device):
    return torch.nn.Sequential(torch.nn.Linear(33, 65), torch.nn.Linear(65, 3)).to(device)


def step(model, device):
    model(torch.ones(2, 33, device=device)).sum().backward()


def training(comm):
    ddp = dpcore.DataParallel(layers(comm.device), comm=comm)
    for _ in range(2):
        step(ddp, comm.device)
    ordinary_memory = torch.ones(COUNT, device=comm.device)
    comm.all_reduce(ordinary_memory, "sum")
    settle()
    return float(ordinary_memory.sum())


def load_torchs_kernels():
    """Their first launch waits for the device, where one rank may wait for another."""
    alone = layers(PLACE)
    for _ in range(2):
        step(alone, PLACE)
    float(torch.ones(COUNT, device=PLACE).sum())


if __name__ == "__main__":
    reductions()
    if "--reductions" not in sys.argv:
        mode = "processes" if "--processes" in sys.argv else "threads"
        load_torchs_kernels()
        sums = dpcore.spawn(run_with, 2, "stream", training, mode=mode, timeout=300.0)
        assert sums == [2.0 * COUNT] * 2, sums
    print("done")
