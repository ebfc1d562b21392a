"""What holds for ``backend="mpi"`` beyond the contract, as checks that run on a rank."""

import threading
import time

import pytest
import torch

import dpcore
from dpcore.comm.communicators.mpi import numbers, reductions
from tests.comm.contract import finish, rows_of
from tests.comm.matrix import DTYPES, FLOATS, OPS, is_valid_op


def reference(op, rows):
    """Of small numbers, for which everything is exact."""
    if rows.dtype == torch.bool:
        return rows.all(0) if op in ("prod", "min", "band") else by_bits(op, rows)
    if op in ("band", "bor", "bxor"):
        return by_bits(op, rows)
    wide = rows.to(torch.complex128 if rows.is_complex() else torch.float64)
    if op in ("min", "max"):
        return getattr(wide, f"a{op}")(0).to(rows.dtype)
    total = wide.prod(0) if op == "prod" else wide.sum(0)
    if op == "mean":
        total = total / len(rows)
        total = total if rows.is_floating_point() or rows.is_complex() else total.trunc()
    return (total * (0.5 if op == "premul_sum" else 1)).to(rows.dtype)


def by_bits(op, rows):
    combine = {"band": torch.bitwise_and, "bxor": torch.bitwise_xor}.get(op, torch.bitwise_or)
    result = rows[0]
    for row in rows[1:]:
        result = combine(result, row)
    return result


def every_type_and_operator(comm):
    root = comm.world_size - 1
    for name in DTYPES:
        dtype = getattr(torch, name)
        rows = (rows_of(comm, 4 * comm.world_size) % 3).to(dtype)
        for op in OPS:
            mine = rows[comm.rank].clone()
            if not is_valid_op(op, name):
                with pytest.raises(dpcore.Unsupported, match=f"{op} has no meaning"):
                    comm.all_reduce(mine, op)
                continue
            wanted = reference(op, rows)
            comm.all_reduce(mine, op, factor=0.5)
            assert torch.equal(mine, wanted), (name, op, mine, wanted)
            mine = rows[comm.rank].clone()
            comm.reduce(mine, root, op, factor=0.5)
            kept = wanted if comm.rank == root else rows[comm.rank]
            assert torch.equal(mine, kept), (name, op)
            given, part = rows[comm.rank].clone(), torch.empty(4, dtype=dtype)
            comm.reduce_scatter(part, given, op, factor=0.5)
            assert torch.equal(part, wanted.chunk(comm.world_size)[comm.rank]), (name, op)
            assert torch.equal(given, rows[comm.rank])
    for dtype in (torch.uint16, torch.float8_e4m3fn):  # MPI moves what it cannot add
        mine = torch.full((5,), comm.rank + 1.0).to(dtype)
        comm.broadcast(mine, root)
        assert mine.float().tolist() == [comm.world_size] * 5
    with pytest.raises(dpcore.Unsupported, match=r"float8.*no such type"):
        comm.all_reduce(mine)


def the_same_bits_on_all_ranks(comm):
    """16-bit numbers are rounded once, from their sum in float32."""
    generator = torch.Generator().manual_seed(comm.rank)
    for name in FLOATS:
        dtype = getattr(torch, name)
        for count in (1, 1000, reductions._BLOCK + 7):
            mine = torch.randn(count, generator=generator).to(dtype)
            before = mine.clone()
            comm.all_reduce(mine, "mean")
            everywhere = torch.empty(comm.world_size * count, dtype=dtype)
            comm.all_gather(everywhere, mine)
            assert all(torch.equal(one, mine) for one in everywhere.chunk(comm.world_size))
            comm.all_gather(everywhere, before)
            wide = numbers.WIDE.get(dtype, dtype)
            rows = everywhere.view(comm.world_size, -1).to(wide)
            if comm.world_size == 2:
                assert torch.equal(mine, (rows.sum(0) / 2).to(dtype)), (name, count)
            torch.testing.assert_close(mine, rows.mean(0).to(dtype))


def operations_behind_blocks_keep_their_order(comm):
    """Several in flight, waited for from the last: MPI matches them by the order of calls."""
    large = torch.ones(3 * reductions._BLOCK + 1, dtype=torch.bfloat16)
    part = torch.empty(reductions._BLOCK, dtype=torch.bfloat16)
    whole = torch.ones(comm.world_size * reductions._BLOCK, dtype=torch.bfloat16)
    small = [torch.full((9,), float(number)) for number in range(5)]
    works = [comm.all_reduce(large, async_op=True)]
    works += [comm.all_reduce(one, async_op=True) for one in small]
    works += [comm.reduce_scatter(part, whole, async_op=True), comm.barrier(async_op=True)]
    for work in reversed(works):
        work.wait()
    assert large.eq(comm.world_size).all() and part.eq(comm.world_size).all()
    for number, one in enumerate(small):
        assert one.tolist() == [float(number * comm.world_size)] * 9


