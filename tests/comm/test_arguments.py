"""Arguments that make no sense: refused before anything is sent, and the communicator goes on.

Every rank makes the same mistake, then all do a collective. Were anything of the refused call on
its way, that collective would see a mismatch. What ``stats()`` says is looked at here as well.
"""

import array
import functools
import time

import numpy as np
import pytest
import torch

import dpcore

WORLD = 3
ONES = torch.ones


def others(comm):
    return (comm.rank + 1) % WORLD


def read_only(count):
    numbers = np.zeros(count, np.float32)
    numbers.flags.writeable = False
    return numbers


def fortran(*shape):
    return np.ones(shape, np.float32, order="F")


def overlapping(begin):
    """A buffer and a part of it that isn't the calling rank's."""
    whole = ONES(6)
    return whole, whole[begin : begin + 2]


def wrong_place(comm):
    return overlapping((2 * comm.rank + 1) % 5)


# name: (the call, a piece of the error's message)
TENSORS = {
    "strided": (
        lambda c: c.all_reduce(ONES(4, 4)[:, 1]), "of shape \\[4\\] is not contiguous"),
    "transposed": (lambda c: c.all_reduce(ONES(4, 3).t()), "not contiguous"),
    "expanded": (lambda c: c.broadcast(ONES(1).expand(4)), "not contiguous"),
    "strided input": (lambda c: c.all_gather(ONES(6), ONES(4)[::2]), "input: .*not contiguous"),
    "strided output": (lambda c: c.all_gather(ONES(12)[::2], ONES(2)), "output: .*not contiguous"),
    "strided message": (lambda c: c.send(ONES(4)[::2], others(c)), "not contiguous"),
    "strided array": (lambda c: c.all_reduce(np.ones((4, 4))[:, 1]), "gaps in memory"),
    "Fortran order": (
        lambda c: c.all_reduce(fortran(2, 3)), "column by column .Fortran order.*array.T"),
    "Fortran input": (
        lambda c: c.all_gather(np.ones((6, 3), "f4"), fortran(2, 3)), "input: .*Fortran"),
    "Fortran output": (
        lambda c: c.reduce_scatter(fortran(2, 3), np.ones((6, 3), "f4")), "output: .*Fortran"),
    "Fortran memory": (lambda c: c.broadcast(memoryview(fortran(2, 3))), "Fortran"),
    "Fortran message": (lambda c: c.send(fortran(2, 3), others(c)), "Fortran"),
    "permuted axes": (lambda c: c.all_reduce(np.ones((2, 3, 4)).swapaxes(1, 2)), "are permuted"),
    "channels last": (
        lambda c: c.all_reduce(ONES(2, 3, 4, 5).to(memory_format=torch.channels_last)),
        "not contiguous"),
    "reversed array": (lambda c: c.all_reduce(np.ones(4)[::-1]), "gaps in memory"),
    "float8": (lambda c: c.all_reduce(ONES(4).to(torch.float8_e4m3fn)), "Float8_e4m3fn can be"),
    "uint16": (lambda c: c.all_reduce(ONES(4).to(torch.uint16)), "UInt16 can be moved .*int32"),
    "uint32 array": (lambda c: c.all_reduce(np.ones(4, "u4")), "arrays of uint32 can be moved"),
    "long double": (lambda c: c.all_reduce(np.ones(4, "g")), "(float128|longdouble) are not"),
    "big-endian": (lambda c: c.all_reduce(np.ones(4, ">f4")), "arrays of >f4 are not supported"),
    "fields": (lambda c: c.all_reduce(np.zeros(4, "i4,f4")), "are not supported"),
    "text": (lambda c: c.all_reduce(np.array(["a", "b"])), "of text are not"),
    "objects": (lambda c: c.all_reduce(np.array([None, 1])), "arrays of object are not"),
    "meta": (lambda c: c.all_reduce(torch.ones(4, device="meta")), "is on meta"),
    "sparse": (lambda c: c.all_reduce(ONES(4).to_sparse()), "sparse"),
    "conjugate view": (lambda c: c.all_reduce(ONES(4, dtype=torch.complex64).conj()), "resolve"),
    "negative view": (lambda c: c.all_reduce(torch._neg_view(ONES(4))), "resolve"),
    "read-only array": (lambda c: c.all_reduce(read_only(4)), "can't be written to"),
    "read-only output": (
        lambda c: c.all_gather(read_only(6), np.ones(2, "f4")), "output: .*can't be written"),
    "read-only receive": (lambda c: c.recv(read_only(4), others(c)), "can't be written to"),
    "bytes": (lambda c: c.all_reduce(b"1234"), "can't be written to"),
    "two dtypes": (
        lambda c: c.all_gather(ONES(6), ONES(2).double()), "input is float64, output is float32"),
    "overlap, all_gather": (lambda c: c.all_gather(*wrong_place(c)), "overlap"),
    "overlap, reduce_scatter": (lambda c: c.reduce_scatter(*wrong_place(c)[::-1]), "overlap"),
    "overlap, all_to_all": (
        lambda c: (lambda x: c.all_to_all(x[1:], x[:-1]))(ONES(7)), "overlap"),
    "overlap, uneven all_to_all": (
        lambda c: (lambda x: c.all_to_all(
            x, x, output_sizes=[2, 2, 2], input_sizes=[2, 2, 2]))(ONES(6)), "overlap"),
}  # fmt: skip

