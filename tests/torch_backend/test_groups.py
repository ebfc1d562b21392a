"""Groups, time limits, memory and the end of a group with the backend "dpcore"."""

import copy
import inspect
import socket
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import dpcore
from dpcore.comm.launch.torch_backend import communicator_of, flight_record
from tests.ranks.groups import error_of, in_group


def test_subgroups_reduce_by_themselves():
    def body():
        rank = dist.get_rank()
        pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        mine = pairs[rank % 2]
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor, group=mine)
        assert tensor.item() == 2 + 2 * (rank % 2)
        gathered = [None, None]
        dist.all_gather_object(gathered, rank, group=mine)
        assert gathered == [rank % 2, rank % 2 + 2]
        dist.all_reduce(tensor)
        assert tensor.item() == 12
        if "sort_ranks" in inspect.signature(dist.new_group).parameters:  # from 2.12 on
            reversed_one = dist.new_group([3, 1, 0], sort_ranks=False)
            if rank != 2:
                assert dist.get_group_rank(reversed_one, 3) == 0
                dist.broadcast(tensor, src=3, group=reversed_one)
        local = dist.new_group([rank], use_local_synchronization=True)
        dist.all_reduce(tensor, group=local)
        assert tensor.item() == 12

    in_group(body, 4)


def test_a_mesh_of_two_dimensions():
    def body():
        rank = dist.get_rank()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
        for name, wanted in (("rows", rank % 2 * 2 + 2), ("columns", rank // 2 * 4 + 1)):
            tensor = torch.tensor([float(rank)])
            dist.all_reduce(tensor, group=mesh.get_group(name))
            assert tensor.item() == wanted, name
        assert "dpcore" in dist.get_backend(mesh.get_group("rows"))

    in_group(body, 4, backend="cpu:dpcore")


def test_the_backend_counts_its_collectives():
    def body():
        whole = dist.group.WORLD._get_backend(torch.device("cpu"))
        assert whole.supports_splitting
        assert whole._get_sequence_number_for_group() == 0
        dist.barrier()
        assert whole._get_sequence_number_for_group() == 1

    in_group(body, 2)


def test_a_group_that_is_split_off():
    """Through torch's compiled part: its function in Python asks for a device."""

    def body():
        rank = dist.get_rank()
        part = dist.group.WORLD.split_group([0, 2], group_name="even", group_desc="even ranks")
        if rank == 1:
            assert part is None
            return
        tensor = torch.tensor([float(rank)])
        part.allreduce([tensor]).wait()
        assert tensor.item() == 2 and part.size() == 2 and part.rank() == rank // 2

    in_group(body, 3)


def test_options_can_be_copied():
    """As torch does before it splits a group that is bound to a device."""

    def body():
        options = dist.group.WORLD._get_backend(torch.device("cpu")).options
        copied = copy.deepcopy(options)
        assert copied is not options
        for name in ("backend", "_timeout", "group_name", "global_ranks_in_group"):
            assert getattr(copied, name) == getattr(options, name)

    in_group(body, 2)


def test_the_name_stands_for_one_device_among_others():
    """Where there is no GPU the part for it has to stay unused, as with "cpu:gloo,cuda:nccl"."""

    def body():
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [2.0, 2.0]

    in_group(body, 2, backend="cpu:dpcore,cuda:gloo")


def test_options_of_another_backend_in_the_group_are_not_for_us():
    """torch hands those of NCCL on, given or made: here Gloo's, which it has also without GPUs."""

    def body():
        group = dist.new_group(pg_options=dist.ProcessGroupGloo._Options())
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == 2
        with pytest.raises(dpcore.Unsupported, match=r"takes dpcore.BackendOptions .* dict"):
            dist.new_group(pg_options={"cuda": "nccl"})

    in_group(body, 2)


def test_deadlines_of_groups_and_of_waits():
    def body():
        rank = dist.get_rank()
        cpu = torch.device("cpu")
        # The limit of a new group is also that of its rendezvous, for which a rank may be late.
        impatient = dist.new_group(timeout=timedelta(seconds=30))
        impatient._get_backend(cpu).set_timeout(timedelta(seconds=0.3))
        other = dist.new_group(timeout=timedelta(seconds=5))
        if rank == 0:
            begin = time.monotonic()
            with pytest.raises(dpcore.Timeout, match=r"rank 1 has not entered it.* timeout of"):
                dist.barrier(impatient)
            assert time.monotonic() - begin < 20
            work = dist.all_reduce(torch.ones(3), group=other, async_op=True)
            with pytest.raises(dpcore.Timeout, match="rank 1"):
                work.wait(timedelta(seconds=0.2))
            assert isinstance(error_of(work), RuntimeError)
            assert flight_record()["entries"][-1]["timeout_ms"] == 5000
        done = torch.ones(1)
        dist.all_reduce(done)  # the groups fail by themselves
        assert done.item() == 2

    in_group(body, 2)


def test_the_time_limit_of_a_group_can_be_changed():
    def body():
        group = dist.new_group(timeout=timedelta(minutes=30))
        group._get_backend(torch.device("cpu")).set_timeout(timedelta(seconds=0.3))
        if dist.get_rank() == 0:
            begin = time.monotonic()
            with pytest.raises(dpcore.Timeout, match=r"after 0\.3 s; rank 1"):
                dist.all_reduce(torch.ones(1), group=group)
            assert time.monotonic() - begin < 20
        dist.barrier()

    in_group(body, 2)


def test_the_monitored_barrier_names_who_is_missing_and_breaks_nothing():
    def body():
        rank = dist.get_rank()
        group = dist.group.WORLD
        group.monitored_barrier(timedelta(seconds=30))
        if rank == 0:
            with pytest.raises(RuntimeError, match="Ranks 1, 2 failed to pass monitoredBarrier"):
                group.monitored_barrier(timedelta(seconds=0.3), wait_all_ranks=True)
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == 3

    in_group(body, 3)


def test_a_monitored_barrier_after_a_restart_waits_for_the_ranks_that_are_there(tmp_path):
    def body():
        rank = dist.get_rank()
        for start in range(2):  # of all ranks, with a store that goes on
            dist.destroy_process_group()
            store = dist.FileStore(str(tmp_path / "store"), 4)
            dist.init_process_group("dpcore", store=store, rank=rank, world_size=2)
            if start == 0:
                dist.group.WORLD.monitored_barrier(timedelta(seconds=30))
            elif rank == 0:
                with pytest.raises(RuntimeError, match="Rank 1 failed to pass monitoredBarrier"):
                    dist.group.WORLD.monitored_barrier(timedelta(seconds=0.2))
            dist.barrier()

    in_group(body, 2)


def test_abort_ends_the_waits_of_all():
    def body():
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        if dist.get_rank() == 0:
            work = dist.irecv(torch.ones(4), 1)
            backend.abort()
            with pytest.raises(dpcore.PeerLost, match="rank 0 gave up"):
                work.wait()
        else:
            with pytest.raises(dpcore.PeerLost, match="rank 0 gave up"):
                dist.recv(torch.ones(4), 0)
        with pytest.raises(dpcore.PeerLost):
            dist.all_reduce(torch.ones(1))

    in_group(body, 2)


def test_what_is_not_supported_says_what_to_do():
    def body():
        with pytest.raises(dpcore.Unsupported, match="no meaning"):
            dist.all_reduce(torch.ones(2, dtype=torch.bool), dist.ReduceOp.AVG)
        with pytest.raises(dpcore.Unsupported, match="invalid tensor size"):
            dist.all_gather([torch.ones(2)], torch.ones(3))
        with pytest.raises(dpcore.Unsupported, match="they have to be equal"):
            dist.all_to_all_single(torch.ones(3), torch.ones(2))

    in_group(body, 1)


def test_a_model_that_fails_leaves_the_group_to_the_program():
    def body():
        class Branches(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.used, self.left_out = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)

            def forward(self, x):
                return self.used(x)

        for _ in range(2):  # the second gets a communicator that works
            model = dpcore.DataParallel(Branches())
            model(torch.ones(1, 2)).sum().backward()
            with pytest.raises(RuntimeError, match=r"left_out\.weight"):
                model(torch.ones(1, 2))
            tensor = torch.ones(1)
            dist.all_reduce(tensor)
            assert tensor.item() == 2

    in_group(body, 2)


def test_variables_choose_the_algorithm_and_pretend_hosts(monkeypatch):
    def body():
        comm = communicator_of(dist.group.WORLD)
        if comm is None:
            comm = dpcore.DataParallel(torch.nn.Linear(2, 1)).group
        tensor = torch.ones(4)
        comm.all_reduce(tensor)
        assert tensor.tolist() == [2.0] * 4
        return comm.hosts, comm.explain(1 << 20)["all_reduce"].algorithm

    monkeypatch.setenv("DPCORE_ALGORITHM", "ring")
    for names, hosts in (("", [0, 0]), ("a,b", [0, 1])):
        monkeypatch.setenv("DPCORE_PRETEND_HOSTS", names)
        for backend in ("dpcore", "gloo"):
            assert in_group(body, 2, backend=backend) == [(hosts, "ring")] * 2


def test_a_group_that_was_aborted_is_not_taken_for_one_of_its_name(tmp_path):
    def body():
        rank = dist.get_rank()
        aborted = communicator_of(dist.group.WORLD)
        dist.barrier()
        dist.distributed_c10d._abort_process_group()
        for backend in ("gloo", "dpcore"):
            store = dist.FileStore(str(tmp_path / backend), 2)
            dist.init_process_group(backend, store=store, rank=rank, world_size=2)
            assert communicator_of(dist.group.WORLD) is not aborted
            assert dpcore.DataParallel(torch.nn.Linear(2, 1)).backend == "native"
            if backend == "gloo":
                assert communicator_of(dist.group.WORLD) is None
                dist.destroy_process_group()

    in_group(body, 2)


@pytest.mark.parametrize("debug", ("OFF", "DETAIL"))
def test_a_group_that_was_destroyed_leaves_its_port(debug):
    def body():
        dist.destroy_process_group()
        with socket.create_server(("localhost", 0)) as free:
            port = free.getsockname()[1]
        dist.init_process_group(
            "dpcore", init_method=f"tcp://localhost:{port}", rank=0, world_size=1
        )
        dist.barrier()
        assert communicator_of(dist.group.WORLD) is not None
        dist.destroy_process_group()
        socket.create_server(("localhost", port)).close()
        dist.init_process_group("dpcore", store=dist.HashStore(), rank=0, world_size=1)

    in_group(body, 1, debug=debug)


def test_groups_after_each_other():
    def body():
        for step in range(5):
            group = dist.new_group()
            tensor = torch.ones(1000)
            dist.all_reduce(tensor, group=group)
            assert tensor[0] == 2, step
            dist.destroy_process_group(group)

    in_group(body, 2)
