"""backend="nccl" over a stand-in for the library, on devices whose memory is the host's.

What is seen here: arguments, the order of calls and of work in streams, results, errors, aborts and
deadlines. Not seen: NCCL itself and CUDA.
"""

import os

import pytest
import torch

import dpcore
from tests.comm import matrix
from tests.ranks.devices import calls, on_devices

pytestmark = pytest.mark.usefixtures("fake")


# ---- results ---------------------------------------------------------------------------------


def device_cases(world):
    """Those of the host, with a device's algorithms: NCCL's choice, and lists of moves."""
    cases = []
    for case in matrix.pairwise(7):
        collective, name = case.call
        if name != "auto" and not name.endswith("/moves"):
            name += "/moves"
        if case.world == world:
            size = min(case.size, 3001)
            call = (collective, name)
            cases.append(case._replace(call=call, memory=matrix.PLAIN, size=size))
    return cases


@pytest.mark.parametrize("world", matrix.WORLDS)
def test_every_pair_of_values_gives_what_the_reference_gives(world):
    cases = device_cases(world)
    results = on_devices(matrix.run_cases, world, cases, timeout=60.0)
    problems = [problem for _, of_rank in results for problem in of_rank]
    for case, fingerprints in zip(cases, zip(*(f for f, _ in results), strict=True), strict=True):
        if len(set(fingerprints)) > 1:
            problems.append(f"{case}: not the same bits on every rank")
    assert not problems, f"{len(problems)} problems:\n" + "\n".join(problems[:20])


SCHEDULES = ["ring", "two_shot", "one_shot", "tree", "halving_doubling", "recursive_doubling"]


@pytest.mark.parametrize("world", [2, 3, 5])
def test_moves_have_the_bits_of_the_processor(world):
    """The same schedule object, the other executor: sums that have to be rounded, in 16 bits."""

    def body(comm):
        generator = torch.Generator().manual_seed(comm.rank)
        results = []
        for name in SCHEDULES:
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                for op in ("sum", "mean"):
                    x = torch.randn(1003, generator=generator).to(dtype)
                    comm.all_reduce(x, op, algorithm=f"{name}/moves")
                    results.append(x.view(torch.uint8).clone())
        return results

    on_host = dpcore.spawn(body, world, mode="threads")
    for host, device in zip(on_host, on_devices(body, world), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(host, device, strict=True))


def test_uneven_parts():
    sizes = [3, 0, 5]

    def body(comm):
        rank = comm.rank
        gathered = torch.zeros(8)
        comm.all_gather(gathered, torch.full((sizes[rank],), rank + 1.0), sizes=sizes)
        part = torch.zeros(sizes[rank])
        comm.reduce_scatter(part, torch.arange(8.0) * (rank + 1), sizes=sizes)
        one = torch.zeros(8) if rank == 2 else None
        comm.gather(one, torch.full((sizes[rank],), rank + 1.0), 2, sizes=sizes)
        mine = torch.zeros(sizes[rank])
        comm.scatter(mine, torch.arange(8.0) if rank == 0 else None, 0, sizes=sizes)
        out = torch.zeros(3 * (rank + 1))
        comm.all_to_all(
            out, torch.full((6,), float(rank)), input_sizes=[1, 2, 3], output_sizes=[rank + 1] * 3
        )
        return gathered, part, one, mine, out

    whole = torch.tensor([1.0] * 3 + [3.0] * 5)
    begins = [0, 3, 3]
    for rank, (gathered, part, one, mine, out) in enumerate(on_devices(body, 3)):
        own = slice(begins[rank], begins[rank] + sizes[rank])
        assert torch.equal(gathered, whole)
        assert torch.equal(part, torch.arange(8.0)[own] * 6)
        assert one is None if rank != 2 else torch.equal(one, whole)
        assert torch.equal(mine, torch.arange(8.0)[own])
        assert torch.equal(out, torch.arange(3.0).repeat_interleave(rank + 1))


# ---- which calls -----------------------------------------------------------------------------


def test_calls_and_their_arguments(fake):
    def body(comm):
        x = torch.zeros(6)
        comm.all_reduce(x.bfloat16(), "mean")
        comm.all_reduce(x, "premul_sum", factor=0.5)
        comm.all_reduce(torch.zeros(6, dtype=torch.complex64))
        comm.all_reduce(torch.zeros(6, dtype=torch.bool), "bor")
        comm.reduce(x, 1, "max")
        comm.broadcast(torch.zeros(6, dtype=torch.float64), 1)
        comm.reduce_scatter(torch.zeros(3), x, "min")
        comm.all_gather(x, torch.zeros(3))
        comm.barrier()

    on_devices(body, 2)
    assert calls(fake, rank=1) == [
        "CommInitRankConfig 2 -",
        "AllReduce 6 x 9 op 4",
        "RedOpCreatePreMulSum 7",
        "AllReduce 6 x 7 op 5",
        "RedOpDestroy",
        "AllReduce 12 x 7 op 0",
        "AllReduce 6 x 1 op 2",
        "Reduce 6 x 7 root 1",
        "Broadcast 48 x 0 root 1",
        "ReduceScatter 3 x 7",
        "AllGather 12 x 0",
        "AllReduce 1 x 0 op 0",
        "CommFinalize",
        "CommDestroy",
    ]


def test_the_ring_is_ours(fake):
    """Each step one message to the right and one from the left, from the schedule's list."""
    on_devices(lambda comm: comm.all_reduce(torch.ones(9), algorithm="ring/moves"), 3)
    moves = [move for move in dpcore.schedule("ring", "all_reduce", 3).moves if 1 in move[1:3]]
    expected = [
        f"Send 12 x 0 to {dst}" if src == 1 else f"Recv 12 x 0 from {src}"
        for _, src, dst, _, _ in moves
    ]
    messages = [call for call in calls(fake, rank=1) if call[:4] in ("Send", "Recv")]
    assert sorted(messages) == sorted(expected)
    assert len(messages) == 8


