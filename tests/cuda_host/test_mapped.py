"""backend="cuda" on devices of the host: every collective, messages, groups and faults. What is
special to mapped memory is in test_push.py."""

import threading
import time

import pytest
import torch

import dpcore
from tests.comm import matrix
from tests.cuda_host.test_nccl import SCHEDULES, device_cases
from tests.ranks.devices import errors_of, on_devices


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("world", matrix.WORLDS)
def test_every_pair_of_values_gives_what_the_reference_gives(world, shared):
    """Ranks that share a GPU have their barrier in streams, others in kernels."""
    cases = device_cases(world)
    uuids = ["one gpu"] * world if shared else None
    results = on_devices(matrix.run_cases, world, cases, backend="cuda", timeout=60.0, uuids=uuids)
    problems = [problem for _, of_rank in results for problem in of_rank]
    for case, fingerprints in zip(cases, zip(*(f for f, _ in results), strict=True), strict=True):
        if len(set(fingerprints)) > 1:
            problems.append(f"{case}: not the same bits on every rank")
    assert not problems, f"{len(problems)} problems:\n" + "\n".join(problems[:20])


@pytest.mark.parametrize("algorithm", [None, *(f"{name}/moves" for name in SCHEDULES)])
def test_the_bits_are_those_of_the_processor(algorithm):
    def body(comm):
        generator = torch.Generator().manual_seed(comm.rank)
        results = []
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = torch.randn(1003, generator=generator).to(dtype)
            comm.all_reduce(x, "mean", algorithm=algorithm)
            results.append(x.view(torch.uint8).clone())
        return results

    on_host = dpcore.spawn(body, 3, mode="threads")
    for host, device in zip(on_host, on_devices(body, 3, backend="cuda"), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(host, device, strict=True))


def test_messages_larger_than_a_mailbox():
    """And several between the same two ranks at once: they arrive in order, piece by piece."""

    def body(comm):
        other = 1 - comm.rank
        sent = [torch.arange(n) + comm.rank for n in (1_300_000, 3, 700_001)]
        got = [torch.zeros_like(x) for x in sent]
        comm.exchange([(x, other) for x in sent], [(x, other) for x in got])
        assert all(torch.equal(y, x - comm.rank + other) for x, y in zip(sent, got, strict=True))
        whole = torch.full((2_500_000,), comm.rank + 1.0)
        comm.all_reduce(whole, "sum")
        assert torch.equal(whole, torch.full_like(whole, 3.0))
        return True

    assert on_devices(body, 2, backend="cuda", uuids=["one gpu", "one gpu"]) == [True, True]


def test_many_operations_in_flight_and_groups():
    def body(comm):
        tensors = [torch.full((50,), float(i + comm.rank)) for i in range(60)]
        works = [comm.all_reduce(x, async_op=True) for x in tensors]
        part = comm.split(comm.rank // 2)
        inner = torch.full((5,), comm.rank + 1.0)
        part.all_reduce(inner)
        for work in works:
            work.wait()
        part.close()
        comm.barrier()
        return [x[0].item() for x in tensors], inner[0].item()

    for rank, (values, inner) in enumerate(on_devices(body, 4, backend="cuda")):
        assert values == [4.0 * i + 6 for i in range(60)]
        assert inner == (3.0 if rank < 2 else 7.0)


@pytest.mark.hurried
def test_a_rank_that_does_not_come_ends_the_waits_of_the_stream():
    others_gave_up = threading.Event()

    def body(comm):
        x = torch.ones(1000)
        comm.all_reduce(x)
        if comm.rank == 2:
            others_gave_up.wait(20)
            return
        try:
            for _ in range(5):  # waits behind waits: all have to be released
                comm.all_reduce(x, async_op=True)
            comm.barrier()
        finally:
            others_gave_up.set()

    errors = errors_of(body, 3, backend="cuda", timeout=1.0)
    for error in errors[:2]:
        assert isinstance(error, dpcore.Timeout), error
        assert "operation 1 (all_reduce of 1000 x float32, sum) was not complete" in str(error)
        assert "rank 2 has not called it" in str(error)


@pytest.mark.hurried
def test_a_full_queue_does_not_keep_a_failure_from_ending_it():
    """The caller waits for room in the stream's queue, with the communicator's lock: what ends the
    waits of the stream must not ask for that."""
    others_gave_up = threading.Event()

    def body(comm):
        x = torch.ones(1000)
        comm.all_reduce(x)
        if comm.rank == 1:
            others_gave_up.wait(60)
            return
        try:
            for _ in range(2000):
                comm.all_reduce(x, async_op=True)
            comm.barrier()
        finally:
            others_gave_up.set()

    error, _ = errors_of(body, 2, backend="cuda", timeout=1.0, uuids=["one gpu", "one gpu"])
    assert isinstance(error, dpcore.Timeout) and "rank 1 has not called it" in str(error)


@pytest.mark.parametrize("algorithm", ("two_shot", "ring"))
@pytest.mark.parametrize("uuids", (["one gpu"] * 3, None), ids=("stream", "fused"))
def test_what_was_let_pass_is_not_taken_for_a_result(uuids, algorithm):
    """Rank 1 waits for less long than rank 2 needs to come: its stream goes on without the result,
    and says to the others' streams that it is there."""

    def body(comm):
        x = torch.ones(3000)
        comm.all_reduce(x, algorithm=algorithm)
        if comm.rank == 2:
            time.sleep(0.3)
        work = comm.all_reduce(x, async_op=True, algorithm=algorithm)
        work.wait(timeout=0.1 if comm.rank == 1 else 20)

    for error in errors_of(body, 3, backend="cuda", uuids=uuids)[:2]:
        assert isinstance(error, dpcore.Timeout) and "0.1" in str(error), error


def test_a_rank_that_gives_up_is_named():
    def body(comm):
        if comm.rank == 1:
            comm.abort("no more money")
        else:
            comm.all_reduce(torch.ones(3))

    error, _ = errors_of(body, 2, backend="cuda")
    assert isinstance(error, dpcore.PeerLost) and "gave up: no more money" in str(error)


def test_what_it_does_not_do():
    def body(comm):
        with pytest.raises(dpcore.Unsupported, match="nonsense"):
            comm.all_reduce(torch.ones(3), algorithm="nonsense")
        comm.all_reduce(torch.ones(3))

    on_devices(body, 2, backend="cuda")

    def tcp(control):
        from dpcore import _C

        with pytest.raises(dpcore.Unsupported, match="have to share a host"):
            _C.start_on_device(control._native, "host", 5.0, "auto", False, backend="cuda")

    dpcore.spawn(tcp, 2, transport="tcp")
