"""A process group of torch behind the methods of dpcore's communicator."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

import dpcore
from dpcore.comm.communicators.torch_group import TorchCommunicator
from tests.ranks.groups import in_group


def of_rank(rank, count=6):
    return torch.arange(float(count)) + 10 * rank


def every_method(comm):
    rank, world = comm.rank, comm.world_size
    ranks = range(world)
    total = sum(of_rank(r) for r in ranks)
    for op, wanted in (
        ("sum", total),
        ("mean", total / world),
        ("max", of_rank(world - 1)),
        ("prod", torch.stack([of_rank(r) for r in ranks]).prod(0)),
    ):
        tensor = of_rank(rank)
        comm.all_reduce(tensor, op)
        torch.testing.assert_close(tensor, wanted)
    tensor = of_rank(rank)
    comm.all_reduce(tensor, "premul_sum", factor=0.5)
    torch.testing.assert_close(tensor, total / 2)
    whole = torch.tensor([100, -7, 3], dtype=torch.int8) - rank
    comm.all_reduce(whole, "mean")
    sums = sum(torch.tensor([100, -7, 3]) - r for r in ranks).to(torch.int8)  # 100 + 99 wraps
    assert whole.tolist() == [int(n / world) for n in sums.tolist()]
    narrow = torch.full((4,), 60000.0, dtype=torch.float16)  # a sum of two is too large
    comm.all_reduce(narrow, "mean")
    assert narrow.tolist() == [60000.0] * 4
    with pytest.raises(dpcore.Unsupported, match=r"mean has no meaning for torch\.bool"):
        comm.all_reduce(torch.ones(2, dtype=torch.bool), "mean")
    array = np.full(3, rank + 1.0)
    work = comm.all_reduce(array, "mean", async_op=True)
    work.wait()
    assert work.is_completed() and array.tolist() == [(world + 1) / 2] * 3
    comm.broadcast(tensor.copy_(of_rank(rank)), 1)
    assert torch.equal(tensor, of_rank(1))
    tensor = of_rank(rank)
    comm.reduce(tensor, 1, "mean")
    torch.testing.assert_close(tensor, total / world if rank == 1 else of_rank(rank))

    part = torch.empty(6 // world)
    comm.reduce_scatter(part, of_rank(rank), "mean")
    torch.testing.assert_close(part, (total / world).chunk(world)[rank])
    sizes = [r + 1 for r in ranks]
    joined = torch.empty(sum(sizes))
    comm.all_gather(joined, of_rank(rank, rank + 1), sizes=sizes)
    assert torch.equal(joined, torch.cat([of_rank(r, r + 1) for r in ranks]))
    target = torch.empty(6 * world) if rank == 0 else None
    comm.gather(target, of_rank(rank))
    assert target is None or torch.equal(target, torch.cat([of_rank(r) for r in ranks]))
    own = torch.empty(rank + 1)
    comm.scatter(own, joined if rank == 1 else None, 1, sizes=sizes)
    assert torch.equal(own, of_rank(rank, rank + 1))
    exchanged = torch.empty(world)
    comm.all_to_all(exchanged, torch.full((world,), float(rank)))
    assert exchanged.tolist() == list(ranks)

    if rank == 0:
        comm.send(of_rank(0), 1, tag=3)
    elif rank == 1:
        work = comm.recv(tensor, None, tag=3, async_op=True)
        work.wait()
        assert torch.equal(tensor, of_rank(0)) and work.source == 0
    comm.barrier(timeout=30)
    alone = comm.split(rank)
    assert alone.world_size == 1 and comm.split(None) is None
    with pytest.raises(dpcore.Unsupported, match="no algorithm"):
        comm.all_reduce(tensor, algorithm="ring")
    future = comm.all_reduce(tensor.fill_(1), async_op=True).get_future()
    assert future.wait()[0] is tensor and tensor[0] == world


@pytest.mark.parametrize("backend", ("gloo", "dpcore"))
def test_ranks_that_were_in_different_numbers_of_groups_split_again(backend):
    def body():
        comm = TorchCommunicator()
        comm.split(0 if comm.rank < 2 else None)
        pair = comm.split(comm.rank // 2)
        if comm.rank < 2:
            pair.split(comm.rank)
        again = comm.split(0)
        tensor = torch.ones(1)
        again.all_reduce(tensor)
        assert tensor.item() == again.world_size == 4

    in_group(body, 4, backend=backend, timeout=10)


@pytest.mark.parametrize("backend", ("gloo", "dpcore"))
def test_every_method_over_a_group_of_torch(backend):
    def body():
        comm = dpcore.init(backend="torch")
        assert isinstance(comm, TorchCommunicator) and dpcore.current() is comm
        assert comm.backend == f"torch {backend}"
        every_method(comm)
        comm.close()
        with pytest.raises(dpcore.Error, match="finalized"):
            comm.barrier()

    in_group(body, 2, backend=backend)


def test_without_a_group_of_torch_there_is_nothing_to_use():
    with pytest.raises(dpcore.Unsupported, match="init_process_group"):
        dpcore.init(backend="torch")


def test_it_has_every_method_of_the_communicator():
    """Those that are about dpcore's own core apart."""
    methods = {name for name in vars(dpcore.Communicator) if not name.startswith("_")}
    assert methods - set(dir(TorchCommunicator)) <= {
        "monitored_barrier",
        "backend",
        "explain",
        "hosts",
    }


def test_training_over_it_is_exact():
    """The reducer of dpcore over a network of torch: crosswise to torch's DDP over dpcore."""

    def body():
        torch.manual_seed(3)
        layer = torch.nn.Linear(4, 2)
        model = dpcore.DataParallel(layer, comm=TorchCommunicator())
        rows = torch.ones(2, 4) * (dist.get_rank() + 1)
        model(rows).sum().backward()
        return layer.weight.grad.tolist(), model.backend

    for gradient, backend in in_group(body, 2, backend="gloo"):
        assert gradient == [[3.0] * 4] * 2 and backend == "torch gloo"


@pytest.mark.parametrize("end", ["close", "abort"])
def test_a_model_over_one_that_was_closed_does_not_train(end):
    """The reducer calls the process group itself, which lives on."""

    def body():
        comm = TorchCommunicator()
        model = dpcore.DataParallel(torch.nn.Linear(4, 2), comm=comm)
        for _ in range(3):  # the second agrees on buckets, by a call of its own
            model(torch.ones(1, 4)).sum().backward()
        comm.close() if end == "close" else comm.abort("enough")
        with torch.no_grad():
            model(torch.ones(1, 4))
        with pytest.raises(dpcore.Error, match="was finalized"):
            model(torch.ones(1, 4)).sum().backward()

    in_group(body, 2, backend="gloo")
