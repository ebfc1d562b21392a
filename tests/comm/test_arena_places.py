"""Where arenas are mapped: the same offset of two must not look alike to a cache (decision 47), and
an arena takes addresses as it grows (decision 1)."""

import contextlib
import gc
import os
import resource
import uuid

import pytest
import torch

import dpcore
from dpcore.comm.launch import session

ALIKE = 256 << 20
FIRST_SEGMENT = 64 << 20


def arenas():
    """Where those of this process begin."""
    with open("/proc/self/maps") as maps:
        return {int(line.split("-")[0], 16) for line in maps if "dpcore-arena" in line}


def while_all_are_mapped(comm):
    comm.barrier()
    found = arenas()
    comm.barrier()
    return found


@pytest.mark.parametrize("mode", ["processes", "threads"])
def test_arenas_of_a_communicator_do_not_look_alike(mode):
    gc.collect()
    of_others = arenas() if mode == "threads" else set()  # what tests before have left open
    for found in dpcore.spawn(while_all_are_mapped, 4, mode=mode):
        own = found - of_others
        assert len(own) >= 4
        assert len({begin % ALIKE for begin in own}) == len(own)


def test_nothing_is_left_of_the_addresses_around_them():
    with open("/proc/self/maps") as maps:
        before = sum(1 for _ in maps)
    for _ in range(3):
        dpcore.init()
        dpcore.finalize()
    with open("/proc/self/maps") as maps:
        assert sum(1 for _ in maps) <= before + 8  # what libraries have loaded meanwhile


def mapped_bytes():
    """Addresses that this process has for arenas, its own and its peers'."""
    with open("/proc/self/maps") as maps:
        found = [line.split()[0].split("-") for line in maps if "dpcore-arena" in line]
    return sum(int(end, 16) - int(begin, 16) for begin, end in found)


@pytest.mark.parametrize("mode", ["processes", "threads"])
def test_an_arena_grows_by_segments_that_peers_find_by_themselves(mode):
    def body(comm):
        def block():
            return comm.empty(FIRST_SEGMENT // 4 * 3 // 4).fill_(comm.rank + 1.0)

        summed, sent, gathered, exchanged = (block() for _ in range(4))  # in three segments
        part = gathered.numel() // 2
        comm.all_reduce(summed)
        comm.broadcast(sent, 1)
        comm.all_gather(gathered, gathered[comm.rank * part :][:part])
        comm.all_to_all(exchanged, torch.full_like(exchanged, comm.rank + 5.0))
        ends = [tuple(x[[0, -1]].tolist()) for x in (summed, sent, gathered, exchanged)]
        assert ends == [(3.0, 3.0), (2.0, 2.0), (1.0, 2.0), (5.0, 6.0)]
        comm.barrier()
        return mapped_bytes()

    sizes = dpcore.spawn(body, 2, mode=mode)
    if mode == "processes":  # the own arena and the peer's: 64, 64 and 128 MiB of each
        assert sizes == [8 * FIRST_SEGMENT] * 2


def held_bytes():
    """Memory of this process's own arenas."""
    held = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists
            if "memfd:dpcore-arena" in os.readlink(f"/proc/self/fd/{number}"):
                held += os.stat(f"/proc/self/fd/{number}").st_blocks * 512
    return held


def test_memory_that_is_too_small_for_a_block_goes_back_when_an_arena_grows_for_it():
    mib = 1 << 18  # elements of float32

    def body(comm):
        before = held_bytes()
        small = [comm.empty(40 * mib).fill_(1.0) for _ in range(2)]  # in two segments
        del small
        assert held_bytes() - before >= 75 << 20
        large = comm.empty(100 * mib).fill_(comm.rank + 1.0)
        assert held_bytes() - before < 110 << 20
        again = [comm.empty(n * mib) for n in (10, 30, 40)]  # where memory was given back
        assert held_bytes() - before >= 165 << 20
        assert all(not block.any() for block in again)
        for block in (large, *again):
            block.fill_(comm.rank + 1.0)
            comm.all_reduce(block)
            assert block[[0, -1]].tolist() == [3.0, 3.0]
        del again, block
        larger = comm.empty(120 * mib)
        assert held_bytes() - before < 230 << 20
        comm.all_reduce(larger.fill_(1.0))
        assert larger[-1] == 2.0

    dpcore.spawn(body, 2)


@pytest.mark.parametrize(("world", "groups"), [(2, 300), (8, 80)])
def test_many_groups_at_once(world, groups):
    """There was room for 254 of two ranks, and for 63 of eight."""
    job = uuid.uuid4().hex

    def body(comm):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
        made = [
            session.connect(f"{job}-{i}", comm.rank, comm.world_size, timeout=120.0)
            for i in range(groups)
        ]
        tensor = torch.ones(3000)
        for one in made:
            one.all_reduce(tensor, "max")
        for one in made:
            one.close()
        return tensor.sum().item()

    assert dpcore.spawn(body, world) == [3000.0] * world
