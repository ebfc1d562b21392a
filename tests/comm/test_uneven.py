"""Parts of different sizes, none among them, and arrays that are not torch tensors."""

import array
import itertools

import numpy as np
import pytest
import torch

import dpcore
from tests.comm.modes import HOW, MODES

SIZES = {
    "small": (0, 5, 2),
    "one has all": (7, 0, 0),
    "even": (3, 3, 3),
    "nothing": (0, 0, 0),
    "large": (40_000, 0, 123_457),
}
ROOT = 1


def part_of(rank, count, dtype=torch.float64):
    generator = torch.Generator().manual_seed(rank * 1_000_003 + count)
    return torch.randint(-50, 50, (count,), generator=generator).to(dtype)


def make(comm, count, memory):
    maker = comm.empty if memory == "arena" else torch.empty
    return maker(count, dtype=torch.float64).fill_(-99)


def filled(comm, content, memory):
    return make(comm, content.numel(), memory).copy_(content)


def algorithms(collective):
    return (None, "direct/moves", *dpcore.algorithms_of(collective))


def offset(sizes, rank):
    return sum(sizes[:rank])


def run_joins(comm, sizes):
    """all_gather and gather: parts of these sizes become one buffer."""
    rank, total = comm.rank, sum(sizes)
    expected = torch.cat([part_of(r, size) for r, size in enumerate(sizes)])
    for memory, in_place in itertools.product(("plain", "arena"), (False, True)):
        for collective in ("all_gather", "gather"):
            for algorithm in algorithms(collective):
                has_output = collective == "all_gather" or rank == ROOT
                output = make(comm, total, memory) if has_output else None
                mine = part_of(rank, sizes[rank])
                if in_place and has_output:
                    source = output[offset(sizes, rank) :][: sizes[rank]].copy_(mine)
                else:
                    source = filled(comm, mine, memory)
                options = {"root": ROOT} if collective == "gather" else {}
                getattr(comm, collective)(
                    output, source, sizes=sizes, algorithm=algorithm, **options
                )
                assert output is None or torch.equal(output, expected)
                assert torch.equal(source, mine)


def run_splits(comm, sizes):
    """scatter and reduce_scatter: a buffer falls into parts of these sizes."""
    rank, world, total = comm.rank, comm.world_size, sum(sizes)
    own = slice(offset(sizes, rank), offset(sizes, rank) + sizes[rank])
    inputs = [part_of(r, total) for r in range(world)]
    expected = {"scatter": inputs[ROOT][own], "reduce_scatter": sum(inputs)[own]}
    for memory, in_place in itertools.product(("plain", "arena"), (False, True)):
        for collective, promised in expected.items():
            for algorithm in algorithms(collective):
                has_input = collective == "reduce_scatter" or rank == ROOT
                source = filled(comm, inputs[rank], memory) if has_input else None
                target = source[own] if in_place and has_input else make(comm, sizes[rank], memory)
                options = {"root": ROOT} if collective == "scatter" else {}
                getattr(comm, collective)(
                    target, source, sizes=sizes, algorithm=algorithm, **options
                )
                assert torch.equal(target, promised)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("run", (run_joins, run_splits))
def test_parts_of_different_sizes(run, sizes):
    dpcore.spawn(run, 3, sizes, mode="threads")


@pytest.mark.parametrize("run", (run_joins, run_splits))
def test_parts_of_different_sizes_between_processes(run):
    dpcore.spawn(run, 3, SIZES["large"])


