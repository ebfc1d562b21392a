"""Swing, an all-reduce of your own, wherever dpcore takes an algorithm.

    python examples/swing.py [ranks]                                       in init and per bucket
    dpcore bench --world 4 --algorithm two_shot,ring,examples/swing.py:swing
    dpcore show examples/swing.py:swing --world 8                          step by step
    DPCORE_ALGORITHM=examples/swing.py:swing torchrun ... train.py         without a change

Swing (De Sensi et al., NSDI 2024) is for networks that are rings or tori. Like halving and doubling
it takes 2 log2(N) steps and the fewest bytes, but its peers are nearer: 1, 1, 3, 5, 11, ... ranks
away, to alternating sides, instead of 1, 2, 4, 8, 16, ... So messages cross fewer links.
"""

from __future__ import annotations

import sys

import torch

import dpcore as dp


def swing(world: int) -> tuple[int, list[tuple[int, int, int, int, bool]]]:
    """The number of chunks, and moves (step, src, dst, chunk, reduce)."""
    steps = world.bit_length() - 1
    if world != 1 << steps:
        raise ValueError(f"swing is for 2, 4, 8, ... ranks, not for {world}")

    def peer(rank: int, step: int) -> int:
        distance = (1 - (-2) ** (step + 1)) // 3
        return (rank + (distance if rank % 2 == 0 else -distance)) % world

    def kept(rank: int, step: int) -> list[int]:
        """The chunks whose sums this rank and its later peers will finish."""
        later = [kept(peer(rank, other), other + 1) for other in range(step, steps)]
        return [rank, *(chunk for chunks in later for chunk in chunks)]

    moves = []
    for step in range(steps):
        for rank in range(world):
            other = peer(rank, step)
            # First what the peer keeps is added to the peer's. Then, in the reverse order of
            # steps, what this rank has kept is whole, and handed on.
            moves += [(step, rank, other, chunk, True) for chunk in kept(other, step + 1)]
            back = 2 * steps - 1 - step
            moves += [(back, rank, other, chunk, False) for chunk in kept(rank, step + 1)]
    return world, moves


class LargeBySwing(dp.LaunchSchedule):
    """Large buckets by swing, small ones in the fewest steps."""

    def bucket_ready(self, control: dp.LaunchControl, bucket: int) -> None:
        is_large = control.bytes(bucket) > 100_000
        control.launch(bucket, algorithm=swing if is_large else "one_shot")


def by_default(comm: dp.Communicator) -> str:
    """With ``dp.init(algorithm=swing)``, which gets here as an option of spawn."""
    tensor = torch.full((1000,), float(comm.rank))
    comm.all_reduce(tensor)
    assert bool(torch.all(tensor == sum(range(comm.world_size))))
    return str(comm.explain(tensor.nbytes)["all_reduce"]).splitlines()[0]


def per_bucket(comm: dp.Communicator) -> dict[str, int]:
    """How many buckets of a model took which path: "moves" is a list of moves."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(200, 200), torch.nn.ReLU(), torch.nn.Linear(200, 10)]
    model = dp.DataParallel(
        torch.nn.Sequential(*layers), schedule=LargeBySwing(), bucket_cap_mb=0.1
    )
    model(torch.randn(16, 200)).square().mean().backward()
    return {path: ran["operations"] for path, ran in comm.stats()["all_reduce"].items()}


if __name__ == "__main__":
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    print(dp.spawn(by_default, ranks, algorithm=swing)[0])
    print(f"buckets: {dp.spawn(per_bucket, ranks)[0]}")