NOT_TENSORS = {
    "list": lambda c: c.all_reduce([1.0, 2.0]),
    "None": lambda c: c.all_reduce(None),
    "no output": lambda c: c.all_gather(None, ONES(2)),
    "no input": lambda c: c.reduce_scatter(ONES(2), None),
    "no input to exchange": lambda c: c.all_to_all(ONES(6), None),
    "float": lambda c: c.send(1.0, others(c)),
    "object": lambda c: c.broadcast(object()),
}

OPS = {
    "unknown": (lambda c: c.all_reduce(ONES(4), "xor"), 'unknown reduction "xor": use sum, mean'),
    "premul_sum of integers": (
        lambda c: c.reduce(ONES(4).long(), op="premul_sum", factor=2.0), "premul_sum .*for int64"),
    "band of floats": (lambda c: c.all_reduce(ONES(4), "band"), "band .*for float32"),
    "max of complex": (
        lambda c: c.reduce_scatter(ONES(1).cfloat(), ONES(3).cfloat(), "max"), "for complex64"),
    "mean of bools": (lambda c: c.all_reduce(ONES(4).bool(), "mean"), "mean .*for bool"),
}  # fmt: skip

COUNTS = {
    "output too short": (
        lambda c: c.all_gather(ONES(5), ONES(2)), "output has 5 elements, 6 are needed"),
    "output too long": (
        lambda c: c.all_gather(ONES(7), ONES(2)), "output has 7 elements, 6 are needed"),
    "not divisible": (lambda c: c.reduce_scatter(ONES(2), ONES(7)), "input has 7 elements, 6"),
    "part too long": (lambda c: c.reduce_scatter(ONES(3), ONES(6)), "output has 3 elements, 2"),
    "exchange": (lambda c: c.all_to_all(ONES(7), ONES(7)), "input has 7 elements, 6"),
    "sum of the parts": (
        lambda c: c.all_gather(ONES(6), ONES(2), sizes=[2, 2, 3]),
        "output has 6 elements, 7 are|input has 2 elements, 3 are"),
    "own part": (
        lambda c: c.all_gather(ONES(6), ONES(3), sizes=[2, 2, 2]), "input has 3 elements, 2"),
    "sizes for two": (
        lambda c: c.all_gather(ONES(6), ONES(2), sizes=[3, 3]), "has 2 entries.*per rank.*3"),
    "one list of two": (
        lambda c: c.all_to_all(ONES(6), ONES(6), input_sizes=[2, 2, 2]), "or neither"),
}  # fmt: skip

