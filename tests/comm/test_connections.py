"""Several connections for data between two ranks: the same results, and messages in order."""

import os

import pytest
import torch

from dpcore.comm.launch.spawn import run_processes


def results_with(connections, body, world=2):
    outcomes = run_processes(
        body,
        world,
        options={"transport": "tcp"},
        environment={"DPCORE_TCP_SOCKETS": str(connections)},
    )
    assert [outcome.error for outcome in outcomes] == [None] * world, outcomes
    return [outcome.result for outcome in outcomes]


def open_sockets(comm):
    comm.barrier()
    links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    count = sum(os.readlink(link).startswith("socket:") for link in links if os.path.islink(link))
    comm.barrier()
    return count


def test_there_are_as_many_as_were_asked_for():
    one, four = (results_with(connections, open_sockets, 3) for connections in (1, 4))
    assert [more - less for more, less in zip(four, one, strict=True)] == [3 * 2] * 3


@pytest.mark.parametrize("connections", (1, 2, 4))
def test_results_and_their_order(connections):
    def body(comm):
        def of_rank(rank, count):
            return torch.arange(count, dtype=torch.float64).remainder(1009).add(rank)

        ranks = range(comm.world_size)
        counts = (3, 65_537, 1 << 20, 40_000)
        tensors = [of_rank(comm.rank, count) for count in counts]
        works = [comm.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work, tensor in zip(works, tensors, strict=True):
            work.wait()
            assert torch.equal(tensor, sum(of_rank(r, tensor.numel()) for r in ranks))

        # Of one tag: large and small ones in turn, several frames each.
        following, before = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
        sizes = [70_000 if step % 3 == 0 else 10 for step in range(30)]
        received = [torch.empty(size, dtype=torch.float64) for size in sizes]
        works = [comm.recv(target, before, tag=7, async_op=True) for target in received]
        for step, size in enumerate(sizes):
            comm.send(of_rank(comm.rank + 100 * step, size), following, tag=7)
        for step, (work, target) in enumerate(zip(works, received, strict=True)):
            work.wait()
            assert torch.equal(target, of_rank(before + 100 * step, target.numel()))
        comm.barrier()

    results_with(connections, body, world=3)
