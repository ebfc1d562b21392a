"""Ordinary memory that is only copied is read out of its owner's process, where ranks may do so.

``DPCORE_READ_PEERS=0`` stands for a kernel that does not let them.
"""

import ctypes
import itertools
import mmap
import os
import uuid

import numpy as np
import pytest
import torch

import dpcore
from tests.comm.test_fused_equals_moves import run, run_and_measure

COLLECTIVES = ("broadcast", "all_gather", "gather", "scatter", "all_to_all")
LONGEST = 1 << 20  # bytes that are read at the most where one piece is for all
SEGMENT = 256 << 10  # is read at once
SIZES = (16 << 10, SEGMENT // 4 - 1, SEGMENT // 4, SEGMENT // 4 + 1, 200_007)  # elements of a piece
READ, STAGE = "direct/read", "direct/stage"


def shortest(collective, world):
    """Bytes of a piece from which on it is read; None where the stage is always faster."""
    if collective == "gather" or (collective in ("broadcast", "all_gather") and world > 2):
        return None
    return 256 << 10 if collective == "all_to_all" else 64 << 10


def path_of(collective, world, elements):
    piece = 4 * elements // (world if collective == "broadcast" else 1)
    least = shortest(collective, world)
    too_long = collective in ("broadcast", "all_gather") and piece > LONGEST
    return STAGE if least is None or piece < least or too_long else READ


def refusing(comm, refused, name):
    """Another communicator of the same ranks; those of ``refused`` may not read the others."""
    rank, world = comm.rank, comm.world_size
    dpcore.finalize()
    if rank in refused:
        os.environ["DPCORE_READ_PEERS"] = "0"
    return dpcore.init(rank=rank, world_size=world, init_method=name)


@pytest.fixture(autouse=True)
def written_through_the_caches(monkeypatch):
    """As on processors on which all of these are read."""
    monkeypatch.setenv("DPCORE_BYPASS_CACHES", "0")


def spawn(body, world, *arguments):
    return dpcore.spawn(body, world, *arguments, mode="processes")


@pytest.mark.parametrize("refused", [(), (0, 1, 2, 3), (1,)], ids=["all", "none", "not rank 1"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_same_bytes_arrive_with_and_without_reading(world, refused):
    def body(comm, name):
        comm = refusing(comm, refused, name)
        for collective, count in itertools.product(COLLECTIVES, SIZES):
            moves = run(comm, collective, "direct/moves", torch.float32, count)
            for algorithm in ("auto", "direct"):
                fused = run(comm, collective, algorithm, torch.float32, count)
                assert fused is moves is None or torch.equal(fused, moves), (collective, count)
            path = run_and_measure(comm, collective, "auto", torch.float32, count)[0]
            assert path == (STAGE if refused else path_of(collective, world, count))

    spawn(body, world, f"reading-{uuid.uuid4().hex}")


def test_each_byte_is_read_once_and_none_is_written():
    def body(comm):
        for collective in ("broadcast", "all_gather", "scatter", "all_to_all"):
            cost = dpcore.schedule_cost(
                dpcore.schedule("direct", collective, comm.world_size, comm.world_size - 1),
                SIZES[-1],
                4,
            )
            expected = (READ, cost["received_bytes"][comm.rank], 0)
            assert run_and_measure(comm, collective, "auto", torch.float32, SIZES[-1]) == expected

    spawn(body, 2)


def test_a_stage_past_the_caches_is_faster_for_a_broadcast(monkeypatch):
    monkeypatch.setenv("DPCORE_BYPASS_CACHES", "1")

    def body(comm):
        taken = {
            collective: run_and_measure(comm, collective, "auto", torch.float32, SIZES[-1])[0]
            for collective in COLLECTIVES
        }
        assert {name for name, path in taken.items() if path == STAGE} == {"broadcast", "gather"}

    spawn(body, 2)


@pytest.mark.parametrize("world", [2, 3])
def test_where_it_begins_and_ends(world):
    def body(comm):
        for collective in COLLECTIVES:
            unit = world if collective == "broadcast" else 1
            for edge in (64 << 10, 256 << 10, LONGEST):
                for count in (unit * edge // 4 - 1, unit * edge // 4, unit * (edge // 4 + 1)):
                    path = run_and_measure(comm, collective, "auto", torch.float32, count)[0]
                    assert path == path_of(collective, world, count), (collective, count)

    spawn(body, world)


def test_sums_and_exchanges_in_place_go_by_the_stage():
    def body(comm):
        assert run_and_measure(comm, "reduce", "auto", torch.float32, SIZES[-1])[0] == STAGE
        exchanged = torch.arange(2 * SIZES[-1]) + comm.rank
        comm.all_to_all(exchanged, exchanged)  # what arrives would overwrite what has not left
        begin = comm.rank * SIZES[-1]
        sent = torch.arange(begin, begin + SIZES[-1])
        assert torch.equal(exchanged, torch.cat([sent, sent + 1]))
        assert list(comm.stats()["all_to_all"]) == [STAGE]

    spawn(body, 2)


@pytest.mark.parametrize("in_arena", [(0,), (1,)])
def test_some_inputs_lie_in_the_arena(in_arena):
    def body(comm):
        make = comm.empty if comm.rank in in_arena else torch.empty
        part = make(SIZES[-1]).fill_(comm.rank + 1)
        whole = torch.empty(2 * SIZES[-1])
        comm.all_gather(whole, part)
        assert [x.unique().tolist() for x in whole.chunk(2)] == [[1.0], [2.0]]
        assert list(comm.stats()["all_gather"]) == [READ]

    spawn(body, 2)


def test_an_owner_changes_its_data_as_soon_as_it_has_it_back():
    def body(comm):
        parts, mine = torch.empty(3, SIZES[-1]), torch.empty(SIZES[-1])
        for step in range(50):
            is_root = comm.rank == step % 3
            comm.scatter(mine, parts.fill_(step) if is_root else None, root=step % 3)
            parts.fill_(-1)
            assert mine.eq(step).all()
        assert list(comm.stats()["scatter"]) == [READ]

    spawn(body, 3)


def secret_memory(size):
    """Memory that the kernel lets nobody else read, as it does with that of a device's driver."""
    memfd_secret = 447  # of x86-64 and of ARM
    descriptor = ctypes.CDLL(None).syscall(memfd_secret, 0)
    if descriptor < 0:
        pytest.skip("this kernel has no secret memory")
    os.ftruncate(descriptor, size)
    memory = mmap.mmap(descriptor, size)
    os.close(descriptor)
    return np.frombuffer(memory, np.uint8)


def test_memory_that_cannot_be_read_goes_by_the_stage():
    def body(comm):
        mine = (secret_memory if comm.rank == 1 else np.empty)(SEGMENT)
        mine = mine.view(np.uint8)[:SEGMENT]
        mine[:] = 7 + comm.rank
        whole = np.zeros(2 * SEGMENT, np.uint8)
        comm.all_gather(whole, mine)
        assert (whole == np.repeat(np.array([7, 8], np.uint8), SEGMENT)).all()
        return list(comm.stats()["all_gather"])

    assert spawn(body, 2) == [[STAGE]] * 2


def test_threads_go_by_the_stage():
    def body(comm):
        return run_and_measure(comm, "broadcast", "auto", torch.float32, SIZES[-1])[0]

    assert dpcore.spawn(body, 2, mode="threads") == [STAGE] * 2
