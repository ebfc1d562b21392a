"""backend="nccl" when a call, a rank or a device fails: who raises what, and that nobody hangs."""

import _thread
import threading
import time

import pytest
import torch

import dpcore
from dpcore import _C
from dpcore.comm.communicators.device import DeviceCommunicator
from dpcore.comm.launch.session import connect
from tests.cpp.programs import STAND_IN
from tests.ranks.devices import calls, errors_of, on_devices, start

pytestmark = pytest.mark.usefixtures("fake")
LIBRARY = f"NCCL 2.27.3 ({STAND_IN})"  # stands in every error that comes from it


def test_a_call_that_fails_breaks_it_for_all(fake):
    fake.fake_nccl_fail(b"AllGather", 4)  # for the rank that comes first

    def body(comm):
        comm.barrier()
        comm.all_gather(torch.zeros(4), torch.zeros(2))

    for error in errors_of(body, 2):
        assert "operation 1 (all_gather of 2 x float32) failed on rank" in str(error)
        assert "ncclAllGather: invalid argument: the stand-in was told to fail" in str(error)
        assert f"{LIBRARY}, ncclAllGather" in str(error)
    assert "CommAbort" in calls(fake, 0) and "CommAbort" in calls(fake, 1)
    assert "CommDestroy" not in calls(fake, 0)


def test_an_error_that_comes_later_names_the_library(fake):
    fake.fake_nccl_hang(0)

    def body(comm):
        work = comm.all_reduce(torch.ones(3), async_op=True)
        if comm.rank == 0:
            fake.fake_nccl_async_error(6)
        work.wait()

    for error in errors_of(body, 2):
        assert isinstance(error, dpcore.Error)
        assert "on rank" in str(error) and LIBRARY in str(error)
        assert "reports: unhandled stand-in error" in str(error)


@pytest.mark.hurried
def test_a_stuck_device_is_a_timeout(fake):
    fake.fake_nccl_hang(1)

    def body(comm):
        comm.all_reduce(torch.ones(3))

    began = time.monotonic()
    for error in errors_of(body, 2, timeout=1.0):
        assert isinstance(error, dpcore.Timeout)
        assert "operation 0 (all_reduce of 3 x float32, sum) was not complete on host 1 s" in str(
            error
        )
        assert "all ranks have called it" in str(error)
    assert time.monotonic() - began < 20


@pytest.mark.hurried
def test_a_full_queue_does_not_keep_an_abort_from_ending_it(fake):
    """The caller waits within NCCL for room in the stream's queue."""
    fake.fake_nccl_hang(0)
    fake.fake_nccl_hang(1)

    def body(comm):
        for _ in range(2000):
            comm.all_reduce(torch.ones(3), async_op=True)

    began = time.monotonic()
    for error in errors_of(body, 2, timeout=1.0):
        assert isinstance(error, dpcore.Timeout), error
        assert "was not complete on host" in str(error)
    assert time.monotonic() - began < 60
    assert "CommAbort" in calls(fake, 0) and "CommAbort" in calls(fake, 1)


@pytest.mark.hurried
def test_a_rank_that_does_not_come_is_named():
    gone_on = threading.Event()

    def body(comm):
        if comm.rank == 1:
            gone_on.wait(20)
            return
        try:
            comm.all_reduce(torch.ones(3))
        finally:
            gone_on.set()

    error, _ = errors_of(body, 2, timeout=1.0)
    assert isinstance(error, dpcore.Timeout)
    assert "rank 1 has not called it (it has called no collective yet)" in str(error)


def test_a_rank_that_leaves_is_named():
    def body(comm):
        if comm.rank == 0:
            comm.all_reduce(torch.ones(3))

    error, _ = errors_of(body, 2)
    assert isinstance(error, dpcore.PeerLost)
    assert "rank 1 left (finalized) before operation 0 (all_reduce" in str(error)


