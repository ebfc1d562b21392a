"""One communicator over several hosts: memory within a host, TCP between them.

The hosts are pretended (DPCORE_PRETEND_HOSTS): ranks of this machine that do not look for each
other's memory. Real ones, network namespaces, are in tests/faults/test_hosts.py.
"""

import sys

import cloudpickle
import numpy as np
import pytest
import torch

import dpcore as dp
from dpcore.comm.launch.spawn import run_processes

cloudpickle.register_pickle_by_value(sys.modules[__name__])

# What was measured on this machine must not decide which algorithm a test runs.
NO_CACHE = {"XDG_CACHE_HOME": "/nonexistent"}


def on_hosts(layout, body, *args, **options):
    """What ``body(comm, *args)`` returns on ranks whose hosts are named by ``layout``, "0,0,1"."""
    outcomes = run_processes(
        body, len(layout.split(",")), args,
        environment={"DPCORE_PRETEND_HOSTS": layout, **NO_CACHE},
        options={"transport": "shm+tcp", **options},
    )  # fmt: skip
    for outcome in outcomes:
        assert outcome.error is None, outcome.traceback
    return [outcome.result for outcome in outcomes]


def values(rank, count):
    return torch.arange(count, dtype=torch.int64) % 1009 * (rank + 1) - rank


def every_collective(comm, count):
    n, me = comm.world_size, comm.rank
    inputs = [values(r, count * n) for r in range(n)]
    total = sum(inputs)
    own = slice(me * count, (me + 1) * count)

    tensor = inputs[me].clone()
    comm.all_reduce(tensor)
    assert torch.equal(tensor, total)
    arena = comm.empty(count * n, dtype=torch.int64)
    arena.copy_(inputs[me])
    comm.all_reduce(arena, "max")
    assert torch.equal(arena, torch.stack(inputs).amax(0))
    part = torch.empty(count, dtype=torch.int64)
    comm.reduce_scatter(part, inputs[me])
    assert torch.equal(part, total[own])
    joined = torch.empty(count * n, dtype=torch.int64)
    comm.all_gather(joined, inputs[me][:count])
    assert torch.equal(joined, torch.cat([x[:count] for x in inputs]))
    comm.all_to_all(joined, inputs[me])
    assert torch.equal(joined, torch.cat([x[own] for x in inputs]))
    for root in range(n):
        tensor = inputs[me].clone()
        comm.broadcast(tensor, root)
        assert torch.equal(tensor, inputs[root])
        tensor = inputs[me].clone()
        comm.reduce(tensor, root)
        assert me != root or torch.equal(tensor, total)
        comm.gather(joined if me == root else None, inputs[me][:count], root)
        assert me != root or torch.equal(joined, torch.cat([x[:count] for x in inputs]))
        comm.scatter(part, inputs[root] if me == root else None, root)
        assert torch.equal(part, inputs[root][own])
    comm.barrier()


def messages(comm, count):
    """Everybody to everybody, by memory to local peers and by TCP to the others."""
    n, me = comm.world_size, comm.rank
    sends = [comm.send(values(me, count), r, tag=me, async_op=True) for r in range(n) if r != me]
    for r in range(n):
        if r != me:
            tensor = torch.empty(count, dtype=torch.int64)
            comm.recv(tensor, r, tag=r)
            assert torch.equal(tensor, values(r, count))
    for work in sends:
        work.wait()


@pytest.mark.parametrize("layout", ["0,0,1,1", "0,1,1,1", "0,1,0"])
def test_every_collective_of_every_size(layout):
    def body(comm):
        every_collective(comm, 7)  # with the word that a rank has entered
        every_collective(comm, 30_011)  # as messages
        messages(comm, 5)
        messages(comm, 90_000)
        works = [comm.all_reduce(torch.ones(n), async_op=True) for n in (10, 40_000, 10, 70_000)]
        for work in reversed(works):
            work.wait()
        return comm.transport, comm.hosts

    first = {name: layout.split(",").index(name) for name in layout.split(",")}
    numbers = sorted(first.values())
    hosts = [numbers.index(first[name]) for name in layout.split(",")]
    assert on_hosts(layout, body) == [("shm+tcp", hosts)] * len(hosts)


def test_two_ranks_of_two_hosts_send_up_to_64_kib_with_the_word_that_they_have_entered():
    def body(comm):
        found = []
        for count in (1025, 4095, 4096, 4097):  # of 8 bytes, twice: from 16 KiB to a little over 64
            every_collective(comm, count)
            found.append(comm.explain(16 * count)["all_reduce"].algorithm)
        return found

    entry, over = ["entry"], ["one_shot"]
    assert on_hosts("0,1", body) == [3 * entry + over] * 2
    with_three = on_hosts("0,1,2", lambda comm: comm.explain(16 * 1025)["all_reduce"].algorithm)
    assert "entry" not in with_three


