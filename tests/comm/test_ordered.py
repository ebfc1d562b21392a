"""Ordered algorithms: the result is a function of the inputs, however they are cut and laid out.

The data are random floats, so that any other order of the additions shows in the bits. The
reference adds in rank order, in float32, and rounds once at the end.
"""

import itertools

import pytest
import torch

import dpcore

N = 150_001  # more than one chunk of a stage, and no multiple of anything
PIECES = (1, 777, 4096, 13, 70_000, 2, 75_000)
LAYOUTS = {"whole": (N,), "pieces": (*PIECES, N - sum(PIECES)), "halves": (N // 2, N - N // 2)}
WORLDS = (2, 3, 4, 5)
DTYPES = (torch.float32, torch.bfloat16)
ALL_REDUCE = (None, "one_shot", "two_shot", "one_shot/moves", "two_shot/moves")
UNORDERED = {
    "all_reduce": ("ring", "recursive_doubling", "halving_doubling", "tree"),
    "reduce": ("tree",),
    "reduce_scatter": ("ring", "halving_doubling"),
}


def random_data(rank, dtype, count=N):
    generator = torch.Generator().manual_seed(rank)
    exponents = torch.randint(-12, 12, (count,), generator=generator)
    return torch.ldexp(torch.randn(count, generator=generator), exponents).to(dtype)


def in_rank_order(world, dtype, op, count=N):
    total = random_data(0, dtype, count).float()
    for rank in range(1, world):
        total = total + random_data(rank, dtype, count).float()
    if op == "mean":
        total = total * torch.tensor(1 / world, dtype=torch.float32)
    return total.to(dtype)


def same_bits(a, b):
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def in_memory(comm, content, memory):
    tensor = comm.empty(content.shape, dtype=content.dtype) if memory == "arena" else None
    tensor = torch.empty_like(content) if tensor is None else tensor
    return tensor.copy_(content)


def run_all_reduces(comm, dtype, op):
    """The variants whose bits differ from those of rank order."""
    data = random_data(comm.rank, dtype)
    expected = in_rank_order(comm.world_size, dtype, op)
    wrong = []
    for algorithm, memory, (layout, sizes) in itertools.product(
        ALL_REDUCE, ("plain", "arena"), LAYOUTS.items()
    ):
        tensor = in_memory(comm, data, memory)
        works = [
            comm.all_reduce(piece, op, algorithm=algorithm, async_op=True)
            for piece in tensor.split(sizes)
        ]
        for work in works:
            work.wait()
        if not same_bits(tensor, expected):
            wrong.append((algorithm, memory, layout))
    return wrong


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_all_reduce_adds_in_rank_order_for_every_layout(world, dtype):
    op = "mean" if world % 2 else "sum"
    for wrong in dpcore.spawn(run_all_reduces, world, dtype, op, mode="threads"):
        assert not wrong


def test_all_reduce_adds_in_rank_order_between_processes():
    for wrong in dpcore.spawn(run_all_reduces, 3, torch.float32, "sum"):
        assert not wrong


def run_parts_and_roots(comm, dtype):
    world, rank = comm.world_size, comm.rank
    count = N // world * world
    data = random_data(rank, dtype, count)
    expected = in_rank_order(world, dtype, "sum", count)
    wrong = []
    for memory, algorithm in itertools.product(
        ("plain", "arena"), (None, "direct", "direct/moves")
    ):
        source = in_memory(comm, data, memory)
        shard = in_memory(comm, torch.zeros(count // world, dtype=dtype), memory)
        comm.reduce_scatter(shard, source, algorithm=algorithm)
        if not same_bits(shard, expected.view(world, -1)[rank]):
            wrong.append(("reduce_scatter", memory, algorithm))
    for memory, algorithm in itertools.product(
        ("plain", "arena"), (None, "direct", "direct/moves", "two_shot")
    ):
        tensor = in_memory(comm, data, memory)
        comm.reduce(tensor, world - 1, algorithm=algorithm)
        if not same_bits(tensor, expected if rank == world - 1 else data):
            wrong.append(("reduce", memory, algorithm))
    return wrong


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_reduce_and_reduce_scatter_add_in_rank_order(world, dtype):
    for wrong in dpcore.spawn(run_parts_and_roots, world, dtype, mode="threads"):
        assert not wrong


def test_the_data_tell_another_order_from_rank_order():
    def ring(comm):
        tensor = random_data(comm.rank, torch.float32)
        comm.all_reduce(tensor, algorithm="ring")
        return tensor

    results = dpcore.spawn(ring, 3, mode="threads")
    assert all(same_bits(result, results[0]) for result in results)
    assert not same_bits(results[0], in_rank_order(3, torch.float32, "sum"))


# ---- deterministic=True ----------------------------------------------------------------------


def call(comm, collective, algorithm):
    world = comm.world_size
    tensors = [torch.ones(world)]
    if collective == "reduce_scatter":
        tensors.insert(0, torch.empty(1))
    getattr(comm, collective)(*tensors, algorithm=algorithm)
    return tensors[0]


def test_deterministic_refuses_what_is_not_ordered_and_goes_on():
    def body(comm):
        for collective, algorithms in UNORDERED.items():
            for algorithm, suffix in itertools.product(algorithms, ("", "/moves")):
                with pytest.raises(dpcore.Unsupported, match=f"'{algorithm}'.*deterministic"):
                    call(comm, collective, algorithm + suffix)
        return call(comm, "all_reduce", None).tolist()

    assert dpcore.spawn(body, 3, mode="threads", deterministic=True) == [[3.0] * 3] * 3


def test_deterministic_refuses_a_schedule_of_ones_own_that_is_not_ordered():
    def body(comm):
        ring = dpcore.schedule("ring", "all_reduce", 3)
        mine = dpcore.Schedule("mine", "all_reduce", 3, ring.chunks, ring.moves)
        with pytest.raises(dpcore.Unsupported, match=r"'mine'.*deterministic"):
            call(comm, "all_reduce", mine)
        direct = dpcore.schedule("two_shot", "all_reduce", 3)
        ordered = dpcore.Schedule("ordered", "all_reduce", 3, direct.chunks, direct.moves)
        return call(comm, "all_reduce", ordered).tolist()

    assert dpcore.spawn(body, 3, mode="threads", deterministic=True) == [[3.0] * 3] * 3


def test_deterministic_allows_ordered_algorithms_and_those_that_only_move_data():
    def body(comm):
        for algorithm in ALL_REDUCE:
            call(comm, "all_reduce", algorithm)
        call(comm, "reduce_scatter", "direct")
        call(comm, "reduce", "two_shot")
        for algorithm in dpcore.algorithms_of("broadcast"):
            call(comm, "broadcast", algorithm)

    dpcore.spawn(body, 3, mode="threads", deterministic=True)


def test_two_ranks_can_only_add_in_rank_order():
    def body(comm):
        tensor = random_data(comm.rank, torch.float32, 1001)
        comm.all_reduce(tensor, algorithm="ring")
        return same_bits(tensor, in_rank_order(2, torch.float32, "sum", 1001))

    assert dpcore.spawn(body, 2, mode="threads", deterministic=True) == [True, True]