RANKS = {
    "root too high": (lambda c: c.broadcast(ONES(4), root=3), "root 3 is not a rank: 0..2"),
    "root too low": (lambda c: c.reduce(ONES(4), root=-1), "root -1 is not a rank"),
    "root of gather": (lambda c: c.gather(None, ONES(2), root=9), "root 9 is not a rank"),
    "root of scatter": (lambda c: c.scatter(ONES(2), None, root=9), "root 9 is not a rank"),
    "output missing or not": (
        lambda c: c.gather(None if c.rank == 0 else ONES(6), ONES(2)),
        "output must be (given|None) here \\(root is 0\\)"),
    "input missing or not": (
        lambda c: c.scatter(ONES(2), None if c.rank == 1 else ONES(6), root=1),
        "input must be (given|None) here \\(root is 1\\)"),
    "to myself": (lambda c: c.send(ONES(4), c.rank), "can't exchange a message with"),
    "to nobody": (lambda c: c.send(ONES(4), 3), "choose another rank of 0..2"),
    "from nobody": (lambda c: c.recv(ONES(4), -1), "can't exchange a message with -1"),
    "color": (lambda c: c.split(-3), "color -3"),
}  # fmt: skip

ALGORITHMS = {
    "unknown": (
        lambda c: c.all_reduce(ONES(4), algorithm="spiral"),
        "'spiral' for all_reduce; choose one of: one_shot, two_shot, ring, .*tree"),
    "of another collective": (
        lambda c: c.broadcast(ONES(4), algorithm="bruck"), "choose one of: direct, .*tree"),
    "unknown moves": (
        lambda c: c.all_reduce(ONES(4), algorithm="auto/moves"), "choose one of: one_shot"),
    "for an uneven exchange": (
        lambda c: c.all_to_all(
            ONES(6), ONES(6), input_sizes=[2] * 3, output_sizes=[2] * 3, algorithm="bruck"),
        "leave algorithm out"),
}  # fmt: skip


def run_mistake(comm, mistake, kinds, message):
    with pytest.raises(kinds, match=message) as raised:
        mistake(comm)
    assert not comm.closed
    tensor = torch.full((5,), float(comm.rank))
    comm.all_reduce(tensor, "max")
    assert tensor.tolist() == [2.0] * 5
    comm.all_gather(gathered := torch.empty(WORLD), torch.tensor([float(comm.rank)]))
    assert gathered.tolist() == [0.0, 1.0, 2.0]
    return type(raised.value)


def assert_refused(mistake, kinds, message):
    dpcore.spawn(run_mistake, WORLD, mistake, kinds, message, mode="threads")


def each(table):
    return pytest.mark.parametrize(("mistake", "message"), table.values(), ids=table)


@each(TENSORS)
def test_buffers_that_cannot_be_used(mistake, message):
    assert_refused(mistake, dpcore.Unsupported, message)


@pytest.mark.parametrize("mistake", NOT_TENSORS.values(), ids=NOT_TENSORS)
def test_things_that_are_no_buffers(mistake):
    assert_refused(mistake, TypeError, "expected a torch tensor or a numpy array, not")


@each(OPS)
def test_operators_that_have_no_meaning(mistake, message):
    assert_refused(mistake, dpcore.Unsupported, message)


@each(COUNTS)
def test_numbers_of_elements_that_do_not_fit(mistake, message):
    assert_refused(mistake, ValueError, message)


@each(RANKS)
def test_ranks_that_do_not_exist(mistake, message):
    assert_refused(mistake, ValueError, message)