def test_ranks_that_call_different_things_are_told(fake):
    """Before anything is started on the rank that comes later."""
    posted = threading.Event()

    def body(comm):
        if comm.rank == 0:
            work = comm.all_reduce(torch.ones(3), async_op=True)
            posted.set()
            work.wait()
        else:
            assert posted.wait(20)
            comm.all_reduce(torch.ones(4))

    for error in errors_of(body, 2):
        assert isinstance(error, dpcore.Mismatch)
        assert "rank 1 calls operation 0 (all_reduce of 4 x float32, sum), rank 0" in str(error)
        assert "all_reduce of 3 x float32" in str(error)
    assert "AllReduce" not in " ".join(calls(fake, 1))


def test_abort_and_what_comes_after():
    def body(comm):
        if comm.rank == 1:
            comm.abort("no more money")
        else:
            comm.all_reduce(torch.ones(3))

    error, _ = errors_of(body, 2)
    assert isinstance(error, dpcore.PeerLost) and "gave up: no more money" in str(error)

    def after(comm):
        comm.close()
        comm.close()
        comm.all_reduce(torch.ones(3))

    with pytest.raises(dpcore.Error, match="finalized"):
        on_devices(after, 1)


def test_a_program_that_was_interrupted_knows_it(fake):
    """The wait ends with KeyboardInterrupt, and `close` does not raise another error after it."""
    fake.fake_nccl_hang(0)
    control = connect("interrupted", 0, 1, timeout=30.0, transport="inproc")
    comm = DeviceCommunicator(start("nccl", control, (30.0, "auto", False), "gpu 0"), "inproc")

    def interrupt():
        while not any(call.startswith("AllReduce") for call in calls(fake)):
            time.sleep(0.001)
        _thread.interrupt_main()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        comm.all_reduce(torch.ones(3))
    thread.join()
    assert comm._native.failed
    comm.close()


def test_ranks_on_one_gpu_are_refused():
    with pytest.raises(dpcore.Unsupported, match=r"ranks 0 and 2 are on one GPU, which NCCL 2\.27"):
        on_devices(lambda comm: None, 3, uuids=["a", "b", "a"])


@pytest.mark.hurried
def test_a_start_that_fails_names_the_rank(fake):
    fake.fake_nccl_fail(b"CommInitRankConfig", 4)
    with pytest.raises(dpcore.Error, match=r"ncclCommInitRankConfig: invalid argument") as caught:
        on_devices(lambda comm: None, 2, timeout=5.0)
    assert LIBRARY in str(caught.value)


# What a rank calls, and the call of NCCL that is told to fail in it.
FAILING = {
    "AllReduce": lambda comm: comm.all_reduce(torch.ones(4)),
    "Reduce": lambda comm: comm.reduce(torch.ones(4)),
    "Broadcast": lambda comm: comm.broadcast(torch.ones(4)),
    "ReduceScatter": lambda comm: comm.reduce_scatter(torch.zeros(2), torch.ones(4)),
    "RedOpCreatePreMulSum": lambda comm: comm.all_reduce(torch.ones(4), "premul_sum", factor=0.5),
    "Send": lambda comm: comm.all_to_all(torch.zeros(4), torch.ones(4)),
    "Recv": lambda comm: comm.all_reduce(torch.ones(4), algorithm="ring/moves"),
}


@pytest.mark.parametrize("name", FAILING)
def test_every_call_that_fails_names_the_library(fake, name):
    fake.fake_nccl_fail(name.encode(), 4)
    for error in errors_of(FAILING[name], 2):
        assert f"{LIBRARY}, nccl{name}: invalid argument: the stand-in" in str(error), error


def is_left_alone(tensor):
    tensor.fill_(7)
    time.sleep(0.2)
    return tensor.eq(7).all()


def test_nothing_is_written_behind_a_failure(fake):
    """The own piece is copied behind the messages, which the abort ends."""
    fake.fake_nccl_slow_abort(100)
    fake.fake_nccl_fail(b"Send", 4)  # for one rank; the other one waits for it

    def body(comm):
        out = torch.zeros(4)
        with pytest.raises(dpcore.Error, match="ncclSend: invalid argument"):
            comm.all_to_all(out, torch.ones(4))
        assert is_left_alone(out)

    on_devices(body, 2)


