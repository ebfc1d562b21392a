"""The backend "dpcore" of torch.distributed on tensors of a device: all collectives over the
stand-in for NCCL and over mapped memory, ranks as threads on devices of the host."""

import re
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import dpcore
from dpcore.comm.launch.torch_backend import BackendOptions
from tests.ranks.devices import calls
from tests.ranks.groups import all_begun, error_of, in_group
from tests.torch_backend import test_collectives as cpu
from tests.torch_backend import test_messages as cpu_messages
from tests.torch_backend.test_errors import DISAGREEMENTS

pytestmark = pytest.mark.usefixtures("fake")

BOTH = pytest.mark.parametrize("cuda", ["nccl", "cuda"])


def own_backend():
    return dist.group.WORLD._get_backend(torch.device("cpu"))


def carriers():
    """What the operations on devices went over, by device."""
    return {place: carrier for place, (carrier, _) in own_backend().device_libraries().items()}


# ---- results ---------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_collectives(world, cuda):
    """The bodies of the CPU; that they took the device's way is what is asked last."""

    def body():
        for check in cpu.BODIES:
            try:
                check()
            except Exception as error:
                raise AssertionError(f"{check.__name__} on rank {dist.get_rank()}") from error
        dist.barrier()
        return carriers()

    assert in_group(body, world, device=cuda) == [{"cpu": cuda}] * world


def a_batch(count):
    """To the right, from the left, all at once; also of tensors with gaps."""
    rank, world = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % world, (rank - 1) % world
    first, second = torch.empty(count), torch.zeros(4, 2)
    batch = [
        dist.P2POp(dist.isend, torch.full((count,), float(rank)), after),
        dist.P2POp(dist.isend, torch.arange(8.0).reshape(4, 2)[:, 1] + rank, after),
        dist.P2POp(dist.irecv, first, before),
        dist.P2POp(dist.irecv, second[:, 0], before),
    ]
    works = dist.batch_isend_irecv(batch)
    assert len(works) == 1, "one work for all of them"
    works[0].wait()
    assert torch.equal(first, torch.full((count,), float(before)))
    assert second.tolist() == [[value + before, 0] for value in (1, 3, 5, 7)]


@BOTH
@pytest.mark.parametrize("world", [2, 3, 4])
def test_messages(world, cuda):
    def body():
        rank = dist.get_rank()
        for count in (0, 5, 1_300_000):  # the last is larger than a mailbox
            a_batch(count)
        if rank == 0:
            dist.send(torch.full((3,), 7.0), 1)
            work = dist.irecv(torch.empty(2), 1)
            work.wait()
            assert work.result()[0].tolist() == [1.0, 2.0]
        elif rank == 1:
            tensor = torch.zeros(3)
            assert dist.recv(tensor, 0) == 0 and tensor.tolist() == [7.0] * 3
            dist.isend(torch.tensor([1.0, 2.0]), 0).wait()
        with pytest.raises(dpcore.Unsupported, match="have no tags"):
            dist.isend(torch.ones(1), (rank + 1) % world, tag=3)
        with pytest.raises(dpcore.Unsupported, match="name their sender"):
            dist.recv(torch.ones(1))
        cpu_messages.objects()
        dist.barrier()

    in_group(body, world, device=cuda)


def test_messages_that_cross_need_a_batch():
    """One after the other both ranks send first: a batch has to be more than that."""
    met = threading.Barrier(2)

    def body():
        all_begun(met)
        own_backend().set_timeout(timedelta(seconds=1))
        peer = 1 - dist.get_rank()
        with pytest.raises(dpcore.Timeout, match="send of 12 bytes to rank"):
            dist.isend(torch.ones(3), peer)  # raises if the other one has given up already
            dist.irecv(torch.empty(3), peer).wait()

    in_group(body, 2, device="nccl")


def test_a_batch_of_collectives_is_one_work():
    def body():
        rank, world = dist.get_rank(), dist.get_world_size()
        x, y = torch.full((3,), rank + 1.0), torch.full((4,), float(rank))
        with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
            dist.broadcast(x, 1)
            dist.reduce(y, 0)
        manager.wait()
        assert x.tolist() == [2.0] * 3
        assert rank != 0 or y.tolist() == [float(sum(range(world)))] * 4

    in_group(body, 2, device="nccl")


# ---- works and futures -----------------------------------------------------------------------


