"""Every collective of torch.distributed over the backend "dpcore"."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import dpcore
from tests.ranks.groups import error_of, in_group

NUMBERS = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
)
REDUCTIONS = {
    dist.ReduceOp.SUM: lambda parts: sum(parts[1:], parts[0]),
    dist.ReduceOp.PRODUCT: lambda parts: torch.stack(parts).prod(0),
    dist.ReduceOp.MIN: lambda parts: torch.stack(parts).amin(0),
    dist.ReduceOp.MAX: lambda parts: torch.stack(parts).amax(0),
}


def of_rank(rank, count=7, dtype=torch.float32):
    """Small whole numbers: exact in every type, for sums and products of three ranks."""
    return ((torch.arange(count) + rank) % 4 + 1).to(dtype)


def everybody(count=7, dtype=torch.float32):
    return [of_rank(rank, count, dtype) for rank in range(dist.get_world_size())]


def rank_and_world():
    return dist.get_rank(), dist.get_world_size()


def all_reduce_of_every_type():
    rank, world = rank_and_world()
    for dtype, (op, reduced) in itertools.product(NUMBERS, REDUCTIONS.items()):
        for async_op in (False, True):
            tensor = of_rank(rank, dtype=dtype)
            work = dist.all_reduce(tensor, op, async_op=async_op)
            if async_op:
                assert work.wait() and error_of(work) is None
            wanted = reduced(everybody(dtype=dtype)).to(dtype)
            assert torch.equal(tensor, wanted), (dtype, op, tensor)
            if async_op:  # on a GPU from the moment at which the result was there for the host
                assert work.is_completed()
    mean = of_rank(rank)
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    torch.testing.assert_close(mean, sum(everybody()) / world)
    means_of_integers()
    scaled = of_rank(rank)
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5))
    torch.testing.assert_close(scaled, sum(everybody()) / 2)
    number = torch.tensor([1 + 1j * rank])
    dist.all_reduce(number)
    assert number.item() == world + 1j * sum(range(world))
    flags = torch.tensor([rank == 0, True, False])
    dist.all_reduce(flags, dist.ReduceOp.BAND)
    assert flags.tolist() == [world == 1, True, False]
    bits = torch.tensor([1 << rank])
    for op, wanted in ((dist.ReduceOp.BOR, (1 << world) - 1), (dist.ReduceOp.BXOR, None)):
        both = bits.clone()
        dist.all_reduce(both, op)
        assert both.item() == (wanted if wanted is not None else (1 << world) - 1)


def means_of_integers():
    """The sum in the tensor's type, which wraps, divided and rounded toward zero."""
    rank, world = rank_and_world()
    for dtype in NUMBERS[4:]:
        info = torch.iinfo(dtype)
        parts = [torch.tensor([info.max - r, info.min, r, 7, 3 - 5 * r]).to(dtype)
                 for r in range(world)]  # fmt: skip
        total = sum(parts[1:], parts[0]).tolist()
        wanted = [abs(n) // world * (1 if n >= 0 else -1) for n in total]
        mean = parts[rank].clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        assert mean.tolist() == wanted, (dtype, mean, wanted)
        mean = parts[rank].clone()
        dist.reduce(mean, 0, dist.ReduceOp.AVG)
        assert rank > 0 or mean.tolist() == wanted, (dtype, mean, wanted)
        part = torch.empty(5, dtype=dtype)
        dist.reduce_scatter_tensor(part, parts[rank].repeat(world), dist.ReduceOp.AVG)
        assert part.tolist() == wanted, (dtype, part, wanted)


def tensors_with_gaps():
    rank, world = rank_and_world()
    wide = torch.zeros(6, 8)
    column = wide[:, 3]
    column.copy_(of_rank(rank, 6))
    dist.all_reduce(column)
    assert torch.equal(wide[:, 3], sum(everybody(6)))
    assert wide.sum() == column.sum()  # nothing beside it was touched
    turned = of_rank(rank, 6).reshape(2, 3).t()
    work = dist.broadcast(turned, 0, async_op=True)
    work.wait()
    assert torch.equal(turned, of_rank(0, 6).reshape(2, 3).t())
    outputs = [torch.empty(3, 2).t() for _ in range(world)]
    dist.all_gather(outputs, of_rank(rank, 6).reshape(3, 2).t())
    for peer, output in enumerate(outputs):
        assert torch.equal(output, of_rank(peer, 6).reshape(3, 2).t())


def moved_only():
    """Types without arithmetic travel all the same; parameters that require a gradient too."""
    rank, world = rank_and_world()
    for dtype in (torch.float8_e4m3fn, torch.uint16, torch.bool, torch.complex64, torch.bfloat16):
        outputs = [torch.zeros(5, dtype=dtype) for _ in range(world)]
        dist.all_gather(outputs, of_rank(rank, 5).to(dtype))
        for peer, output in enumerate(outputs):
            assert torch.equal(output.float().abs(), of_rank(peer, 5).to(dtype).float().abs())
        tensor = of_rank(rank, 5).to(dtype)
        dist.broadcast(tensor, world - 1)
        assert torch.equal(tensor.float().abs(), of_rank(world - 1, 5).to(dtype).float().abs())
    parameter = torch.nn.Parameter(of_rank(rank).reshape(7, 1).t())
    dist.broadcast(parameter, 0)
    assert torch.equal(parameter.detach(), of_rank(0).reshape(1, 7))


def parts_per_rank():
    rank, world = rank_and_world()
    for root in range(world):
        reduced = of_rank(rank)
        dist.reduce(reduced, root)
        if rank == root:
            assert torch.equal(reduced, sum(everybody()))
        outputs = [torch.empty(7) for _ in range(world)] if rank == root else None
        dist.gather(of_rank(rank), outputs, dst=root)
        assert outputs is None or all(map(torch.equal, outputs, everybody()))
        part = torch.empty(7)
        dist.scatter(part, everybody() if rank == root else None, src=root)
        assert torch.equal(part, of_rank(rank))
    flat = torch.empty(7 * world)
    dist.all_gather_into_tensor(flat, of_rank(rank))
    assert torch.equal(flat, torch.cat(everybody()))
    flat[7 * rank : 7 * rank + 7] = of_rank(rank + 1)
    dist.all_gather_into_tensor(flat, flat[7 * rank : 7 * rank + 7])  # in place
    assert torch.equal(flat, torch.cat([of_rank(peer + 1) for peer in range(world)]))
    wider = torch.arange(7.0 * world + 1)
    dist.all_gather_into_tensor(wider[1:], wider[:7])  # an overlap that has to be taken apart
    assert torch.equal(wider[1:], torch.arange(7.0).repeat(world))
    inputs = [of_rank(rank + peer) for peer in range(world)]
    part = torch.empty(7)
    dist.reduce_scatter(part, inputs)
    wanted = sum(of_rank(peer + rank) for peer in range(world))
    assert torch.equal(part, wanted)
    for op, divisor in ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, world)):
        dist.reduce_scatter_tensor(part, torch.cat(inputs), op)
        torch.testing.assert_close(part, wanted / divisor)
    outputs = [torch.empty(7) for _ in range(world)]
    dist.all_to_all(outputs, [of_rank(10 * rank + peer) for peer in range(world)])
    for peer, output in enumerate(outputs):
        assert torch.equal(output, of_rank(10 * peer + rank))


