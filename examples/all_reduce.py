"""The first lines with dpcore: torchrun --nproc-per-node 2 examples/all_reduce.py"""

import torch

import dpcore as dp

comm = dp.init()  # rank and world from torchrun, or a world of one
gradient = comm.empty(1_000_000)  # memory that the other ranks of the host can reach
gradient.fill_(comm.rank + 1)
comm.all_reduce(gradient, op="mean")  # in place, every rank holds the mean

ordinary = torch.arange(4.0) * comm.rank  # any CPU tensor or numpy array will do
work = comm.all_reduce(ordinary, async_op=True)
work.wait()
if comm.rank == 0:
    print(gradient[0].item(), ordinary.tolist(), comm.stats()["all_reduce"])
dp.finalize()