def test_numbers_that_are_none():
    def body(comm):
        for call, what in (
            (lambda: comm.split(0, key="a"), "key: expected an integer, not 'a'"),
            (lambda: comm.explain("1M"), "nbytes: expected an integer, not '1M'"),
            (lambda: comm.empty(2.5), "shape: expected an integer, not 2.5"),
        ):
            with pytest.raises(TypeError, match=what):
                call()
        with pytest.raises(ValueError, match="nbytes -1 is out of range: "):
            comm.explain(-1)

    dpcore.spawn(body, 1, mode="threads")


@each(ALGORITHMS)
def test_algorithms_that_do_not_exist(mistake, message):
    assert_refused(mistake, dpcore.Unsupported, message)


@pytest.mark.parametrize("asynchronous", (False, True))
def test_a_mistake_is_raised_by_the_call_also_when_asynchronous(asynchronous):
    def mistake(comm):
        comm.all_reduce(ONES(4), "band", async_op=asynchronous)

    assert_refused(mistake, dpcore.Unsupported, "band")


def test_what_is_not_a_name_or_a_number_is_a_type_error():
    for mistake in (
        lambda c: c.all_reduce(ONES(4), algorithm=7),
        lambda c: c.all_reduce(ONES(4), priority="high"),
        lambda c: c.send(ONES(4), others(c), tag=-1),
        lambda c: c.all_gather(ONES(6), ONES(2), sizes=[-2, 4, 4]),
        lambda c: c.empty(3, dtype="float32"),
    ):
        assert_refused(mistake, TypeError, None)


def test_deadlines_that_are_none():
    for mistake in (
        lambda c: c.all_reduce(ONES(4), timeout=-1.0),
        lambda c: c.send(ONES(4), others(c), timeout=-1),
        lambda c: c.barrier(timeout=float("nan")),
    ):
        assert_refused(mistake, TypeError, "timeout: expected seconds")
    for timeout in (0, -1.0, float("nan")):
        with pytest.raises(dpcore.Unsupported, match=r"timeout.* more than 0 seconds"):
            dpcore.init(rank=0, world_size=1, timeout=timeout)

    def body(comm):
        work = comm.all_reduce(ONES(4), async_op=True)
        for timeout in (-1.0, float("nan")):
            with pytest.raises(dpcore.Unsupported, match=r"timeout .* seconds"):
                work.wait(timeout)
        work.wait()

    dpcore.spawn(body, 2, mode="threads")


@pytest.mark.parametrize("timeout", [float("inf"), 1e10, 1e300])
def test_deadlines_that_never_come(timeout):
    def body(comm):
        late = comm.rank * 0.05
        for call in (
            lambda: comm.all_reduce(ONES(4), timeout=timeout),
            lambda: comm.all_reduce(ONES(4), async_op=True).wait(timeout=timeout),
            lambda: comm.barrier(timeout=timeout),
            lambda: comm.split(0).close(),
        ):
            time.sleep(late)
            call()

    dpcore.spawn(body, 2, mode="threads", timeout=timeout)
    for transport in ("shm", "tcp"):
        dpcore.spawn(body, 2, timeout=timeout, transport=transport)


def test_a_world_of_one_refuses_the_same_names():
    def body(comm):
        with pytest.raises(dpcore.Unsupported, match="choose one of: one_shot"):
            comm.all_reduce(ONES(4), algorithm="spiral")
        with pytest.raises(dpcore.Unsupported, match="unknown reduction"):
            comm.all_reduce(ONES(4), "xor")
        for name in dpcore.algorithms_of("all_reduce"):
            comm.all_reduce(ONES(4), algorithm=name)

    dpcore.spawn(body, 1, mode="threads")