def parts_within_the_whole(comm):
    """A rank's part may lie in the buffer that it is sent to, in its place or elsewhere."""
    world, rank = comm.world_size, comm.rank
    for shift in (0, 1):
        at = (rank + shift) % world
        whole = torch.zeros(2 * world)
        part = whole[2 * at : 2 * at + 2]
        part.fill_(rank + 1.0)
        comm.all_gather(whole, part)
        assert whole.tolist() == [1.0 + n // 2 for n in range(2 * world)]
        comm.gather(whole if rank == 0 else None, part)
        if rank == 0:
            assert whole.tolist() == [1.0 + (n // 2 + shift) % world for n in range(2 * world)]
        whole = torch.arange(2.0 * world)
        part = whole[2 * at : 2 * at + 2]
        comm.reduce_scatter(part, whole, "sum")
        assert part.tolist() == [world * 2.0 * rank, world * (2.0 * rank + 1)]
        whole = torch.arange(float(world))
        comm.all_to_all(whole, whole)
        assert whole.tolist() == [float(rank)] * world


def memory_is_the_tensors_own(comm):
    tensor = torch.ones(8)
    assert numbers.flat_of(tensor).data_ptr() == tensor.data_ptr()
    parameter = torch.nn.Parameter(torch.full((2, 2), float(comm.rank)))
    comm.broadcast(parameter, 1)
    assert parameter.tolist() == [[1.0] * 2] * 2 and parameter.requires_grad
    with torch.inference_mode():
        alone = torch.full((3,), comm.rank + 1.0)
    comm.all_reduce(alone, "mean", async_op=True).wait()
    assert alone.tolist() == [(comm.world_size + 1) / 2] * 3
    nothing = torch.empty(0)
    comm.all_reduce(nothing)
    comm.all_gather(torch.empty(0), nothing)


def it_goes_on_while_the_program_computes(comm):
    """Nobody calls it meanwhile: a thread of its own does."""
    mine = torch.full((1 << 20,), float(comm.rank))
    future = comm.all_reduce(mine, "max", async_op=True).get_future()
    deadline = time.monotonic() + 20
    while not future.done() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert future.done() and future.value()[0] is mine
    assert mine.eq(comm.world_size - 1).all()
    joined = torch.zeros(comm.world_size)
    (result,) = comm.all_gather(joined, torch.ones(1), async_op=True).get_future().wait()
    assert result is joined and joined.eq(1).all()
    results = []
    thread = threading.Thread(target=lambda: results.append(comm.barrier(async_op=True)))
    thread.start()
    thread.join()
    results[0].wait()


def messages(comm):
    if comm.rank == 0:
        received = torch.zeros(comm.world_size - 1, 3)
        works = [comm.recv(row, None, tag=5, async_op=True) for row in received]
        for work, row in zip(works, received, strict=True):
            work.wait()
            assert row.tolist() == [float(work.source)] * 3
        assert sorted(work.source for work in works) == list(range(1, comm.world_size))
    else:
        comm.send(torch.full((3,), float(comm.rank)), 0, tag=5)
    comm.barrier()
    with pytest.raises(dpcore.Unsupported, match="MPI allows tags from 0 to"):
        comm.send(torch.ones(1), (comm.rank + 1) % comm.world_size, tag=-1)


def groups_of_groups(comm):
    world, rank = comm.world_size, comm.rank
    turned = comm.split(0, key=-rank)
    assert turned.rank == world - 1 - rank and turned.ranks[0] == world - 1
    again = turned.split(turned.rank % 2)
    mine = torch.tensor([float(rank)])
    again.all_reduce(mine)
    members = [r for r in range(world) if (world - 1 - r) % 2 == turned.rank % 2]
    assert mine.item() == sum(members)
    again.close()
    turned.close()
    comm.barrier()


def counters(comm):
    group = comm.split(0)
    before = group.stats()
    assert before["library"].startswith(("Open MPI", "MPICH")) and before["threads"] == "multiple"
    assert "all_reduce" not in before
    for asynchronous in (True, False):
        work = group.all_reduce(torch.ones(10), async_op=asynchronous)
        finish(work, asynchronous)
    assert group.stats()["all_reduce"] == {"operations": 2, "bytes": 80}
    group.close()


def it_is_recorded(comm):
    layer = torch.nn.Linear(4, 4)
    model = dpcore.DataParallel(layer, comm=comm)
    with dpcore.trace(comm=comm) as t:
        comm.all_reduce(torch.ones(100))
        work = comm.broadcast(torch.ones(10), 1, async_op=True)
        model(torch.ones(2, 4)).sum().backward()
        work.wait()
    found = t.by_operation()
    assert found["all_reduce"]["count"] == 2
    assert 480 <= found["all_reduce"]["bytes"] < 1000  # with what pads a bucket
    assert found["broadcast"]["count"] == 1 and t.exposed_ms > 0
    operations = [event for event in t.events if event.kind == "operation"]
    assert {event.path for event in operations} == {"mpi"}
    kinds = {event.kind for event in t.events}
    assert {"compute", "ready", "launch"} <= kinds, kinds


CHECKS = (
    every_type_and_operator,
    the_same_bits_on_all_ranks,
    operations_behind_blocks_keep_their_order,
    parts_within_the_whole,
    memory_is_the_tensors_own,
    it_goes_on_while_the_program_computes,
    messages,
    groups_of_groups,
    counters,
    it_is_recorded,
)


def everything(comm):
    for check in CHECKS:
        try:
            check(comm)
        except Exception as error:
            raise AssertionError(f"{check.__name__} on rank {comm.rank}") from error
    return len(CHECKS)