def _to_and_from():
    """(sender, receiver) of what this rank sends, and of what it gets."""
    rank, world = rank_and_world()
    return [(rank, peer) for peer in range(world)], [(peer, rank) for peer in range(world)]


def uneven_parts():
    rank, world = rank_and_world()
    outputs = [torch.empty(peer + 1) for peer in range(world)]
    dist.all_gather(outputs, of_rank(rank, rank + 1))
    assert all(torch.equal(output, of_rank(peer, peer + 1)) for peer, output in enumerate(outputs))
    part = torch.empty(rank)
    dist.reduce_scatter(part, [of_rank(rank, peer) for peer in range(world)])
    assert torch.equal(part, sum(of_rank(peer, rank) for peer in range(world)))
    rows_out, rows_in = [rank] * world, list(range(world))  # rank r sends p rows to rank p
    received = torch.empty(sum(rows_out), 3)
    dist.all_to_all_single(received, torch.full((sum(rows_in), 3), float(rank)), rows_out, rows_in)
    wanted = torch.cat([torch.full((rank, 3), float(peer)) for peer in range(world)])
    assert torch.equal(received, wanted)
    for begin in (0, 1):  # lists in one memory: outputs on inputs, and between them
        ins, outs = ([(n + 2 * peer) % 4 * 1000 for n, peer in pairs] for pairs in _to_and_from())
        memory = torch.cat([of_rank(rank + 5 * peer, count) for peer, count in enumerate(ins)])
        memory = torch.cat([memory, torch.zeros(max(0, sum(outs) - sum(ins)) + 1)])
        outputs = memory[begin : begin + sum(outs)].split(outs)
        dist.all_to_all(list(outputs), list(memory[: sum(ins)].split(ins)))
        for peer, output in enumerate(outputs):
            assert torch.equal(output, of_rank(peer + 5 * rank, len(output))), (begin, peer)
    exchanged = torch.empty(2 * world, 3)
    dist.all_to_all_single(exchanged, torch.full((2 * world, 3), float(rank)))
    assert torch.equal(exchanged[:, 0], torch.arange(float(world)).repeat_interleave(2))


