"""torch.distributed with our backend for tensors on GPUs: the CPU's bodies, streams, training."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dpcore
from dpcore._autoload import register
from dpcore.comm.launch.torch_backend import BackendOptions
from tests.cuda.on_gpu import GPUS, use_gpu_of
from tests.cuda.training import inputs, small_model, train
from tests.cuda_host.test_torch_backend import a_batch
from tests.torch_backend import test_collectives as cpu


def rank_main(comm, body, store, backend, options):
    """A rank on the GPU with its number, or all on one."""
    rank, world = comm.rank, comm.world_size
    dpcore.finalize()
    register()
    device = use_gpu_of(rank)
    told = {"device_id": device} if options.pop("told_the_device", False) else {}
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=30),
        pg_options=BackendOptions(**options) if options else None,
        **told,
    )
    try:
        return body()
    finally:
        dist.destroy_process_group()


def on_gpus(body, world, tmp_path, backend="dpcore", **options):
    store = str(tmp_path / "store")
    return dpcore.spawn(rank_main, world, body, store, backend, dict(options), timeout=300.0)


def made_there(body):
    """With tensors that are made on the GPU, so that the CPU's bodies run with them."""

    def run():
        with torch.device("cuda", torch.cuda.current_device()):
            return body()

    return run


def carrier():
    """What the operations of this rank's GPU go over."""
    device = torch.device("cuda", torch.cuda.current_device())
    return dist.group.WORLD._get_backend(device).device_libraries()[str(device)][0]


def expected_carrier(world):
    return "nccl" if world <= GPUS else "cuda"


def every_collective():
    for check in cpu.BODIES:
        try:
            check()
        except Exception as error:
            raise AssertionError(f"{check.__name__} on rank {dist.get_rank()}") from error
    dist.barrier(device_ids=[torch.cuda.current_device()])
    return carrier()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_collectives(world, tmp_path):
    wanted = [expected_carrier(world)] * world
    assert on_gpus(made_there(every_collective), world, tmp_path) == wanted


def test_collectives_of_a_group_that_was_told_its_device(tmp_path):
    """The communicator is there before the first call; ranks outside of a new group return."""

    def body():
        assert carrier() == expected_carrier(2)
        group = dist.new_group([0])
        tensor = torch.ones(3, device="cuda")
        if dist.get_rank() == 0:
            dist.all_reduce(tensor, group=group)
        dist.barrier()
        return tensor.tolist()

    results = on_gpus(body, 2, tmp_path, "cpu:dpcore,cuda:dpcore", told_the_device=True)
    assert results == [[1.0] * 3] * 2


@pytest.mark.parametrize("world", [2, 3, 4])
def test_messages(world, tmp_path):
    @made_there
    def body():
        for count in (0, 5, 1_300_000):
            a_batch(count)
        rank = dist.get_rank()
        if rank == 0:
            dist.send(torch.full((3,), 7.0), 1)
        elif rank == 1:
            tensor = torch.zeros(3)
            assert dist.recv(tensor, 0) == 0 and tensor.tolist() == [7.0] * 3
        dist.barrier()

    on_gpus(body, world, tmp_path)


def test_tensors_of_the_host_and_of_the_gpu_in_one_group(tmp_path):
    def body():
        for _ in range(3):
            for device in ("cpu", f"cuda:{torch.cuda.current_device()}"):
                tensor = torch.full((1000,), 2.0, device=device)
                dist.all_reduce(tensor)
                assert tensor.unique().tolist() == [4.0]
        with pytest.raises(dpcore.Unsupported, match="have to be on one device"):
            dist.all_gather_into_tensor(torch.empty(4, device="cuda"), torch.empty(2))
        dist.barrier()

    on_gpus(body, 2, tmp_path)


# ---- streams ---------------------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path):
    """A world of one over NCCL, in this process."""
    register()
    torch.cuda.set_device(0)
    dist.init_process_group(
        "dpcore", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def behind_a_long_kernel():
    x = torch.zeros(1 << 20, device="cuda")
    dist.all_reduce(x)  # connections, memory
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)  # about 0.2 s
    x.fill_(3)
    return x


def test_a_call_does_not_wait_and_what_follows_does(alone):
    x = behind_a_long_kernel()
    work = dist.all_reduce(x, dist.ReduceOp.AVG, async_op=True)
    assert not work.is_completed(), "the call has waited for the GPU"
    work.wait()
    assert not work.is_completed(), "wait() has waited for the GPU"
    x.mul_(2)
    torch.cuda.synchronize()
    assert work.is_completed() and work.is_success()
    assert torch.equal(x, torch.full_like(x, 6))


def test_another_stream_waits_when_it_is_asked_to(alone):
    x = behind_a_long_kernel()
    work = dist.all_reduce(x, async_op=True)
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        work.wait()
        y = x * 2
    other.synchronize()
    assert torch.equal(y, torch.full_like(y, 6))