@BOTH
def test_works_and_their_futures(cuda):
    def body():
        world = dist.get_world_size()
        tensor = torch.ones(10)
        work = dist.all_reduce(tensor, async_op=True)
        future = work.get_future()
        future.wait()
        assert future.value()[0].data_ptr() == tensor.data_ptr()
        assert work.get_future().value()[0].tolist() == [float(world)] * 10
        assert work.wait() and work.is_completed() and work.is_success()
        assert error_of(work) is None
        chained = dist.all_reduce(torch.ones(4), async_op=True).get_future()
        chained = chained.then(lambda done: done.value()[0] + 1)
        assert chained.wait().tolist() == [world + 1.0] * 4
        parts = [torch.empty(3, 2).t() for _ in range(world)]  # copied to when they are there
        gathered = dist.all_gather(parts, torch.ones(2, 3), async_op=True).get_future().wait()
        assert all(torch.equal(part, torch.ones(2, 3)) for part in gathered)
        assert own_backend()._get_sequence_number_for_group() == 3

    in_group(body, 2, device=cuda)


@BOTH
def test_dropped_work_keeps_its_tensors(cuda):
    """What is freed early would be used for the next tensor while it is still written."""

    def body():
        for _ in range(50):
            dist.all_reduce(torch.ones(20_000), async_op=True)
            torch.full((20_000,), 5.0)
        last = torch.ones(1)
        dist.all_reduce(last)
        assert last.item() == 2

    in_group(body, 2, device=cuda)


def test_a_barrier_waits_for_all():
    came = []

    def body():
        if dist.get_rank() == 1:
            time.sleep(0.3)
            came.append("for the first")
        dist.barrier()
        assert came == ["for the first"]
        if dist.get_rank() == 0:
            time.sleep(0.3)
            came.append("for the second")
        work = dist.barrier(async_op=True)
        assert work.wait() and work.is_completed()
        assert came == ["for the first", "for the second"]

    in_group(body, 2, device="nccl")


def test_the_flight_record_and_profilers_see_them():
    def body():
        from dpcore.comm.launch.torch_backend import flight_record

        mark = f"{dist.get_rank() + 11}"
        with torch.autograd.profiler.profile() as profile:
            dist.all_reduce(torch.ones(int(mark)))
        assert "dpcore:all_reduce" in {event.name for event in profile.function_events}
        dist.barrier()
        found = [
            entry["state"]
            for entry in flight_record()["entries"]
            if entry["profiling_name"] == "nccl:all_reduce"
            and entry["input_sizes"] == [[int(mark)]]
        ]
        assert found == ["completed"]

    in_group(body, 1, device="nccl")


# ---- groups ----------------------------------------------------------------------------------


@BOTH
def test_subgroups_and_parts(cuda):
    def body():
        rank = dist.get_rank()
        tensor = torch.tensor([float(rank)])
        group = dist.new_group([0, 2], pg_options=BackendOptions(cuda, _host_uuid=f"gpu {rank}"))
        if rank != 1:
            dist.all_reduce(tensor, group=group)
            assert tensor.item() == 2
        part = own_backend_split([0, 2], rank)
        if part is not None:
            part.allreduce([tensor]).wait()
            assert tensor.item() == 4 and part.device_libraries()["cpu"][0] == cuda
        dist.barrier()

    in_group(body, 3, device=cuda)


def own_backend_split(ranks, rank):
    whole = dist.group.WORLD.split_group(ranks, group_name="even", group_desc="even ranks")
    assert (whole is None) == (rank not in ranks)
    return None if whole is None else whole._get_backend(torch.device("cpu"))


def test_ranks_outside_of_a_new_group_have_nothing_to_do():
    """torch asks this of a backend that was told its device."""
    in_group(lambda: own_backend().perform_nocolor_split(torch.device("cpu")), 2, device="nccl")


def test_the_hardware_decides_unless_somebody_does(monkeypatch):
    def body():
        dist.all_reduce(torch.ones(1))
        return carriers()["cpu"]

    assert in_group(body, 2, device="") == ["nccl"] * 2
    assert in_group(body, 2, device="", uuids=["one gpu"] * 2) == ["cuda"] * 2
    three = ["one gpu", "another", "one gpu"]
    assert in_group(body, 3, device="auto", uuids=three) == ["cuda"] * 3
    monkeypatch.setenv("DPCORE_CUDA_BACKEND", "cuda")
    assert in_group(body, 2, device="") == ["cuda"] * 2
    assert in_group(body, 2, device="nccl") == ["nccl"] * 2
    monkeypatch.setenv("DPCORE_CUDA_BACKEND", "nonsense")
    with pytest.raises(dpcore.Unsupported, match="'nonsense' does not exist for GPUs"):
        in_group(body, 1, device="")


