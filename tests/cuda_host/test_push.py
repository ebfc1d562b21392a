"""backend="cuda" on mapped memory, on devices of the host: which path runs, its results in tensors
of the arena and in others, ranks as threads and as processes, with both barriers."""

import gc
import os
import threading
import time

import pytest
import torch
from torch import nn

import dpcore
from dpcore import _C
from dpcore.comm.communicators.device import DeviceCommunicator
from dpcore.comm.launch.spawn import run_processes
from tests.cuda.on_gpu import settle
from tests.ranks.devices import errors_of, on_devices

SHARED, OWN = "stream", "fused"  # the GPUs, and with them the barrier


def uuids_of(barrier, world):
    return ["one gpu"] * world if barrier == SHARED else [f"gpu {r}" for r in range(world)]


def on(barrier, body, world, *args, **options):
    return on_devices(body, world, *args, backend="cuda", uuids=uuids_of(barrier, world), **options)


def every_collective(comm, make, count=1001):
    """Results of the four collectives on tensors that `make` gives, with uneven parts too."""
    rank, world, device = comm.rank, comm.world_size, getattr(comm, "device", "cpu")
    generator = torch.Generator().manual_seed(rank)
    sizes = [5 * r % 7 for r in range(world)]
    results = []

    def given(n, dtype):
        x = make(n + 3, dtype)[3:]  # where no pack begins
        x.copy_(torch.randint(0, 100, (n,), generator=generator))
        return x

    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool):
        x = given(count, dtype)
        comm.all_reduce(x, "max" if dtype == torch.bool else "sum")
        results.append(x)
        if dtype.is_floating_point:
            y = given(count, dtype)
            comm.all_reduce(y, "mean", algorithm="two_shot")
            results.append(y)
        if dtype in (torch.float32, torch.float64):  # others round once more on a device
            z = given(count, dtype)
            comm.all_reduce(z, "premul_sum", factor=rank + 0.5)
            results.append(z)
        whole = given(count * world, dtype)
        part = torch.zeros(count, dtype=dtype, device=device)
        comm.reduce_scatter(part, whole, "max")
        gathered = given(count * world, dtype)
        comm.all_gather(gathered, part)
        results += [part, gathered]
        uneven = given(sum(sizes), dtype)
        own = torch.zeros(sizes[rank], dtype=dtype, device=device)
        comm.reduce_scatter(own, uneven, "max", sizes=sizes)
        together = given(sum(sizes), dtype)
        comm.all_gather(together, own, sizes=sizes)
        results += [own, together]
        for root in range(world):
            told = given(count, dtype)
            comm.broadcast(told, root)
            results.append(told)
    if torch.device(device).type == "cuda":
        settle()
    bits = [x.contiguous().view(torch.uint8).cpu().clone() for x in results]
    return bits, comm.stats().get("paths")


def ordinary(n, dtype):
    return torch.zeros(n, dtype=dtype)


def on_host(body, world):
    return dpcore.spawn(body, world, mode="threads")


def assert_same_bits(host, device):
    for (expected, _), (actual, _) in zip(host, device, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))


@pytest.mark.parametrize("barrier", [SHARED, OWN])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_ordinary_tensors_have_the_bits_of_the_processor(world, barrier):
    host = on_host(lambda comm: every_collective(comm, ordinary), world)
    device = on(barrier, lambda comm: every_collective(comm, ordinary), world)
    assert_same_bits(host, device)
    for _, paths in device:
        assert paths.keys() == {"one_shot/stage", "two_shot/stage", "direct/stage"}


@pytest.mark.parametrize("barrier", [SHARED, OWN])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_tensors_of_the_arena_have_the_bits_of_the_processor(world, barrier):
    host = on_host(lambda comm: every_collective(comm, ordinary), world)

    def body(comm):
        return every_collective(comm, lambda n, dtype: comm.empty(n, dtype=dtype))

    device = on(barrier, body, world)
    assert_same_bits(host, device)
    for _, paths in device:
        # Small ones and factors by rank go through the stage.
        assert paths.keys() == {"direct/push", "one_shot/stage"}
        assert paths["direct/push"] == 3 + 5 * (4 + world)