@pytest.mark.parametrize("world", [3, 4])
def test_ranks_of_one_machine_send_as_much_with_the_word(world):
    def body(comm):
        for count in (1025, 4096, 4097, 70_000, 300_000):  # of 8 bytes
            every_collective(comm, count)
        return [comm.explain(n)["all_reduce"].algorithm for n in (65536, 65544)]

    outcomes = run_processes(body, world, environment=NO_CACHE, options={"transport": "tcp"})
    for outcome in outcomes:
        assert outcome.error is None, outcome.traceback
        assert outcome.result[0] == "entry" != outcome.result[1]


def test_what_goes_by_memory_and_what_by_the_network():
    """A hierarchical all-reduce of S sends S out of each host of two; two_shot twice as much."""

    def body(comm, algorithm, count):
        before = comm.stats()["sent"]
        tensor = torch.ones(count)
        comm.all_reduce(tensor, algorithm=algorithm)
        assert tensor.unique().tolist() == [comm.world_size]
        after = comm.stats()["sent"]
        return {way: after[way] - before[way] for way in after}

    count = 120_000  # a multiple of all numbers of chunks
    size = 4 * count
    for algorithm, share in {"auto": 1, "hierarchical": 1, "two_shot": 2}.items():
        sent = on_hosts("0,0,1,1", body, algorithm, count)
        for host in (sent[:2], sent[2:]):
            assert sum(rank["network"] for rank in host) == share * size, algorithm
            assert all(rank["memory"] > 0 for rank in host), algorithm


def test_all_ranks_hold_the_same_bits_and_deterministic_ones_those_of_one_host():
    def body(comm):
        tensor = torch.from_numpy(np.random.default_rng(comm.rank).standard_normal(50_000))
        tensor = tensor.to(torch.float32)
        comm.all_reduce(tensor, "mean")
        return tensor

    near = dp.spawn(body, 4)
    for deterministic in (False, True):
        far = on_hosts("0,0,1,1", body, deterministic=deterministic)
        assert all(torch.equal(far[0], other) for other in far[1:])
        assert torch.equal(far[0], near[0]) == deterministic


def test_groups_of_a_group_know_their_hosts():
    def body(comm):
        local = comm.split(comm.hosts[comm.rank])
        across = comm.split(comm.rank % 2, -comm.rank)
        mixed = comm.split(0 if comm.rank < 3 else None)
        for group in filter(None, (local, across, mixed)):
            every_collective(group, 20_000)
            group.close()
        return local.transport, across.transport, across.hosts, mixed and mixed.transport

    results = on_hosts("0,0,1,1", body)
    assert results[0] == ("shm", "tcp", [0, 1], "shm+tcp")
    assert results[3] == ("shm", "tcp", [0, 1], None)


def test_all_on_one_host_need_no_network():
    def body(comm):
        tensor = comm.empty(100_000)
        tensor.fill_(1.0)
        comm.all_reduce(tensor)
        return comm.transport, list(comm.stats()["all_reduce"]), comm.stats()["sent"]["network"]

    assert on_hosts("0,0", body) == [("shm", ["two_shot/push"], 0)] * 2


@pytest.mark.hurried
def test_a_rank_that_wants_tcp_only_is_refused():
    def body(comm):
        me, place = comm.rank, f"tcp://127.0.0.1:{port}"
        dp.finalize()
        try:
            dp.init(
                rank=me, world_size=2, init_method=place, timeout=2,
                transport="tcp" if me else "shm+tcp",
            )  # fmt: skip
        except dp.RendezvousError as error:
            return str(error)

    from tests.faults.test_network_start import free_port

    port = free_port()
    said = dp.spawn(body, 2)
    assert "transport 'tcp' on rank 1, 'auto' on rank 0; it must be the same" in said[1]
    assert "missing: 1; refused: transport 'tcp' on rank 1" in said[0]


def test_ranks_that_choose_by_other_options_are_told(tmp_path):
    """In rank order one algorithm is best, in any order another one."""

    def body(comm):
        where = {"rank": comm.rank, "world_size": 4, "init_method": f"file://{tmp_path}/at"}
        dp.finalize()
        mine = dp.init(**where, transport="shm+tcp", deterministic=comm.rank == 0)
        with pytest.raises(dp.Mismatch, match=r"the algorithms differ.*deterministic="):
            mine.all_reduce(torch.ones(1 << 18))

    on_hosts("0,0,1,1", body)
