"""What every communicator must do (dpcore/comm/communicators/protocol.py), as checks that run on a
rank.

A check takes the rank's communicator. What a kind lacks stands in ``LACKS`` by its backend, and has
to be refused by name: a check is never left out.
"""

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import dpcore
from dpcore.comm.communicators.protocol import Capabilities, capabilities_of

LACKS = {
    "torch gloo": {"algorithm", "priority", "layout"},
    "nccl": {"tag"},
    "cuda": {"tag"},
    "mpi": {"algorithm", "priority", "layout"},
    "cupy": {"algorithm", "priority", "layout", "timeout", "tag"},
}
ON_HOST = ("native", "mpi", "torch gloo")
ON_DEVICE = {"backend", "library", "device", "paths"}
STATS = {"native": {"arena"}, "nccl": ON_DEVICE, "cuda": ON_DEVICE, "torch gloo": set()}
STATS["mpi"] = {"library", "threads"}


def of_rank(rank, count=6, dtype=torch.float32):
    return (torch.arange(count) % 5 + 2 * rank + 1).to(dtype)


def rows_of(comm, count=6, dtype=torch.float32):
    """The values of all ranks."""
    return torch.stack([of_rank(rank, count, dtype) for rank in range(comm.world_size)])


def folded(combine, rows):
    result = rows[0]
    for row in rows[1:]:
        result = combine(result, row)
    return result


