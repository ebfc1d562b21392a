"""What a launch schedule in Python may ask for and do, beyond launching one bucket at a time."""

import numpy
import pytest
import torch
from torch import nn

import dpcore
from dpcore.tools.show.buckets import bucket_spans
from dpcore.tools.show.reading import read_run
from tests.data_parallel.models import OPTIMIZERS, assert_same_values, train, train_alone
from tests.data_parallel.test_schedules import LAYERS, layers, traced_step

SIZES = 4 * 32 * 32, 4 * 32  # bytes of a weight and of a bias


class PerParameter(dpcore.LaunchSchedule):
    def caps(self, wanted):
        return [0]


class InPairs(PerParameter):
    """Sends bias and weight of a layer, which are neighbours, as one."""

    def bucket_ready(self, control, bucket):
        first = bucket // 2 * 2
        pair = range(first, min(first + 2, control.buckets))
        if all(control.is_complete(each) for each in pair):
            control.launch(pair, priority=bucket)


class AllAsOne(PerParameter):
    def backward_end(self, control):
        control.launch(range(control.buckets))


@pytest.mark.parametrize("call", ["bytes", "is_complete", "launch", "wait", "update", "next_phase"])
def test_a_bucket_that_is_not_there_is_named(call):
    class OneTooMany(PerParameter):
        def bucket_ready(self, control, bucket):
            getattr(control, call)(control.buckets)

    def body(comm):
        model = dpcore.DataParallel(layers(), comm=comm, schedule=OneTooMany())
        with pytest.raises(IndexError, match=r"no bucket \d+: control\.buckets is \d+, and they"):
            model(torch.randn(4, 32)).sum().backward()

    dpcore.spawn(body, 1, mode="threads")


def operations_of(trace):
    return [event.bytes for event in trace.events if event.kind == "operation"]


@pytest.mark.parametrize("schedule", (InPairs, AllAsOne))
@pytest.mark.parametrize("mode", ("threads", "processes"))
def test_neighbours_that_go_as_one_are_trained_alike(schedule, mode):
    def body(comm):
        model = train(comm, OPTIMIZERS["adamw"], schedule=schedule())
        assert_same_values(model.module, train_alone(OPTIMIZERS["adamw"]))

    dpcore.spawn(body, 2, mode=mode)


def test_neighbours_are_one_operation_of_their_own_memory(tmp_path):
    def body(comm):
        model = dpcore.DataParallel(layers(), comm=comm, schedule=InPairs())
        for _ in range(2):  # the second begins with other buckets
            traced_step(comm, model)
        with dpcore.trace(tmp_path / "run.json", comm=comm) as trace:
            model(torch.randn(4, 32)).square().sum().backward()
        assert operations_of(trace) == [sum(SIZES)] * LAYERS
        weight, bias = (p.grad for p in model.module[0].parameters())
        assert abs(weight.data_ptr() - bias.data_ptr()) in SIZES  # side by side: nothing is copied

    dpcore.spawn(body, 2, mode="threads")
    run = read_run(tmp_path / "run.json")
    spans = bucket_spans(run, run.ranks[0])
    assert len(spans) == 2 * LAYERS
    assert len({span.operation for span in spans}) == LAYERS  # -1 would be one that is not found


def test_memory_that_has_moved_is_copied_and_the_sums_stay_right():
    """Numpy keeps a bias of the first rank, whose bucket then lies elsewhere there."""

    def body(comm):
        model = dpcore.DataParallel(layers(), comm=comm, schedule=InPairs())
        for step in range(4):
            model.zero_grad(set_to_none=False)
            x = torch.full((4, 32), float(comm.rank + step))
            model(x).sum().backward()
            if step == 1 and comm.rank == 0:
                kept = model.module[2].bias.grad.numpy()
                was = kept.copy()
            alone = layers()
            alone.load_state_dict(model.module.state_dict())
            parts = []
            for rank in range(comm.world_size):
                alone.zero_grad()
                alone(torch.full((4, 32), float(rank + step))).sum().backward()
                parts.append([p.grad.clone() for p in alone.parameters()])
            for own, *each in zip(model.module.parameters(), *parts, strict=True):
                torch.testing.assert_close(own.grad, sum(each) / len(each))
        if comm.rank == 0:
            assert numpy.array_equal(kept, was)

    dpcore.spawn(body, 2, mode="threads")


def test_neighbours_in_a_narrower_type():
    def body(comm):
        model = dpcore.DataParallel(layers(), comm=comm, schedule=InPairs())
        model.register_comm_hook(None, bf16_compress_hook())
        exact = dpcore.DataParallel(layers(), comm=comm, schedule="per_parameter")
        exact.load_state_dict(model.state_dict())
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(comm.rank))
        for _ in range(2):
            for each in (model, exact):
                each.zero_grad()
                each(x).square().mean().backward()
        for narrow, wide in zip(model.parameters(), exact.parameters(), strict=True):
            torch.testing.assert_close(narrow.grad, wide.grad, rtol=0.05, atol=1e-3)

    dpcore.spawn(body, 2, mode="threads")


