"""Elements without arithmetic (float8, unsigned integers, ...) are moved as they are. Reductions
refuse them, and the advice that they give works."""

import numpy as np
import pytest
import torch

import dpcore

TYPES = {
    torch.float8_e4m3fn: lambda t: t.float(),
    torch.float8_e5m2: lambda t: t.float(),
    torch.float8_e8m0fnu: lambda t: t.float(),
    torch.uint16: lambda t: t.to(torch.int32),
    torch.uint32: lambda t: t.to(torch.int64),
    torch.uint64: lambda t: t.view(torch.int64),
    torch.complex32: lambda t: t.to(torch.complex64),
}
UNSIGNED = {"uint16": "astype", "uint32": "astype", "uint64": "view"}
MANY = 100_000  # too many for a slot or one copy


def spawn(body, world=2):
    return dpcore.spawn(body, world, mode="threads")


def bits(tensor):
    return torch.from_numpy(tensor).view(torch.uint8) if isinstance(tensor, np.ndarray) else (
        tensor.view(torch.uint8)
    )  # fmt: skip


def of_rank(rank, count, dtype):
    """Random bits, NaN among them."""
    size = torch.empty(0, dtype=dtype).element_size()
    made = torch.Generator().manual_seed(rank)
    return torch.randint(0, 256, (count * size,), generator=made, dtype=torch.uint8).view(dtype)


def move_all_ways(comm, make, like, join):
    """``make(rank, count)`` is what a rank gives, ``like(x)`` room for as much."""
    world, rank = comm.world_size, comm.rank
    for count in (3, MANY):
        given = [make(r, count) for r in range(world)]
        together, own = join(given), given[rank]
        taken = like(given[0])
        taken[:] = own
        comm.broadcast(taken, root=1)
        assert bits(taken).equal(bits(given[1]))
        whole = like(together)
        comm.all_gather(whole, own)
        assert bits(whole).equal(bits(together))
        whole = like(together)
        comm.gather(whole if rank == 0 else None, own)
        assert rank != 0 or bits(whole).equal(bits(together))
        taken = like(own)
        comm.scatter(taken, together if rank == 0 else None)
        assert bits(taken).equal(bits(own))
        whole = like(together)
        comm.all_to_all(whole, join([own] * world))
        assert bits(whole).equal(bits(together))
        taken = like(own)
        if rank == 0:
            comm.send(own, 1)
            comm.recv(taken, 1)
        else:
            comm.recv(taken, 0)
            comm.send(own, 0)
        assert bits(taken).equal(bits(given[1 - rank]))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_tensors_are_moved_bit_by_bit(dtype):
    def body(comm):
        move_all_ways(
            comm, lambda rank, count: of_rank(rank, count, dtype), torch.zeros_like,
            lambda parts: torch.cat([bits(part) for part in parts]).view(dtype),
        )  # fmt: skip

    spawn(body)


@pytest.mark.parametrize("dtype", UNSIGNED)
def test_arrays_are_moved_bit_by_bit(dtype):
    def body(comm):
        move_all_ways(
            comm, lambda rank, count: of_rank(rank, count, getattr(torch, dtype)).numpy(),
            np.zeros_like, np.concatenate,
        )  # fmt: skip

    spawn(body)


def test_parts_of_different_sizes_are_counted_in_elements():
    def body(comm):
        sizes = [1, 3]
        own = of_rank(comm.rank, sizes[comm.rank], torch.uint16)
        whole = torch.zeros(4, dtype=torch.uint16)
        comm.all_gather(whole, own, sizes=sizes)
        expected = [of_rank(r, sizes[r], torch.uint16) for r in range(2)]
        assert whole.tolist() == [number for part in expected for number in part.tolist()]

    spawn(body)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_an_arena_has_room_for_them(dtype):
    def body(comm):
        tensor = comm.empty(5, dtype=dtype)
        tensor.copy_(of_rank(comm.rank, 5, dtype))
        comm.broadcast(tensor)
        assert bits(tensor).equal(bits(of_rank(0, 5, dtype)))

    spawn(body)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_reductions_of_tensors_say_what_to_pass_and_that_is_right(dtype):
    convert = TYPES[dtype]

    def body(comm):
        ones = torch.ones(4).to(dtype)
        calls = (
            lambda: comm.all_reduce(ones),
            lambda: comm.reduce(ones),
            lambda: comm.reduce_scatter(ones[:2], ones),
        )
        for call in calls:
            with pytest.raises(
                dpcore.Unsupported, match=r"can be moved .* no arithmetic"
            ) as raised:
                call()
        numbers = {"t": ones, "torch": torch}
        advice = str(raised.value).partition("pass ")[2].partition(",")[0]
        advised = eval(f"t{advice}", numbers)
        assert advised.dtype == convert(ones).dtype
        comm.all_reduce(advised)
        return advised.tolist()

    assert spawn(body) == [[2] * 4] * 2


@pytest.mark.parametrize("dtype", UNSIGNED)
def test_reductions_of_arrays_say_what_to_pass_and_that_is_right(dtype):
    def body(comm):
        ones = np.ones(4, dtype)
        with pytest.raises(dpcore.Unsupported, match=f"arrays of {dtype} can be moved") as raised:
            comm.all_reduce(ones)
        advice = str(raised.value).partition("pass ")[2].partition(",")[0]
        assert UNSIGNED[dtype] in advice
        advised = eval(advice, {"array": ones})
        comm.all_reduce(advised)
        return advised.tolist()

    assert spawn(body) == [[2] * 4] * 2


def test_the_largest_sum_of_uint64_wraps_as_numpy_does():
    """What the advice says of a sum."""

    def body(comm):
        largest = torch.full((4,), 2**64 - 1, dtype=torch.uint64)
        comm.all_reduce(largest.view(torch.int64))
        return largest.tolist()

    assert spawn(body) == [[2**64 - 2] * 4] * 2


@pytest.mark.parametrize(
    ("array", "says"),
    [
        (np.array(["2020-01-01"], "M8[D]"), r"ndarray can't be read as a buffer .*'M'.*view\("),
        (np.array([1], "m8[s]"), r"ndarray can't be read as a buffer .*'m'.*view\("),
        (np.array([None, 1]), "arrays of object are not supported: they hold Python objects"),
        (np.array(["a"]), "arrays of text are not supported"),
        (np.zeros(2, "i4,f4"), r"arrays of \[\('f0', '<i4'\), \('f1', '<f4'\)\] are not"),
        (np.ones(2, "g"), "arrays of (float128|longdouble) are not supported"),
        (np.ones(2, ">f4"), "arrays of >f4 are not supported: their bytes are swapped"),
    ],
    ids=["time", "duration", "objects", "text", "fields", "long double", "big-endian"],
)
def test_arrays_of_no_numbers_are_refused_by_what_they_hold(array, says):
    def body(comm):
        for call in (comm.all_reduce, comm.broadcast, lambda a: comm.send(a, 1 - comm.rank)):
            with pytest.raises(dpcore.Unsupported, match=says):
                call(array)

    spawn(body)


def test_times_are_moved_as_the_message_says():
    def body(comm):
        times = np.array(["2020-01-01", "2021-01-01"][comm.rank :][:1], "M8[D]")
        comm.broadcast(times.view("int64"))
        return str(times[0])

    assert spawn(body) == ["2020-01-01"] * 2