@pytest.mark.parametrize("barrier", [SHARED, OWN])
def test_more_than_the_stage_holds(barrier):
    count = 9_000_001  # twice around the slots, in float32

    def body(comm):
        for make in (ordinary, lambda n, dtype: comm.empty(n, dtype=dtype)):
            x = make(count, torch.float32).fill_(comm.rank + 1.0)
            comm.all_reduce(x)
            assert bool((x == 3).all())
            comm.broadcast(x.mul_(comm.rank), 1)
            assert bool((x == 3).all())
        part = torch.zeros(count // 2)
        comm.reduce_scatter(part, torch.full((count // 2 * 2,), comm.rank + 1.0))
        whole = torch.zeros(count // 2 * 2)
        comm.all_gather(whole, part)
        assert bool((whole == 3).all())
        return True

    assert on(barrier, body, 2, timeout=100.0) == [True, True]


@pytest.mark.parametrize("barrier", [SHARED, OWN])
def test_many_in_flight_one_behind_the_other(barrier):
    """Slots of the stage take turns: whoever fills one may not be ahead of who still reads it."""

    def body(comm):
        tensors = [torch.full((1 + 37 * i,), float(i + comm.rank)) for i in range(80)]
        shared = comm.empty(5000)
        works = []
        for i, x in enumerate(tensors):
            works.append(comm.all_reduce(x, async_op=True))
            if i % 8 == 0:
                works.append(comm.broadcast(shared, i % 3, async_op=True))
        for work in works:
            work.wait()
        return [x.unique().tolist() for x in tensors]

    for values in on(barrier, body, 3):
        assert values == [[3.0 * i + 3] for i in range(80)]


def test_how_the_ranks_meet_is_chosen_by_the_gpus_they_have(monkeypatch):
    assert _C._choose_barrier(["a", "b"], "") == "fused"
    assert _C._choose_barrier(["a", "b", "a"], "auto") == "stream"
    assert _C._choose_barrier(["a", "a"], "fused") == "fused"
    with pytest.raises(dpcore.Unsupported, match="choose from auto, stream and fused"):
        _C._choose_barrier(["a"], "quickly")

    def library(comm):
        return comm.stats()["library"]

    assert on(OWN, library, 2) == ["mapped memory of host (address), barrier: fused"] * 2
    assert on(SHARED, library, 2) == ["mapped memory of host (address), barrier: stream"] * 2
    monkeypatch.setenv("DPCORE_CUDA_SYNC", "stream")
    assert "barrier: stream" in on(OWN, library, 2)[0]


def test_how_memory_is_shared():
    def rank(process, descriptors=True, ipc=True):
        return process, descriptors, ipc

    choose = _C._choose_memory
    assert choose([rank(1), rank(1)], "") == "address"
    assert choose([rank(1), rank(2)], "") == "descriptor"
    assert choose([rank(1), rank(2, descriptors=False)], "") == "ipc"
    assert choose([rank(1), rank(2)], "ipc") == "ipc"
    assert choose([rank(1), rank(1)], "descriptor") == "descriptor"
    with pytest.raises(dpcore.Unsupported, match=r"rank 1 is another process, rank 2 has no dev"):
        choose([rank(1), rank(2), rank(3, False, False)], "")
    with pytest.raises(
        dpcore.Unsupported, match=r"rank 1 has no cudaIpc.*leave DPCORE_CUDA_MEMORY"
    ):
        choose([rank(1), rank(2, ipc=False)], "ipc")
    with pytest.raises(dpcore.Unsupported, match="choose from address, ipc and descriptor"):
        choose([rank(1)], "magic")


def test_no_two_processes_have_one_mark():
    here = _C._process_mark()
    assert here == _C._process_mark()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, str(_C._process_mark()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert int(os.read(reading, 100)) != here
    os.close(reading)
    os.close(writing)


def descriptors_of_regions():
    with open("/proc/self/maps") as maps:
        return sum("memfd:dpcore-device" in line for line in maps)


def body_of_process(control, barrier):
    uuid = uuids_of(barrier, control.world_size)[control.rank]
    native = _C.start_on_device(control._native, "host", 30.0, "auto", False, [], "cuda", uuid)
    comm = DeviceCommunicator(native, "shm")
    assert f"(descriptor), barrier: {barrier}" in comm.stats()["library"]
    results = every_collective(comm, lambda n, dtype: comm.empty(n, dtype=dtype))
    before = descriptors_of_regions()
    for _ in range(20):
        comm.all_reduce(comm.empty(2_000_000))
    grown = descriptors_of_regions() - before
    last = comm.empty(100).fill_(comm.rank)
    comm.all_reduce(last, algorithm="two_shot")
    comm.close()
    assert last.unique().tolist() == [sum(range(control.world_size))]  # outlives it
    return results, grown


@pytest.mark.parametrize("barrier", [SHARED, OWN])
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_are_processes_hand_over_descriptors(world, barrier):
    host = on_host(lambda comm: every_collective(comm, ordinary), world)
    device = dpcore.spawn(body_of_process, world, barrier, mode="processes", timeout=60.0)
    assert_same_bits(host, [results for results, _ in device])
    for _, grown in device:
        assert grown <= world, "memory that all ranks have dropped is still mapped"


def start_in_process(control, timeout=30.0):
    native = _C.start_on_device(
        control._native, "host", timeout, "auto", False, [], "cuda", "one gpu"
    )
    return DeviceCommunicator(native, "shm")


def test_nothing_stays_when_one_rank_leaves_long_before_another():
    def body(control):
        comm = start_in_process(control)
        comm.all_reduce(comm.empty(2_000_000))
        if control.rank == 1:
            time.sleep(2.5)
        comm.close()
        del comm
        gc.collect()
        return descriptors_of_regions()

    assert dpcore.spawn(body, 2, mode="processes", timeout=60.0) == [0, 0]


def test_nothing_stays_when_taking_memory_fails_at_any_moment():
    """A rank that breaks off in any of the operations in between, also when all have mapped."""

    def body(control):
        try:
            comm = start_in_process(control)
            for _ in range(3):
                comm.empty(2_000_000)
        except dpcore.Error:
            raised = True
        else:
            raised = False
            comm.close()
        comm = None
        gc.collect()
        return raised, descriptors_of_regions()

    for number in range(1, 12):
        outcomes = run_processes(
            body, 2, timeout=20.0, environment={"DPCORE_FAULT": f"throw:rank1:op{number}"}
        )
        for outcome in outcomes:
            assert outcome.error is None, (number, outcome.error)
            assert outcome.result[1] == 0, (number, outcome.result)


@pytest.mark.parametrize("deterministic", [False, True])
def test_buckets_of_data_parallel_lie_in_the_arena(deterministic):
    def body(comm):
        module = nn.Linear(1024, 512)
        with torch.no_grad():
            module.weight.fill_(0.5)
            module.bias.fill_(0.25)
        model = dpcore.DataParallel(module, comm=comm, deterministic=deterministic)
        before = comm.stats().get("paths", {}).get("direct/push", 0)
        for step in range(3):
            model.zero_grad()
            x = torch.randn(4, 1024, generator=torch.Generator().manual_seed(step + 9 * comm.rank))
            model(x).square().sum().backward()
        direct = comm.stats().get("paths", {}).get("direct/push", 0) - before
        return [p.grad.view(torch.uint8).clone() for p in module.parameters()], direct

    host = on_host(body, 2)
    device = on(SHARED, body, 2)
    assert_same_bits(host, device)
    assert all(direct >= 3 for _, direct in device), "the buckets took another path"


def test_memory_has_to_lie_at_the_same_place():
    def body(comm):
        comm.all_reduce(torch.ones(3))
        shared = comm.empty(2_000_000)
        mine = shared if comm.rank == 0 else torch.empty(2_000_000)
        comm.all_reduce(mine)
        comm.barrier()

    for error in errors_of(body, 2, backend="cuda"):
        assert isinstance(error, dpcore.Mismatch), error
        assert "memory of empty() at the same place or none" in str(error)


def test_ranks_that_ask_for_different_memory():
    def body(comm):
        comm.empty(100 + comm.rank)

    for error in errors_of(body, 2, backend="cuda"):
        assert isinstance(error, dpcore.Mismatch), error
        assert "rank 0 asks for 400 bytes of shared device memory, rank 1 for 404" in str(error)


@pytest.mark.hurried
@pytest.mark.parametrize("barrier", [SHARED, OWN])
def test_a_call_may_be_more_patient_than_its_communicator(barrier):
    def body(comm):
        x = torch.full((1000,), comm.rank + 1.0)
        if comm.rank == 1:
            time.sleep(2.5)
        comm.all_reduce(x, timeout=20.0)
        return x.unique().tolist()

    assert on(barrier, body, 2, timeout=1.0) == [[3.0]] * 2


@pytest.mark.hurried
@pytest.mark.parametrize("barrier", [SHARED, OWN])
def test_a_rank_that_stays_away_is_named_and_nobody_writes_to_it(barrier):
    met = threading.Barrier(3)

    def body(comm):
        mine = comm.empty(2_000_000).fill_(1.0 + comm.rank)
        comm.all_reduce(mine)
        if comm.rank == 2:
            mine.fill_(-1.0)
        met.wait(60)  # the first one is over everywhere
        if comm.rank == 2:
            met.wait(60)  # the others have given up
            return bool((mine == -1).all())
        try:
            for _ in range(3):
                comm.all_reduce(mine, async_op=True, timeout=1.0)
            comm.barrier()
        finally:
            met.wait(60)
        return None

    *errors, untouched = errors_of(body, 3, backend="cuda", uuids=uuids_of(barrier, 3))
    assert untouched is True
    for error in errors:
        assert isinstance(error, dpcore.Timeout), error
        assert "rank 2 has not called it" in str(error)
