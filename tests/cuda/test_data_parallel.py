"""DataParallel on GPUs: the bodies of the device of the host, streams, memory, a captured step."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision

import dpcore
from dpcore.comm.communicators.torch_group import TorchCommunicator
from tests.cuda.test_mapped import with_device
from tests.cuda_host import gradient_copies as bodies

PLACE = "cuda:0"
NARROW = [torch.float16, torch.bfloat16]
BODIES = [
    *((bodies.one_launch_per_bucket, (as_view, torch.float32)) for as_view in (True, False)),
    *((bodies.in_a_narrow_type, (as_view, t)) for t in NARROW for as_view in (True, False)),
    *((bodies.forward_in_a_narrow_type, (t,)) for t in NARROW),
    *(
        (bodies.two_backwards_of_one_forward, (v, t))
        for v in (True, False)
        for t in (None, *NARROW)
    ),
    (bodies.other_layouts_are_copied_alone, ()),
    (bodies.more_than_a_launch_can_carry, ()),
    *((bodies.unused_gradients, (v, t)) for v in (True, False) for t in (None, torch.bfloat16)),
    *((bodies.ranks_without_inputs, (t,)) for t in (None, torch.bfloat16)),
]


@pytest.mark.parametrize(("body", "args"), BODIES)
def test_over_nccl_in_a_world_of_one(comm, body, args):
    body(comm, PLACE, *args)


def test_over_torchs_group_of_nccl(tmp_path):
    """What a program has that has called init_process_group("nccl")."""
    store = f"file://{tmp_path / 'store'}"
    dist.init_process_group("nccl", init_method=store, rank=0, world_size=1)
    try:
        all_bodies(TorchCommunicator(), PLACE)
    finally:
        dist.destroy_process_group()


def all_bodies(comm, place=None):
    for body, args in BODIES:
        try:
            body(comm, place or comm.device, *args)
        except Exception as error:
            raise AssertionError(f"rank {comm.rank}: {body.__name__}{args}") from error


# As threads they would share torch's one thread for backward of a GPU: see docs/gpu.md. Two
# processes for all, since to begin on a GPU takes seconds.
def test_two_ranks_over_mapped_memory():
    dpcore.spawn(with_device, 2, all_bodies, mode="processes", timeout=70.0)


class SleepsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        torch.cuda._sleep(50_000_000)  # some 25 ms
        return gradient * 1


class TwoStreams(nn.Module):
    """Half of it runs in a stream beside the current one, forward and backward."""

    def __init__(self):
        super().__init__()
        self.here, self.beside = nn.Linear(64, 64), nn.Linear(64, 64)
        self.stream = None

    def gradients_come_in_two_streams(self):
        """A parameter's gradient is accumulated in the stream that its node was made in. Who keeps
        the result keeps the nodes."""
        self.stream = torch.cuda.Stream()
        with torch.cuda.stream(self.stream):
            return [p.expand_as(p).grad_fn.next_functions[0][0] for p in self.beside.parameters()]

    def forward(self, x):
        current = torch.cuda.current_stream()
        self.stream = self.stream or torch.cuda.Stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            beside = self.beside(SleepsInBackward.apply(self.beside(x)))
        here = self.here(x)
        current.wait_stream(self.stream)
        beside.record_stream(current)
        return here + beside


@pytest.mark.parametrize("narrow", [None, torch.bfloat16])
def test_gradients_of_one_bucket_from_two_streams(comm, narrow):
    torch.manual_seed(0)
    module = TwoStreams().cuda()
    alone = copy.deepcopy(module)
    nodes = module.gradients_come_in_two_streams()
    options = {} if narrow is None else {"mixed_precision": _MixedPrecision(reduce_dtype=narrow)}
    model = dpcore.DataParallel(module, comm=comm, bucket_cap_mb=100, **options)
    for step in range(5):
        x = torch.full((8, 64), 1.0 + step, device=PLACE)
        for each in (model, alone):
            each.zero_grad()
            each(x).square().mean().backward()
        for p, other in zip(module.parameters(), alone.parameters(), strict=True):
            wanted = other.grad if narrow is None else other.grad.to(narrow).float()
            assert torch.equal(p.grad, wanted)
    assert len(nodes) == 2  # kept until here


def test_no_memory_is_taken_after_the_first_steps(comm):
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))).cuda()
    settings = _MixedPrecision(reduce_dtype=torch.bfloat16)
    model = dpcore.DataParallel(module, comm=comm, bucket_cap_mb=1, mixed_precision=settings)
    x = torch.ones(16, 256, device=PLACE)
    taken = []
    for _ in range(8):
        model.zero_grad()
        model(x).square().mean().backward()
        taken.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert len(set(taken[3:])) == 1, taken


@pytest.mark.parametrize("narrow", [None, torch.bfloat16])
@pytest.mark.parametrize("as_view", [True, False])
def test_a_step_captured_into_a_graph(comm, as_view, narrow):
    """Forward, backward, communication and optimizer, replayed on other inputs."""
    options = {} if narrow is None else {"mixed_precision": _MixedPrecision(reduce_dtype=narrow)}
    first = bodies.layers().to(PLACE)
    x = torch.zeros(4, bodies.WIDTH, device=PLACE)

    def ready(module):
        """A step on whatever ``x`` holds."""
        model = dpcore.DataParallel(
            module,
            comm=comm,
            bucket_cap_mb=bodies.CAP_MB,
            gradient_as_bucket_view=as_view,
            **options,
        )
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)

        def step():
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()

        return model, step

    captured, eager = copy.deepcopy(first), copy.deepcopy(first)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # where nodes of autograd are made, they run
        model, step = ready(captured)
        for number in range(4):
            x.copy_(bodies.inputs_of(number, 0))
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        copies = bodies.counted(model, step)
    assert copies["alone"] == 0 and copies["launches"] % len(model.bucket_report()) == 0
    for number in range(4, 9):
        x.copy_(bodies.inputs_of(number, 0))
        graph.replay()
    torch.cuda.synchronize()

    _, step = ready(eager)
    for number in range(9):
        x.copy_(bodies.inputs_of(number, 0))
        step()
    for mine, other, before in zip(
        captured.parameters(), eager.parameters(), first.parameters(), strict=True
    ):
        torch.testing.assert_close(mine, other)
        assert not torch.equal(mine, before)