def bf16_compress_hook():
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return default_hooks.bf16_compress_hook


def test_a_rank_that_puts_other_buckets_together_is_told():
    class Differs(AllAsOne):
        def __init__(self, rank):
            self._rank = rank

        def backward_end(self, control):
            half = control.buckets // 2 + self._rank
            control.launch(range(half))
            control.launch(range(half, control.buckets))

    def body(comm):
        model = dpcore.DataParallel(layers(), comm=comm, schedule=Differs(comm.rank))
        with pytest.raises(dpcore.Mismatch):
            traced_step(comm, model)

    dpcore.spawn(body, 2, mode="threads")


class Launches(PerParameter):
    def __init__(self, *lists):
        self._lists = lists

    def backward_end(self, control):
        for numbers in self._lists:
            control.launch(numbers)


class Backwards(Launches):
    def order(self, buckets):
        return [0, 2, 1, *range(3, buckets)]


class TooEarly(PerParameter):
    def bucket_ready(self, control, bucket):
        control.launch([bucket, bucket + 1])


@pytest.mark.parametrize(
    ("schedule", "message"),
    (
        (Launches([]), r"launch of \[\] as one operation: the list is empty"),
        (Launches([0, 2]), r"launch of \[0, 2\] as one operation: only neighbours"),
        (Launches([1, 0]), "only neighbours can go as one, such as"),
        (Launches([0], [0, 1]), "launch of buckets 0 to 1 as one, of which some are launched"),
        (Backwards([0, 1]), r"launch of \[0, 1\] as one operation: in order\(\), others come"),
        (TooEarly(), "launch of bucket 1 .* 1 gradients are missing"),
    ),
)
def test_mistakes(schedule, message):
    def body(comm):
        model = dpcore.DataParallel(layers(), comm=comm, schedule=schedule)
        with pytest.raises(dpcore.Error, match=message):
            traced_step(comm, model)

    dpcore.spawn(body, 1, mode="threads")


@pytest.mark.parametrize(
    ("caps", "message"),
    [
        ([], r"schedule 'Odd': caps\(\) returns no size of buckets; return at least one, in bytes"),
        ([-5], r"schedule 'Odd': caps\(\) returns \[-5\]; see LaunchSchedule.caps"),
        (["25"], r"schedule 'Odd': caps\(\) returns \['25'\]; see LaunchSchedule.caps"),
        (None, r"schedule 'Odd': caps\(\) returns None; see LaunchSchedule.caps"),
    ],
)
def test_caps_are_sizes(caps, message):
    class Odd(PerParameter):
        def caps(self, wanted):
            return caps

    def body(comm):
        with pytest.raises(dpcore.Error, match=message):
            dpcore.DataParallel(nn.Linear(2, 2), comm=comm, schedule=Odd())

    dpcore.spawn(body, 1, mode="threads")


def test_buckets_of_two_types_do_not_go_as_one():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(8, 8, bias=False)
            self.other = nn.Linear(8, 8, bias=False).double()

        def forward(self, x):
            return self.other(self.one(x).double())

    def body(comm):
        model = dpcore.DataParallel(Mixed(), comm=comm, schedule=AllAsOne())
        with pytest.raises(dpcore.Error, match="different types or devices"):
            model(torch.ones(2, 8)).sum().backward()

    dpcore.spawn(body, 1, mode="threads")


class Asks(PerParameter):
    """Writes down what it is told."""

    def __init__(self):
        self.told = []

    def bucket_ready(self, control, bucket):
        before = control.in_flight
        control.launch(bucket, background=False)  # until this rank waits, it is in flight
        self.told.append((control.rank, control.bytes(bucket), control.in_flight - before))
        assert control.elapsed_ms >= 0

    def bucket_complete(self, control, bucket):
        self.told.append(("complete", bucket, control.elapsed_ms > 0))

    def backward_end(self, control):
        control.wait_for_all()
        assert control.in_flight == 0


def test_what_control_tells():
    def body(comm):
        schedule = Asks()
        model = dpcore.DataParallel(layers(), comm=comm, schedule=schedule)
        traced_step(comm, model)
        schedule.told.clear()
        traced_step(comm, model)
        sent = [entry for entry in schedule.told if entry[0] != "complete"]
        complete = [entry for entry in schedule.told if entry[0] == "complete"]
        assert [entry[:2] for entry in sent] == [
            (comm.rank, size) for _ in range(LAYERS) for size in sorted(SIZES, key=sizes_of(model))
        ]
        assert sum(entry[2] for entry in sent) == 2 * LAYERS
        assert complete == [("complete", bucket, True) for bucket in range(2 * LAYERS)]

    dpcore.spawn(body, 2, mode="threads")