def test_a_schedule_of_ones_own():
    moves = [(0, 1, 0, 0, True), (1, 0, 1, 0, False)]
    own = dpcore.Schedule("own", "all_reduce", 2, 1, moves)

    def body(comm):
        x = torch.full((5,), comm.rank + 1.0)
        comm.all_reduce(x, algorithm=own)
        return x

    assert all(torch.equal(x, torch.full((5,), 3.0)) for x in on_devices(body, 2))
    with pytest.raises(dpcore.Unsupported, match="this schedule is for all_reduce, not for"):
        on_devices(lambda comm: comm.broadcast(torch.ones(5), algorithm=own), 2)


@pytest.mark.parametrize(("algorithm", "told"), [("ring", "Ring"), ("tree", "Ring;allreduce:Tree")])
def test_algorithms_that_nccl_fixes_at_the_start(fake, algorithm, told):
    def body(comm):
        comm.all_reduce(torch.ones(3))
        comm.all_reduce(torch.ones(3), algorithm=algorithm)
        other = "tree" if algorithm == "ring" else "ring"
        with pytest.raises(dpcore.Unsupported, match=r"when the communicator is made .*/moves'"):
            comm.all_reduce(torch.ones(3), algorithm=other)

    on_devices(body, 2, algorithm=algorithm)
    assert f"CommInitRankConfig 2 {told}" in calls(fake)
    assert "NCCL_ALGO" not in os.environ


def test_deterministic_means_our_ordered_algorithms(fake):
    def body(comm):
        comm.all_reduce(torch.ones(8))
        with pytest.raises(dpcore.Unsupported, match="deterministic=True allows"):
            comm.all_reduce(torch.ones(8), algorithm="ring/moves")

    on_devices(body, 3, deterministic=True)
    assert not [call for call in calls(fake) if call.startswith("AllReduce")]


def test_messages_and_exchanges(fake):
    def body(comm):
        right, left = (comm.rank + 1) % 3, (comm.rank - 1) % 3
        x, y = torch.full((4,), float(comm.rank)), torch.zeros(4)
        comm.exchange(sends=[(x, right)], receives=[(y, left)])
        if comm.rank == 0:
            comm.send(x + 10, 1)
        if comm.rank == 1:
            comm.recv(x, 0)
            assert torch.equal(x, torch.full((4,), 10.0))
        with pytest.raises(dpcore.Unsupported, match="have no tags"):
            comm.send(x, right, tag=3)
        with pytest.raises(dpcore.Unsupported, match="come from a rank that is named: pass src"):
            comm.recv(x, None)
        with pytest.raises(dpcore.Unsupported, match="can't exchange a message with"):
            comm.send(x, comm.rank)
        return y

    for rank, y in enumerate(on_devices(body, 3)):
        assert torch.equal(y, torch.full((4,), float((rank - 1) % 3)))


def test_groups(fake):
    def body(comm):
        part = comm.split(comm.rank % 2)
        x = torch.full((3,), comm.rank + 1.0)
        part.all_reduce(x)
        part.close()
        nobody = comm.split(None if comm.rank else 0)
        assert (nobody is None) == (comm.rank > 0)
        if nobody is not None:
            nobody.all_reduce(x)
            nobody.close()
        return x

    results = on_devices(body, 4)
    assert [x[0].item() for x in results] == [4.0, 6.0, 4.0, 6.0]


def test_asynchronous_work():
    def body(comm):
        works = []
        tensors = [torch.full((100,), float(i + comm.rank)) for i in range(50)]
        for x in tensors:
            works.append(comm.all_reduce(x, async_op=True))
        future = works[-1].get_future()
        for work in works:
            work.wait()
        assert all(work.is_completed() and work.exception() is None for work in works)
        assert future.wait()[0] is tensors[-1]
        assert "all_reduce of 100 x float32, sum" in repr(works[0])
        dropped = torch.ones(1000)
        comm.all_reduce(dropped, async_op=True)  # nobody waits, nobody keeps the tensor
        del dropped
        comm.barrier()
        return [x[0].item() for x in tensors]

    for values in on_devices(body, 2):
        assert values == [2.0 * i + 1 for i in range(50)]


def test_a_library_that_answers_in_progress(fake):
    fake.fake_nccl_in_progress(3)

    def body(comm):
        x = torch.ones(10)
        comm.all_reduce(x)
        comm.all_reduce(x, algorithm="two_shot/moves")
        return x

    assert all(torch.equal(x, torch.full((10,), 4.0)) for x in on_devices(body, 2))


def test_an_algorithm_of_the_communicator_is_for_those_that_have_it(fake):
    def body(comm):
        comm.all_reduce(torch.ones(4))
        comm.gather(torch.zeros(8) if comm.rank == 0 else None, torch.ones(4))
        comm.barrier()

    on_devices(body, 2, algorithm="ring/moves")
    assert [call for call in calls(fake) if call.startswith("All")] == ["AllReduce 1 x 0 op 0"]
    with pytest.raises(dpcore.Unsupported, match="'two_shot/moves' is dpcore's own over NCCL"):
        on_devices(body, 2, algorithm="two_shot")
    with pytest.raises(
        dpcore.Unsupported, match="'nonsense/moves' does not exist; there are auto, "
    ):
        on_devices(body, 2, algorithm="nonsense/moves")