@pytest.mark.parametrize(
    ("shape", "dtype", "kind"),
    [
        ((-1,), torch.float32, ValueError),
        ((4,), torch.quint8, dpcore.Unsupported),
        ((1 << 50,), torch.float32, dpcore.Error),
        ((1 << 40, 1 << 40), torch.float32, (dpcore.Error, ValueError)),
        ((1 << 62, 4), torch.float32, (dpcore.Error, ValueError)),
    ],
    ids=("negative", "dtype", "too large", "overflow", "overflow to zero"),
)
def test_memory_that_cannot_be_had(shape, dtype, kind):
    assert_refused(functools.partial(take, shape=shape, dtype=dtype), kind, None)


def take(comm, shape, dtype):
    comm.empty(shape, dtype=dtype)


def test_arena_tensors_of_any_shape():
    def body(comm):
        assert comm.empty(3, 4).shape == comm.empty((3, 4)).shape == (3, 4)
        assert comm.empty(torch.Size([2])).dtype == torch.float32
        assert comm.empty(0, 5).numel() == 0
        assert comm.empty((), dtype=torch.int8).shape == ()
        one, other = comm.empty(1000), comm.empty(1000)
        one.fill_(1)
        other.fill_(2)
        assert one.sum() == 1000
        comm.close()
        one.fill_(3)  # outlives the communicator
        return one.sum().item()

    assert dpcore.spawn(body, 2, mode="threads") == [3000.0] * 2


# ---- stats -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ("threads", "processes"))
def test_stats_tell_what_ran_how_often_and_how_much(mode):
    def body(comm):
        used_before = comm.stats()["arena"]["used"]
        mapped = comm.empty(10_000)
        for _ in range(3):
            comm.all_reduce(mapped)
        comm.all_reduce(ONES(10_000))
        comm.all_reduce(ONES(10_000), algorithm="ring")
        comm.all_gather(torch.empty(30), ONES(10))
        comm.barrier()
        stats = comm.stats()
        assert set(stats) == {"all_reduce", "all_gather", "barrier", "sent", "arena"}
        by_path = stats["all_reduce"]
        assert {path: entry["operations"] for path, entry in by_path.items()} == {
            "two_shot/push": 3,
            "two_shot/stage": 1,
            "moves": 1,
        }
        assert by_path["two_shot/push"]["bytes"] == 3 * 40_000
        assert stats["all_gather"]["direct/stage"]["bytes"] == 120
        assert stats["barrier"]["barrier"]["operations"] == 1
        assert stats["arena"]["used"] >= used_before + 40_000
        assert stats["arena"]["bytes"] >= stats["arena"]["used"]
        used = stats["arena"]["used"]
        del mapped
        assert comm.stats()["arena"]["used"] == used - 40_000 // 64 * 64
        group = comm.split(0)
        assert set(group.stats()) == {"sent", "arena"}  # counts for itself

    dpcore.spawn(body, 3, mode=mode)


def test_stats_of_a_world_of_one():
    def body(comm):
        comm.all_reduce(numbers := array.array("d", [1.0, 2.0]), "mean")
        assert numbers.tolist() == [1.0, 2.0]
        return comm.stats()["all_reduce"]

    (stats,) = dpcore.spawn(body, 1, mode="threads")
    assert stats == {"alone": {"operations": 1, "bytes": 16, "peer_reads": 0, "peer_writes": 0}}


def ring_by_default(comm):
    x = torch.full((5,), float(comm.rank))
    comm.all_reduce(x)
    parts = torch.empty(10) if comm.rank == 0 else None
    comm.gather(parts, x)  # there is no ring for it: the automatic choice
    return x.tolist(), sorted(comm.stats()["all_reduce"])


def test_the_default_algorithm_is_for_the_collectives_that_have_it():
    for values, paths in dpcore.spawn(ring_by_default, 2, mode="threads", algorithm="ring"):
        assert values == [1.0] * 5
        assert paths == ["moves"]


def test_an_unknown_default_algorithm_is_refused_at_the_start():
    with pytest.raises(dpcore.Unsupported, match="'rinng' does not exist; there are auto, "):
        dpcore.init(rank=0, world_size=1, algorithm="rinng")