def sizes_of(model):
    """The order in which a weight and a bias become ready."""
    (name,) = model.bucket_report()[0].parameters
    return lambda size: (size == SIZES[0]) == name.endswith("bias")


class Window(PerParameter):
    """Two operations at a time; the next one leaves when one of them is complete."""

    def __init__(self):
        self._next = 0
        self.most = 0
        self.while_backward = 0

    def bucket_ready(self, control, bucket):
        self._send(control)

    def bucket_complete(self, control, bucket):
        self.while_backward += not control.is_complete(control.buckets - 1)
        self._send(control)

    def backward_end(self, control):
        for bucket in range(control.buckets):
            control.wait(bucket)
        self._next = 0

    def _send(self, control):
        ready = self._next < control.buckets and control.is_complete(self._next)
        if ready and control.in_flight < 2:
            self._next += 1
            control.launch(self._next - 1)
        self.most = max(self.most, control.in_flight)


class Theirs:
    """A group that dpcore knows nothing about."""

    def __init__(self, comm):
        self._comm = comm
        self.rank = comm.rank
        self.world_size = comm.world_size

    def all_reduce(self, tensor, op="sum", async_op=False):
        return self._comm.all_reduce(tensor, op=op, async_op=async_op)

    def broadcast(self, tensor, root=0):
        return self._comm.broadcast(tensor, root)

    def all_gather(self, output, input, sizes=None):
        return self._comm.all_gather(output, input, sizes=sizes)


@pytest.mark.parametrize("group", (lambda comm: comm, Theirs), ids=("core", "own group"))
def test_a_window_is_kept(group):
    def body(comm):
        schedule = Window()
        model = train(group(comm), OPTIMIZERS["sgd"], schedule=schedule)
        assert_same_values(model.module, train_alone(OPTIMIZERS["sgd"]))
        assert 1 <= schedule.most <= 2

    dpcore.spawn(body, 3, mode="threads")


class Meets(torch.autograd.Function):
    """A barrier in backward: by then all ranks have launched what came before."""

    @staticmethod
    def forward(ctx, x, comm):
        ctx.comm = comm
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.comm.barrier()
        return gradient, None


def test_a_completion_is_noticed_while_backward_goes_on():
    class WithBarriers(nn.Module):
        def __init__(self, comm):
            super().__init__()
            self.comm = comm
            self.parts = layers()

        def forward(self, x):
            for part in self.parts:
                x = part(Meets.apply(x, self.comm))
            return x

    def body(comm):
        schedule = Window()
        model = dpcore.DataParallel(WithBarriers(comm.split(0)), comm=comm, schedule=schedule)
        for _ in range(5):
            model.zero_grad()
            model(torch.ones(1, 32)).sum().backward()
        return schedule.while_backward

    for heard in dpcore.spawn(body, 2, mode="threads"):
        assert heard > 0


class Agrees(PerParameter):
    def __init__(self, rank):
        self._values = [float(rank), -float(rank), 0.5]
        self.largest = None

    def backward_end(self, control):
        control.launch(range(control.buckets))
        self.largest = control.max_over_ranks(self._values)


@pytest.mark.parametrize("group", (lambda comm: comm, Theirs), ids=("core", "own group"))
def test_ranks_agree_on_what_they_measured(group):
    def body(comm):
        schedule = Agrees(comm.rank)
        model = dpcore.DataParallel(layers(), comm=group(comm), schedule=schedule)
        for _ in range(2):
            model.zero_grad()
            model(torch.ones(1, 32)).sum().backward()
        return schedule.largest

    assert dpcore.spawn(body, 3, mode="threads") == [[2.0, 0.0, 0.5]] * 3


def test_what_ranks_agree_with_keeps_its_memory():
    sent = []

    class Remembers(Theirs):
        def all_reduce(self, tensor, op="sum", async_op=False):
            if op == "max":
                sent.append(tensor)  # so that nobody else gets its memory
            return super().all_reduce(tensor, op, async_op)

    class Counts(Agrees):
        def backward_end(self, control):
            super().backward_end(control)
            assert control.max_over_ranks([7.0]) == [7.0]  # fewer values

    def body(comm):
        model = dpcore.DataParallel(layers(), comm=Remembers(comm), schedule=Counts(0))
        for _ in range(3):
            model(torch.ones(1, 32)).sum().backward()

    dpcore.spawn(body, 1, mode="threads")
    assert [len(tensor) for tensor in sent] == [3, 1] * 3
    assert len({tensor.data_ptr() for tensor in sent}) == 1