def test_algorithms_and_bits_are_options_too(fake):
    def body():
        generator = torch.Generator().manual_seed(dist.get_rank())
        tensor = torch.randn(1003, generator=generator)
        dist.all_reduce(tensor)
        return tensor.view(torch.int32)

    assert torch.equal(*in_group(body, 2, algorithm="ring/moves", device="nccl"))
    assert not [call for call in calls(fake) if call.startswith("AllReduce")]

    def in_order(comm):
        generator = torch.Generator().manual_seed(comm.rank)
        tensor = torch.randn(1003, generator=generator)
        comm.all_reduce(tensor, algorithm="two_shot")
        return tensor.view(torch.int32)

    on_host = dpcore.spawn(in_order, 3, mode="threads")
    for host, device in zip(
        on_host, in_group(body, 3, deterministic=True, device="nccl"), strict=True
    ):
        assert torch.equal(host, device)


# ---- when something is wrong -----------------------------------------------------------------


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_ranks_that_disagree_all_hear_of_it(name):
    def body():
        rank = dist.get_rank()
        dist.all_reduce(torch.ones(1))
        with pytest.raises(dpcore.Mismatch) as caught:
            DISAGREEMENTS[name][rank](dist.group.WORLD)
            dist.barrier()
        text = str(caught.value)
        assert re.search(DISAGREEMENTS[name][2], text, re.DOTALL), text
        assert "rank 0" in text and "rank 1" in text, text
        with pytest.raises(dpcore.Mismatch):
            dist.all_reduce(torch.ones(1))

    in_group(body, 2, device="nccl")


@BOTH
def test_a_rank_that_does_not_come_is_named(cuda):
    met = threading.Barrier(2)

    def body():
        all_begun(met)
        work = None
        if dist.get_rank() == 0:
            own_backend().set_timeout(timedelta(seconds=1))
            work = dist.all_reduce(torch.ones(3), async_op=True)
            with pytest.raises(dpcore.Timeout, match="rank 1 has not called it"):
                work.wait()
            assert not work.is_success() and "rank 1 has not" in str(error_of(work))
            with pytest.raises(RuntimeError, match="rank 1 has not called it"):
                work.get_future().wait()
        else:
            group = dist.group.WORLD
            group.monitored_barrier(timedelta(seconds=20))
        if dist.get_rank() == 0:
            dist.group.WORLD.monitored_barrier(timedelta(seconds=20))  # the host goes on

    in_group(body, 2, device=cuda)


def test_waits_have_time_limits_of_their_own():
    met = threading.Barrier(2)

    def body():
        all_begun(met)
        if dist.get_rank() == 0:
            work = dist.all_reduce(torch.ones(3), async_op=True)
            with pytest.raises(dpcore.Timeout):
                work.wait(timedelta(seconds=0.3))
        dist.group.WORLD.monitored_barrier(timedelta(seconds=20))

    in_group(body, 2, device="nccl")


def test_abort_ends_the_waits_of_all():
    met = threading.Barrier(2)

    def body():
        all_begun(met)
        if dist.get_rank() == 0:
            own_backend().abort()
        with pytest.raises(dpcore.PeerLost, match="rank 0 gave up: its program aborted"):
            dist.all_reduce(torch.ones(4))
            dist.barrier()

    in_group(body, 2, device="nccl")


def test_different_wishes_are_told_to_all():
    def body():
        with pytest.raises(dpcore.Mismatch, match=r"rank 0 asks for 'nccl' .* rank 1 for 'cuda'"):
            dist.all_reduce(torch.ones(1))
        return True

    def options(rank):
        return "cuda" if rank else "nccl"

    assert in_group(body, 2, device=options) == [True, True]


def test_a_rank_without_a_gpu_tells_all_of_them_what_to_do():
    def body():
        backend = own_backend()
        with pytest.raises(dpcore.Unsupported, match=r"rank 0: .*(GPU|CUDA|cuda)"):
            backend.eager_connect_single_device(torch.device("cuda:0"))
        tensor = torch.ones(1)
        dist.all_reduce(tensor)  # the host does not need one
        assert tensor.item() == 2

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    in_group(body, 2)


def test_options_of_something_else_are_refused():
    with pytest.raises(dpcore.Unsupported, match=r"takes dpcore\.BackendOptions"):
        in_group(lambda: None, 1, pg_options=object(), device="nccl")


def test_a_part_of_a_batch_can_not_be_waited_for():
    def body():
        dist.all_reduce(torch.ones(1))
        peer = 1 - dist.get_rank()
        target = torch.empty(2)
        with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
            dist.isend(torch.full((2,), float(peer)), peer)
            early = dist.irecv(target, peer)
            with pytest.raises(dpcore.Error, match="part of a batch"):
                early.wait()
        manager.wait()
        assert target.tolist() == [float(dist.get_rank())] * 2

    in_group(body, 2, device="nccl")