def test_nothing_is_written_of_a_call_that_failed_half_way(fake):
    """A schedule copies the own piece before its messages, here behind what never ends."""
    fake.fake_nccl_hang(0)
    fake.fake_nccl_hang(1)
    fake.fake_nccl_fail(b"Recv", 4)

    def body(comm):
        never = comm.all_reduce(torch.ones(3), async_op=True)
        out = torch.zeros(4)
        with pytest.raises(dpcore.Error, match="ncclRecv: invalid argument"):
            comm.all_gather(out, torch.ones(2), algorithm="ring/moves")
        assert is_left_alone(out)
        with pytest.raises(dpcore.Error):
            never.wait()

    on_devices(body, 2)


def test_an_error_of_a_call_in_progress_names_the_library(fake):
    fake.fake_nccl_in_progress(3)

    def body(comm):
        fake.fake_nccl_async_error(6)
        comm.all_reduce(torch.ones(3))

    for error in errors_of(body, 1):
        assert f"{LIBRARY}, ncclAllReduce: unhandled stand-in error" in str(error), error


@pytest.mark.hurried
def test_a_start_without_a_name_to_meet_by_names_the_library(fake):
    fake.fake_nccl_fail(b"GetUniqueId", 4)
    with pytest.raises(dpcore.Error, match="ncclGetUniqueId: invalid argument") as caught:
        on_devices(lambda comm: None, 2, timeout=5.0)
    assert LIBRARY in str(caught.value)


@pytest.mark.hurried
def test_a_group_of_calls_that_failed_is_closed(fake):
    """Otherwise the next communicator of this thread would only collect what it is asked for."""

    def communicator(control):
        native = start("nccl", control, (5.0, "auto", False), "gpu 0")
        return DeviceCommunicator(native, "inproc")

    def body(control):
        other = control.split(0)
        fake.fake_nccl_fail(b"Broadcast", 4)
        broken = communicator(control)
        out, own = torch.zeros(4), torch.ones(4)
        with pytest.raises(dpcore.Error, match="ncclBroadcast: invalid argument"):
            broken.all_gather(out, own, sizes=[4])
        broken.close()
        whole = communicator(other)
        whole.all_gather(out, own, sizes=[4])
        whole.all_to_all(own, out)
        whole.close()
        return out

    (out,) = dpcore.spawn(body, 1, mode="threads")
    assert torch.equal(out, torch.ones(4))


def test_arguments_are_checked_before_anything_happens(fake):
    def body(comm):
        with pytest.raises(dpcore.Unsupported, match="band has no meaning for float32"):
            comm.all_reduce(torch.ones(3), "band")
        with pytest.raises(dpcore.Unsupported, match="not contiguous"):
            comm.all_reduce(torch.ones(3, 3).t())
        with pytest.raises(dpcore.Unsupported, match="the output has 3 elements, 4 are needed"):
            comm.all_gather(torch.ones(3), torch.ones(2))
        comm.all_reduce(torch.ones(3))

    on_devices(body, 2)
    assert [call for call in calls(fake) if "AllReduce" in call] == ["AllReduce 3 x 7 op 0"]


# ---- without a GPU ---------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["nccl", "cuda"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_says_so(backend):
    with pytest.raises(dpcore.Unsupported, match=r"GPU|built without CUDA"):
        dpcore.init(backend, rank=0, world_size=1)
    assert dpcore.init(rank=0, world_size=1).world_size == 1  # nothing is left open
    dpcore.finalize()


@pytest.mark.parametrize("backend", ["nccl", "cuda", "cupy"])
def test_a_device_that_is_no_gpu(backend):
    with pytest.raises(dpcore.Unsupported, match=f"backend='{backend}' is for GPUs"):
        dpcore.init(backend, rank=0, world_size=1, device="cpu")
    with pytest.raises(
        dpcore.Unsupported, match="backend 'native' takes none; pass backend='nccl'"
    ):
        dpcore.init(rank=0, world_size=1, device="cuda")


def test_a_device_that_does_not_exist():
    def body(control):
        with pytest.raises(dpcore.Unsupported, match="'tpu': communicators for devices work on"):
            _C.start_on_device(control._native, "tpu", 5.0, "auto", False, backend="nccl")

    dpcore.spawn(body, 1, mode="threads")
