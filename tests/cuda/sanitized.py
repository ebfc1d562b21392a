"""A little of everything that launches a kernel of ours, for NVIDIA's compute-sanitizer.

    compute-sanitizer --tool memcheck python -m tests.cuda.sanitized

Reductions of every type with tails and odd offsets, copies of many tensors, and ranks that meet, by
two threads of this process (with --fused in both ways). Prints "done" when results were right.
"""

import sys

import torch

import dpcore
from dpcore import _C
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
            _C._reduce(dtype, op, at[:2], at[2:], COUNT, place=PLACE)
    torch.cuda.synchronize()


def training(comm):
    model = torch.nn.Sequential(torch.nn.Linear(33, 65), torch.nn.Linear(65, 3)).to(comm.device)
    ddp = dpcore.DataParallel(model, comm=comm)
    for _ in range(2):
        ddp(torch.ones(2, 33, device=comm.device)).sum().backward()
    ordinary_memory = torch.ones(COUNT, device=comm.device)
    comm.all_reduce(ordinary_memory, "sum")
    return float(ordinary_memory.sum())


if __name__ == "__main__":
    reductions()
    # The other tools may let kernels run one after the other, where these wait for each other.
    for meeting in ("stream", "fused") if "--fused" in sys.argv else ("stream",):
        sums = dpcore.spawn(run_with, 2, meeting, training, mode="threads", timeout=300.0)
        assert sums == [2.0 * COUNT] * 2, sums
    print("done")