def sizes_below_0():
    """They may add up to what there is; nothing is sent."""
    _, world = rank_and_world()
    sizes = [world + 1] + [-1] * (world - 1) if world > 1 else [-1]
    rows = torch.zeros(sum(sizes) if world > 1 else 1, 2)
    with pytest.raises(dpcore.Unsupported, match="one size per rank, none below 0"):
        dist.all_to_all_single(torch.zeros_like(rows), rows, [1] * len(rows), sizes)


def coalesced():
    rank, world = rank_and_world()
    tensors = [of_rank(rank, count) for count in (1, 5, 300)]
    dist.all_reduce_coalesced(tensors)
    assert all(torch.equal(t, sum(everybody(t.numel()))) for t in tensors)
    tensors = [of_rank(rank, count) for count in (1, 5, 300)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    assert all(torch.equal(t, sum(everybody(t.numel()))) for t in tensors)
    outputs = [torch.empty(count * world) for count in (2, 3)]
    parts = [torch.empty(count) for count in (2, 3)]
    with dist._coalescing_manager():
        for output, count in zip(outputs, (2, 3), strict=True):
            dist.all_gather_into_tensor(output, of_rank(rank, count))
    with dist._coalescing_manager():
        for part, output in zip(parts, outputs, strict=True):
            dist.reduce_scatter_tensor(part, output)
    for part, output in zip(parts, outputs, strict=True):
        assert torch.equal(output, torch.cat(everybody(part.numel())))
        assert torch.equal(part, of_rank(rank, part.numel()) * world)


def functional_forms():
    rank, world = rank_and_world()
    group = dist.group.WORLD
    assert torch.equal(functional.all_reduce(of_rank(rank), "sum", group) + 0, sum(everybody()))
    gathered = functional.all_gather_tensor(of_rank(rank), 0, group)
    assert torch.equal(gathered + 0, torch.cat(everybody()))
    part = functional.reduce_scatter_tensor(gathered, "avg", 0, group)
    torch.testing.assert_close(part + 0, of_rank(rank))
    root = functional.broadcast(of_rank(rank), 0, group)
    assert torch.equal(root + 0, of_rank(0))
    several = functional.all_reduce_coalesced([of_rank(rank), of_rank(rank, 3)], "sum", group)
    assert torch.equal(several[1] + 0, sum(everybody(3)))
    swapped = functional.all_to_all_single(
        torch.full((world,), float(rank)), [1] * world, [1] * world, group
    )
    assert (swapped + 0).tolist() == list(range(world))


def lists_that_share_memory():
    """The tensor is some other rank's part of the list: read before it is overwritten."""
    rank, world = rank_and_world()
    for count in (3, 1 << 16):
        rows = torch.full((world, count), float(rank))
        dist.all_gather(list(rows.unbind()), rows[(rank + 1) % world])
        assert rows.mean(1).tolist() == list(range(world)), rows
        rows = torch.full((world, count), float(rank))
        dist.reduce_scatter(rows[(rank + 1) % world], list(rows.unbind()))
        assert rows[(rank + 1) % world].unique().tolist() == [sum(range(world))]
        rows = torch.full((world, count), float(rank))
        dist.gather(rows[1 % world], list(rows.unbind()) if rank == 0 else None)
        assert rank > 0 or rows.mean(1).tolist() == list(range(world))
        rows = torch.arange(world).repeat_interleave(count).view(world, count)
        into = rows[(rank + 1) % world]
        dist.scatter(into, list(rows.unbind()) if rank == 0 else None)
        assert into.unique().tolist() == [rank]


def results_in_one_place():
    """An expanded tensor can take no result; nothing is sent."""
    rank, world = rank_and_world()
    twice = torch.zeros(1).expand(2)
    calls = [
        lambda: dist.all_reduce(twice, async_op=True),
        lambda: dist.all_gather([twice] * world, torch.ones(2)),
    ]
    if world > 1:
        calls.append(lambda: dist.recv(twice, (rank + 1) % world))
    for call in calls:
        with pytest.raises(dpcore.Unsupported, match=r"as expand\(\) makes them; pass a clone"):
            call()


def sparse():
    rank, world = rank_and_world()
    for dense, rows in ((False, rank + 1), (True, rank)):
        index = torch.arange(rows).unsqueeze(0)
        values = torch.ones(rows, 2) if dense else torch.ones(rows)
        shape = (world + 1, 2) if dense else (world + 1,)
        tensor = torch.sparse_coo_tensor(index, values * (rank + 1), shape)
        wanted = torch.zeros(shape)
        for peer in range(world):
            wanted[: peer + (0 if dense else 1)] += peer + 1
        dist.all_reduce(tensor)
        assert torch.equal(tensor.to_dense(), wanted)


BODIES = (
    all_reduce_of_every_type,
    tensors_with_gaps,
    moved_only,
    parts_per_rank,
    lists_that_share_memory,
    results_in_one_place,
    uneven_parts,
    sizes_below_0,
    coalesced,
    functional_forms,
    sparse,
)


@pytest.mark.parametrize("world", (1, 2, 3))
def test_collectives(world):
    """One group for all bodies: a body that leaves something behind shows in the next."""

    def body():
        for check in BODIES:
            try:
                check()
            except Exception as error:
                raise AssertionError(f"{check.__name__} on rank {dist.get_rank()}") from error
        dist.barrier()
        return dist.get_backend()

    assert in_group(body, world) == ["dpcore"] * world


def test_large_tensors_take_the_path_of_the_arena():
    def body():
        from dpcore.comm.launch.torch_backend import communicator_of

        rank = dist.get_rank()
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        assert backend.supports_tensor_alloc(torch.device("cpu"))
        tensor = backend.allocate_tensor(1 << 18, dtype=torch.float32, device=torch.device("cpu"))
        tensor.fill_(rank + 1)
        dist.all_reduce(tensor)
        assert tensor.unique().tolist() == [3.0]
        return communicator_of(dist.group.WORLD).stats()["all_reduce"]

    for stats in in_group(body, 2):
        assert stats["two_shot/push"]["operations"] == 1


class Rotation(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.by = torch.nn.Parameter(torch.tensor([1j, 1 + 1j]))

    def forward(self, x):
        return torch.view_as_real(x * self.by).sum()


def test_complex_gradients_of_torchs_ddp(monkeypatch):
    """torch takes memory for them from the backend as for real ones, and then can't use it."""

    def body():
        x = torch.tensor([2.0, 3.0]) * (dist.get_rank() + 1)
        with pytest.raises(RuntimeError, match="set DDP_DISABLE_COMM_MEM=1"):
            torch.nn.parallel.DistributedDataParallel(Rotation())
        monkeypatch.setenv("DDP_DISABLE_COMM_MEM", "1")
        gradients = []
        for wrap in (torch.nn.parallel.DistributedDataParallel, dpcore.DataParallel):
            model = wrap(Rotation())
            model(x).backward()
            gradients.append(model.module.by.grad.tolist())
        return gradients

    expected = [3 + 3j, 4.5 + 4.5j]
    assert in_group(body, 2) == [[expected, expected]] * 2