def operators(comm):
    """(operator, values of all ranks, result)"""
    floats, whole = rows_of(comm), rows_of(comm, dtype=torch.int32)
    yield "sum", floats, floats.sum(0)
    yield "mean", floats, floats.mean(0)
    yield "prod", floats, floats.prod(0)
    yield "min", floats, floats.amin(0)
    yield "max", floats, floats.amax(0)
    yield "mean", -whole, -(whole.sum(0) // comm.world_size).int()  # toward zero
    yield "band", whole, folded(torch.bitwise_and, whole)
    yield "bor", whole, folded(torch.bitwise_or, whole)
    yield "bxor", whole, folded(torch.bitwise_xor, whole)


def finish(work, asynchronous):
    """A handle comes with ``async_op`` and without it there is none."""
    assert (work is not None) == asynchronous
    if asynchronous:
        work.wait()
        assert work.is_completed()


# ---- values ----------------------------------------------------------------------------------


def it_says_what_it_is(comm):
    assert 0 <= comm.rank < comm.world_size and not comm.closed
    assert isinstance(comm.backend, str) and isinstance(comm.transport, str)
    assert f"rank {comm.rank} of {comm.world_size}" in repr(comm)
    assert isinstance(capabilities_of(comm), Capabilities)
    assert STATS[comm.backend] <= set(comm.stats())
    assert comm.empty(2, 3).shape == comm.empty((2, 3)).shape == (2, 3)
    assert comm.empty(2, dtype=torch.int8).dtype == torch.int8
    assert comm.empty(dtype=torch.int8).shape == ()


def reductions(comm, asynchronous):
    root = comm.world_size - 1
    for op, rows, wanted in operators(comm):
        mine = rows[comm.rank].clone()
        finish(comm.all_reduce(mine, op, async_op=asynchronous), asynchronous)
        comm.barrier()
        torch.testing.assert_close(mine, wanted, msg=lambda text, op=op: f"{op}: {text}")
        mine = rows[comm.rank].clone()
        finish(comm.reduce(mine, root, op, async_op=asynchronous), asynchronous)
        torch.testing.assert_close(mine, wanted if comm.rank == root else rows[comm.rank])
    mine = of_rank(comm.rank)
    work = comm.all_reduce(mine, "premul_sum", factor=0.5, async_op=asynchronous)
    finish(work, asynchronous)
    torch.testing.assert_close(mine, rows_of(comm).sum(0) / 2)


def copies(comm, asynchronous):
    mine, root = of_rank(comm.rank), comm.world_size - 1
    finish(comm.broadcast(mine, root, async_op=asynchronous), asynchronous)
    assert torch.equal(mine, of_rank(root))
    left, right = (comm.rank - 1) % comm.world_size, (comm.rank + 1) % comm.world_size
    received = torch.zeros(6)
    work = comm.recv(received, left, async_op=True) if comm.rank else None
    if right:
        finish(comm.send(of_rank(comm.rank), right, async_op=asynchronous), asynchronous)
    if work is not None:
        work.wait()
        assert torch.equal(received, of_rank(left))


def parts(comm, asynchronous):
    world, rank = comm.world_size, comm.rank
    for sizes in (None, [r + 1 for r in range(world)], [2, *[0] * (world - 1)]):
        lengths = sizes or [2] * world
        total, begin = sum(lengths), sum(lengths[:rank])
        rows = rows_of(comm, total)
        joined = torch.cat([row[:n] for row, n in zip(rows, lengths, strict=True)])
        own, options = rows[rank][: lengths[rank]].clone(), {"sizes": sizes}
        options["async_op"] = asynchronous
        gathered = torch.zeros(total)
        finish(comm.all_gather(gathered, own, **options), asynchronous)
        assert torch.equal(gathered, joined)
        at_root = torch.zeros(total) if rank == 0 else None
        finish(comm.gather(at_root, own, **options), asynchronous)
        assert at_root is None or torch.equal(at_root, joined)
        part = torch.zeros(lengths[rank])
        finish(comm.scatter(part, joined.clone() if rank == 0 else None, **options), asynchronous)
        assert torch.equal(part, own)
        finish(comm.reduce_scatter(part, rows[rank].clone(), "mean", **options), asynchronous)
        torch.testing.assert_close(part, rows.mean(0)[begin : begin + lengths[rank]])


def exchanges(comm, asynchronous):
    world, rank = comm.world_size, comm.rank
    for sizes in (None, [[s + d for d in range(world)] for s in range(world)]):  # [from][to]
        sent = sizes[rank] if sizes else [2] * world
        taken = [row[rank] for row in sizes] if sizes else [2] * world
        options = {"input_sizes": sent, "output_sizes": taken} if sizes else {}
        own = torch.cat([torch.full((n,), 10.0 * rank + d) for d, n in enumerate(sent)])
        output = torch.zeros(sum(taken))
        work = comm.all_to_all(output, own, async_op=asynchronous, **options)
        finish(work, asynchronous)
        wanted = [torch.full((n,), 10.0 * s + rank) for s, n in enumerate(taken)]
        assert torch.equal(output, torch.cat(wanted))


def groups(comm):
    comm.barrier()
    comm.barrier(timeout=30)
    comm.barrier(async_op=True).wait()
    pair = comm.split(comm.rank // 2)
    assert type(pair) is type(comm) and pair.rank == comm.rank % 2
    mine = torch.full((2,), float(comm.rank))
    pair.all_reduce(mine, "max")
    assert mine.tolist() == [float(min(comm.rank // 2 * 2 + 1, comm.world_size - 1))] * 2
    pair.close()
    comm.barrier()
    assert comm.split(None if comm.rank else 0) is None or comm.rank == 0


# ---- what is refused -------------------------------------------------------------------------

ONES = torch.ones
# name: (the call, the error, a piece of its message)
MISTAKES = {
    "no such operator": (
        lambda c: c.all_reduce(ONES(4), "xor"), dpcore.Unsupported,
        'reduction "xor": use sum, mean'),
    "mean of booleans": (
        lambda c: c.all_reduce(ONES(4).bool(), "mean"), dpcore.Unsupported, "mean .*bool"),
    "factors of integers": (
        lambda c: c.all_reduce(ONES(4).int(), "premul_sum"), dpcore.Unsupported,
        "premul_sum .*int32"),
    "no operator": (
        lambda c: c.all_reduce(ONES(4), 3), TypeError, "op: expected a name .*not 3"),
    "no buffer": (
        lambda c: c.broadcast([1.0]), TypeError, "expected a torch tensor.* not list"),
    "gaps": (lambda c: c.all_reduce(ONES(4, 4)[:, 1]), dpcore.Unsupported, "not contiguous"),
    "two types": (
        lambda c: c.all_gather(ONES(2 * c.world_size), ONES(2).double()), dpcore.Unsupported,
        "input is .*float64, output is .*float32"),
    "a root that is none": (
        lambda c: c.broadcast(ONES(4), c.world_size), ValueError, r"root \d is not a rank: 0\.\."),
    "a negative root": (lambda c: c.reduce(ONES(4), -1), ValueError, "root -1 is not a rank"),
    "an output too many": (
        lambda c: c.gather(None if c.rank == 0 else ONES(4), ONES(2)), ValueError,
        r"output must be (given|None) here \(root is 0\)"),
    "an input too many": (
        lambda c: c.scatter(ONES(2), None if c.rank == 0 else ONES(4)), ValueError,
        r"input must be (given|None) here \(root is 0\)"),
    "too short": (
        lambda c: c.all_gather(ONES(3), ONES(2)), dpcore.Unsupported,
        "has 3 elements, .*are needed"),
    "no equal parts": (
        lambda c: c.reduce_scatter(ONES(2), ONES(2 * c.world_size + 1)), dpcore.Unsupported,
        r"input has \d elements, \d are needed"),
    "not the own part": (
        lambda c: c.all_gather(ONES(2 * c.world_size), ONES(3), sizes=[2] * c.world_size),
        dpcore.Unsupported, "input has 3 elements, 2 are needed"),
    "sizes for other ranks": (
        lambda c: c.all_gather(ONES(4), ONES(4), sizes=[4]), dpcore.Unsupported,
        "sizes has 1 entries.*per rank"),
    "negative sizes": (
        lambda c: c.all_gather(ONES(4), ONES(4), sizes=[-4] * c.world_size), TypeError,
        "sizes: expected .*integers that are not negative"),
    "one list of two": (
        lambda c: c.all_to_all(ONES(4), ONES(4), input_sizes=[4] * c.world_size), ValueError,
        "give both output_sizes and input_sizes"),
    "a message to oneself": (
        lambda c: c.send(ONES(4), c.rank), dpcore.Unsupported, "choose another rank of 0"),
    "a message from nobody": (
        lambda c: c.recv(ONES(4), c.world_size), dpcore.Unsupported, "choose another rank of 0"),
    "a negative timeout": (
        lambda c: c.all_reduce(ONES(4), timeout=-1.0), TypeError, "timeout: expected seconds"),
    "a negative timeout of wait": (
        lambda c: c.all_reduce(ONES(4), async_op=True).wait(-1.0), dpcore.Unsupported,
        r"timeout -1.*takes seconds"),
    "a negative color": (lambda c: c.split(-3), dpcore.Unsupported, "color -3 is negative"),
    "a root by name": (
        lambda c: c.broadcast(ONES(4), root="0"), TypeError, "root: expected an integer, not '0'"),
    "a color by name": (lambda c: c.split("red"), TypeError, "color: expected an integer"),
    "no such option": (
        lambda c: c.broadcast(ONES(4), asynchronous=True), TypeError, "asynchronous"),
}  # fmt: skip


def mistakes(comm):
    for name, (mistake, kind, message) in MISTAKES.items():
        if "timeout" in name and "timeout" in LACKS.get(comm.backend, ()):
            kind, message = dpcore.Unsupported, "no timeout|no deadlines"
        with pytest.raises(kind, match=message) as raised:
            mistake(comm)
        assert isinstance(raised.value, dpcore.Error) == issubclass(kind, dpcore.Error), name
        assert not comm.closed


def words_of_others(comm):
    """Operators as torch and mpi4py call them; methods that have another name here."""
    of_torch, of_mpi = torch.distributed.ReduceOp, SimpleNamespace(name="MPI_SUM")
    words = [("SUM", "sum"), ("AVG", "mean"), ("Product", "prod"), (of_mpi, "sum")]
    words += [(of_torch.SUM, "sum"), (of_torch.AVG, "mean"), (of_torch(of_torch.MAX), "max")]
    for word, op in words:
        results = []
        for name in (word, op):
            mine = of_rank(comm.rank)
            comm.all_reduce(mine, name)
            comm.reduce(mine, 0, op=name)
            part = torch.empty(1)
            whole = of_rank(comm.rank, comm.world_size)
            comm.reduce_scatter(part, whole, name)
            results.append(torch.cat((mine, part)))
        assert torch.equal(*results), word
    with pytest.raises(dpcore.Unsupported, match=r'op="premul_sum", factor=2\.0'):
        comm.all_reduce(ONES(4), torch.distributed._make_nccl_premul_sum(2.0))
    with pytest.raises(AttributeError, match=r"no attribute 'Allreduce'; it is called all_reduce$"):
        comm.Allreduce(ONES(4))
    with pytest.raises(AttributeError, match=r"it is called send\(\.\.\., async_op=True\)$"):
        comm.isend(ONES(4), 0)
    with pytest.raises(AttributeError, match=r"no attribute 'flux'$"):
        _ = comm.flux
    assert not hasattr(comm, "Iallreduce") and not hasattr(comm, "__getstate_of_nobody__")


def still_works(comm):
    """After mistakes: nothing of them was sent."""
    mine = torch.full((5,), float(comm.rank))
    comm.all_reduce(mine, "max")
    comm.barrier()
    assert mine.tolist() == [comm.world_size - 1.0] * 5


def options(comm):
    """Taken, or refused by name with nothing changed."""
    wanted = {"algorithm": "ring/moves", "priority": 1, "layout": 7}
    for name, value in wanted.items():
        mine = ONES(4)
        if name in LACKS.get(comm.backend, ()):
            with pytest.raises(dpcore.Unsupported, match=f"no {name}"):
                comm.all_reduce(mine, "premul_sum", factor=3.0, **{name: value})
            assert mine.tolist() == [1.0] * 4
        else:
            comm.all_reduce(mine, **{name: value})
            assert mine.tolist() == [float(comm.world_size)] * 4
    # With its default value every option is taken everywhere.
    comm.all_reduce(ONES(4), algorithm=None, priority=0, layout=0, timeout=0.0, factor=1.0)
    peer = comm.rank ^ 1
    if peer >= comm.world_size:
        return
    if "tag" in LACKS.get(comm.backend, ()):
        with pytest.raises(dpcore.Unsupported, match="no tag"):
            comm.send(ONES(4), peer, tag=3)
        return
    received = torch.zeros(4)
    work = comm.recv(received, peer, tag=3, async_op=True)
    comm.send(of_rank(comm.rank, 4), peer, tag=3)
    work.wait()
    assert torch.equal(received, of_rank(peer, 4))


def arrays(comm):
    """numpy's arrays where the memory is the host's."""
    mine = np.full(3, comm.rank + 1.0)
    comm.all_reduce(mine)
    assert mine.tolist() == [sum(range(1, comm.world_size + 1))] * 3


def closing(comm):
    """Comes last."""
    comm.close()
    comm.close()
    assert comm.closed
    for call in (
        lambda: comm.all_reduce(ONES(4)),
        lambda: comm.all_gather(ONES(4 * comm.world_size), ONES(4)),
        comm.barrier,
        lambda: comm.send(ONES(4), (comm.rank + 1) % comm.world_size),
    ):
        with pytest.raises(dpcore.Error, match=r"closed|finalized"):
            call()


def polling(comm):
    """Whoever asks whether it has ended, and does not wait, finds the result."""
    mean, joined = of_rank(comm.rank), torch.zeros(6 * comm.world_size)
    works = [
        comm.all_reduce(mean, "mean", async_op=True),
        comm.all_gather(joined, of_rank(comm.rank), async_op=True),
    ]
    deadline = time.monotonic() + 20
    while not all(work.is_completed() for work in works):
        assert time.monotonic() < deadline
        time.sleep(1e-3)
    rows = rows_of(comm)
    torch.testing.assert_close(mean, rows.mean(0))
    assert torch.equal(joined, rows.flatten())


WAITED_OR_NOT = (reductions, copies, parts, exchanges)
CHECKS = (it_says_what_it_is, groups, mistakes, words_of_others, still_works, options, polling)


def everything(comm):
    for check in CHECKS:
        check(comm)
    for check in WAITED_OR_NOT:
        check(comm, False)
        check(comm, True)
    if comm.backend in ON_HOST:
        arrays(comm)
    closing(comm)


# ---- the part of it that averaging gradients needs --------------------------------------------


def gradient_group(group):
    rank, world = group.rank, group.world_size
    for asynchronous in (False, True):
        for op, rows, wanted in operators(group):
            if op in ("sum", "mean", "max"):
                mine = rows[rank].clone()
                finish_pending(group.all_reduce(mine, op, async_op=asynchronous), asynchronous)
                torch.testing.assert_close(mine, wanted)
    mine = of_rank(rank)
    group.broadcast(mine, 1)
    assert torch.equal(mine, of_rank(1))
    sizes = [r + 1 for r in range(world)]
    gathered = torch.zeros(sum(sizes))
    group.all_gather(gathered, of_rank(rank, rank + 1), sizes=sizes)
    assert torch.equal(gathered, torch.cat([of_rank(r, n) for r, n in enumerate(sizes)]))
    with pytest.raises(dpcore.Unsupported, match='"xor"'):
        group.all_reduce(ONES(4), "xor", async_op=False)
    with pytest.raises(dpcore.Unsupported, match=r"mean .*bool"):
        group.all_reduce(ONES(4).bool(), "mean", async_op=False)
    with pytest.raises(ValueError, match="is not a rank"):
        group.broadcast(ONES(4), world)
    with pytest.raises(dpcore.Unsupported, match=r"has 3 elements, .*are needed"):
        group.all_gather(ONES(3), ONES(2))


def finish_pending(work, asynchronous):
    assert (work is not None) == asynchronous
    if asynchronous:
        work.wait()