@pytest.mark.parametrize("world", (2, 3))
@pytest.mark.parametrize("run", (run_joins, run_splits))
def test_parts_that_just_fit_into_a_post_between_hosts(run, world):
    """Over TCP up to 64 KiB travel with the word of entry, counting each part as the longest."""
    longest = 65536 // 8 // world
    for count in (longest // 2, longest // 2 + 1, longest - 1, longest, longest + 1):
        dpcore.spawn(run, world, (count, 3, count - 5)[:world], **HOW["tcp"])


COUNTS = {  # [from][to]
    "small": ((1, 0, 3), (0, 0, 0), (2, 5, 1)),
    "nothing": ((0, 0, 0), (0, 0, 0), (0, 0, 0)),
    "one way": ((0, 9, 0), (0, 0, 9), (9, 0, 0)),
    "large": ((70_001, 0, 3), (1, 33_333, 150_000), (0, 65_536, 2)),
}


def run_exchange(comm, counts):
    rank, ranks = comm.rank, range(comm.world_size)
    leaving = counts[rank]
    coming = [counts[r][rank] for r in ranks]
    content = [[part_of(10 * r + to, counts[r][to]) for to in ranks] for r in ranks]
    expected = torch.cat([content[r][rank] for r in ranks])
    for memory in ("plain", "arena"):
        source = filled(comm, torch.cat(content[rank]), memory)
        target = make(comm, sum(coming), memory)
        comm.all_to_all(target, source, output_sizes=coming, input_sizes=leaving)
        assert torch.equal(target, expected)
        assert torch.equal(source, torch.cat(content[rank]))


@pytest.mark.parametrize("mode", MODES)
def test_all_to_all_of_uneven_parts(mode):
    def body(comm):
        for counts in COUNTS.values():
            run_exchange(comm, counts)

    dpcore.spawn(body, 3, **HOW[mode])


def test_lists_of_even_sizes_are_like_no_list():
    def body(comm):
        source = torch.arange(6.0) + 10 * comm.rank
        target = torch.empty(6)
        comm.all_to_all(target, source, output_sizes=[2, 2, 2], input_sizes=[2, 2, 2])
        expected = torch.empty(6)
        comm.all_to_all(expected, source)
        return torch.equal(target, expected)

    assert all(dpcore.spawn(body, 3, mode="threads"))


def test_stats_count_the_bytes_of_all_parts():
    given = [[4, 2, 1], [0, 0, 5], [3, 5, 0]]  # by each rank to each

    def body(comm):
        gives, takes = given[comm.rank], [row[comm.rank] for row in given]
        comm.all_to_all(
            torch.empty(sum(takes)), torch.ones(sum(gives)), output_sizes=takes, input_sizes=gives
        )
        parts = [10, 0, 2]
        comm.all_gather(torch.empty(12), torch.ones(parts[comm.rank]), sizes=parts)
        return {
            name: sum(path["bytes"] for path in comm.stats()[name].values())
            for name in ("all_to_all", "all_gather")
        }

    of_exchange = (7, 7, 8)  # elements that a rank gives, or that it takes when these are more
    expected = [{"all_to_all": 4 * elements, "all_gather": 48} for elements in of_exchange]
    for mode in MODES:
        assert dpcore.spawn(body, 3, **HOW[mode]) == expected


def test_sizes_that_contradict_each_other_are_a_mismatch():
    def body(comm):
        wrong = 2 if comm.rank == 0 else 1  # rank 1 expects one element of rank 0 only
        sizes = [1, wrong] if comm.rank == 0 else [1, 1]
        source, target = torch.ones(sum(sizes)), torch.ones(2)
        comm.all_to_all(target, source, output_sizes=[1, 1], input_sizes=sizes)

    with pytest.raises(dpcore.Mismatch, match="rank 0 sends 2 elements to rank 1"):
        dpcore.spawn(body, 2, mode="threads")


def test_sizes_that_contradict_each_other_in_a_world_of_one_are_a_mismatch():
    def body(comm):
        comm.all_to_all(torch.ones(1000), torch.ones(2), output_sizes=[1000], input_sizes=[2])

    with pytest.raises(dpcore.Mismatch, match="rank 0 sends 2 elements to rank 0, which expects 1"):
        dpcore.spawn(body, 1, mode="threads")


def test_sizes_whose_sum_is_larger_than_any_number_are_refused():
    def body(comm):
        none = torch.empty(0)
        if comm.rank == 1:
            with pytest.raises(dpcore.Unsupported, match="a part of 4611686018427387904 elements"):
                comm.gather(None, torch.ones(1), sizes=[2**62, 1])
        comm.all_to_all(none, none, input_sizes=[2**64 - 1, 1], output_sizes=[0, 0])

    with pytest.raises(dpcore.Unsupported, match="the input has 0 elements"):
        dpcore.spawn(body, 2, mode="threads")


def test_lists_of_sizes_that_differ_between_ranks_are_a_mismatch():
    def body(comm):
        sizes = [1, 2] if comm.rank == 0 else [2, 2]
        source, target = torch.ones(sizes[comm.rank]), torch.ones(sum(sizes))
        comm.all_gather(target, source, sizes=sizes)

    with pytest.raises(dpcore.Mismatch, match="the lists of sizes"):
        dpcore.spawn(body, 2, mode="threads")


@pytest.mark.parametrize("mode", MODES)
def test_sizes_on_some_ranks_only_are_a_mismatch(mode):
    def body(comm):
        none = torch.empty(0)
        sizes = {"input_sizes": [0, 0], "output_sizes": [0, 0]} if comm.rank == 0 else {}
        with pytest.raises(dpcore.Mismatch, match="the lists of sizes"):
            comm.all_to_all(none, none.clone(), **sizes)

    dpcore.spawn(body, 2, **HOW[mode])


# ---- numpy and other buffers -----------------------------------------------------------------

NUMPY_DTYPES = ("f8", "f4", "f2", "i8", "i4", "i2", "i1", "u1", "longlong", "intc", "c8", "c16")


@pytest.mark.parametrize("mode", MODES)
def test_numpy_arrays_of_every_supported_dtype(mode):
    def body(comm):
        for dtype in NUMPY_DTYPES:
            mine = (np.arange(24).reshape(4, 6) % 5 + comm.rank).astype(dtype)
            expected = sum((np.arange(24).reshape(4, 6) % 5 + r).astype(dtype) for r in range(3))
            reduced = mine.copy()
            comm.all_reduce(reduced)
            np.testing.assert_array_equal(reduced, expected)
            assert reduced.dtype == np.dtype(dtype)
            gathered = np.zeros((3, 4, 6), dtype)
            comm.all_gather(gathered, mine)
            np.testing.assert_array_equal(sum(gathered), expected)
        flags = np.arange(8) % 3 == comm.rank
        comm.all_reduce(flags, "max")
        assert flags.tolist() == [True] * 8

    dpcore.spawn(body, 3, **HOW[mode])


def test_other_buffers_and_odd_shapes():
    def body(comm):
        rank = comm.rank
        scalar = np.array(rank + 1.0)
        comm.all_reduce(scalar)
        assert scalar == 3.0
        number = torch.tensor(rank + 1)
        comm.all_reduce(number)
        assert number == 3
        empty = np.zeros((0, 4), np.float32)
        comm.all_reduce(empty)
        raw = bytearray([rank, 2])
        comm.all_reduce(raw, "max")
        assert list(raw) == [1, 2]
        view = memoryview(array.array("i", [rank, 5]))
        comm.broadcast(view, 1)
        assert view.tolist() == [1, 5]
        source = np.array([rank, 7.0])
        source.flags.writeable = False  # an input is only read
        target = torch.empty(4, dtype=torch.float64)
        comm.all_gather(target, source)
        assert target.tolist() == [0.0, 7.0, 1.0, 7.0]
        parameter = torch.nn.Parameter(torch.full((2, 2), float(rank)))
        comm.broadcast(parameter.data, 1)
        assert parameter.tolist() == [[1.0, 1.0]] * 2

    dpcore.spawn(body, 2, mode="threads")


def test_more_ranks_than_the_stage_has_much_room_for():
    """A chunk has 64 bytes for each of them; uneven parts are told to all at its front."""

    def body(comm):
        rank, world = comm.rank, comm.world_size
        exchanged = torch.empty(world, 20)
        comm.all_to_all(exchanged, torch.full((world, 20), float(rank)))
        assert torch.equal(exchanged[:, 7], torch.arange(float(world)))
        sizes = [1] * comm.world_size
        x = torch.zeros(sum(sizes))
        with pytest.raises(dpcore.Unsupported, match="uneven parts is for at most 512 ranks"):
            comm.all_to_all(x.clone(), x, input_sizes=sizes, output_sizes=sizes)

    dpcore.spawn(body, 513, mode="threads", timeout=60.0)
