"""The mean of a tensor over all ranks: torchrun --nproc-per-node 2 examples/all_reduce.py"""

import dpcore as dp

comm = dp.init()  # finds the other ranks by what torchrun put in the environment
gradient = comm.empty(1024, 1024)  # in memory that the other ranks can reach: nothing is copied
gradient.fill_(comm.rank + 1)

comm.all_reduce(gradient, op="mean")

if comm.rank == 0:
    print(f"{comm.world_size} ranks, mean {gradient.mean().item()}")
dp.finalize()