def test_futures_order_streams_and_not_the_host(alone):
    x = behind_a_long_kernel()
    work = dist.all_reduce(x, async_op=True)
    seen = []

    def double(future):
        seen.append(torch.cuda.current_stream())
        return future.value()[0] * 2

    chained = work.get_future().then(double)
    assert not work.is_completed(), "the future has waited for the GPU"
    assert seen and seen[0] != torch.cuda.current_stream(), "a callback has a stream of its own"
    y = chained.wait()
    assert torch.equal(y, torch.full_like(y, 6))


def test_lists_of_results_are_copied_by_the_gpu(alone):
    x = behind_a_long_kernel()
    parts = [torch.zeros(1 << 10, 1 << 10, device="cuda").t()]
    work = dist.all_gather(parts, x.view(1 << 10, 1 << 10), async_op=True)
    assert not work.is_completed(), "the call has waited for the GPU"
    work.wait()
    assert torch.equal(parts[0], torch.full_like(parts[0], 3))


def test_memory_that_is_freed_early_is_not_used_again(tmp_path):
    """Two ranks, of which one is late: its peer's stream waits with a tensor that nobody holds."""

    def body():
        rank = dist.get_rank()
        dist.all_reduce(torch.ones(1 << 20, device="cuda"))
        torch.cuda.synchronize()
        for _ in range(5):
            x = torch.ones(1 << 20, device="cuda")
            if rank == 1:
                torch.cuda._sleep(50_000_000)  # some 25 ms
            dist.all_reduce(x, async_op=True)
            del x
            y = torch.full((1 << 20,), 7.0, device="cuda")
            dist.barrier(device_ids=[torch.cuda.current_device()])
            assert bool((y == 7).all()), "a result was written over another tensor"

    on_gpus(body, 2, tmp_path)


def test_memory_goes_back_when_the_stream_has_waited(alone):
    """Not when a thread has seen that the operation is over: that would be 20 ms later."""
    x = torch.ones(1 << 24, device="cuda")
    dist.all_reduce(x)
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        y = torch.ones(1 << 24, device="cuda")
        work = dist.all_reduce(y, async_op=True)
        work.wait()
        del y, work
        assert torch.cuda.memory_allocated() == before, "the tensor is still held"


def test_a_barrier_waits_for_the_device(alone):
    x = behind_a_long_kernel()
    event = torch.cuda.Event()
    event.record()
    dist.barrier(device_ids=[0])
    assert event.query(), "what came before is done"
    assert x[0].item() == 3


def test_captured_into_a_graph(alone):
    x = torch.ones(1000, device="cuda")
    dist.all_reduce(x, dist.ReduceOp.AVG)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
        dist.all_reduce(x, dist.ReduceOp.AVG)
    x.zero_()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(x, torch.full_like(x, 3))


def test_the_programs_device_stays_current(alone):
    if GPUS < 2:
        pytest.skip("needs 2 GPUs")
    x = torch.ones(10, device="cuda:1")
    dist.all_reduce(x)
    assert torch.cuda.current_device() == 0


# ---- training --------------------------------------------------------------------------------


WRAPS = {
    "torch": lambda module: nn.parallel.DistributedDataParallel(
        module, device_ids=[torch.cuda.current_device()], bucket_cap_mb=0.05
    ),
    "dpcore": lambda module: dpcore.DataParallel(module, bucket_cap_mb=0.05),
}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_training_with_several_ranks_is_training_in_one_process(world, wrap, tmp_path):
    def body():
        part = inputs().chunk(dist.get_world_size())[dist.get_rank()]
        result = train(small_model(), part, WRAPS[wrap])
        return result, carrier() if wrap == "torch" else None

    alone = train(small_model(), inputs(), lambda module: module)
    for parameters, used in on_gpus(body, world, tmp_path):
        assert torch.allclose(parameters, alone, rtol=1e-10)
        assert used in (None, expected_carrier(world))


def test_data_parallel_takes_a_communicator_for_gpus(tmp_path):
    def body():
        module = WRAPS["dpcore"](small_model())
        module(inputs().cuda()).square().mean().backward()
        return module.backend

    assert on_gpus(body, 2, tmp_path) == [expected_carrier(2)] * 2


# ---- beside others ---------------------------------------------------------------------------


def test_beside_nccl_in_one_group(tmp_path):
    register()
    dist.init_process_group(
        "cpu:dpcore,cuda:nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        for device in ("cpu", "cuda:0"):
            tensor = torch.full((1000,), 3.0, device=device)
            dist.all_reduce(tensor)
            dist.broadcast(tensor, 0)
            assert tensor.unique().tolist() == [3.0]
        assert dist.group.WORLD._get_backend(torch.device("cpu")).name() == "dpcore"
        assert dist.group.WORLD._get_backend(torch.device("cuda")).name() == "nccl"
    finally:
        dist.destroy_process_group()


def test_nccl_for_ranks_that_share_a_gpu_says_what_to_do(tmp_path):
    if GPUS > 1:
        pytest.skip("needs a machine with one GPU")
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
        pytest.skip("NCCL was told to let ranks share a GPU")

    def body():
        with pytest.raises(dpcore.Unsupported, match="give each rank a GPU of its own"):
            dist.all_reduce(torch.ones(1, device="cuda"))

    on_gpus(body, 2, tmp_path, cuda="nccl")
