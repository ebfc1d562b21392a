"""When buckets are sent: seen in traces, for the built-in schedules and for ones in Python."""

import pytest
import torch
from torch import nn

import dpcore
from tests.data_parallel.models import OPTIMIZERS, assert_same_values, train, train_alone

LAYERS = 6
WIDTH = 32


def layers(width=WIDTH):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))


def traced_step(comm, model, backward=None):
    """The events of one step: (kind, number) in order of time."""
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(comm.rank))
    with dpcore.trace(comm=comm) as t:
        loss = model(x).square().sum()
        loss.backward() if backward is None else backward(loss)
    return [(e.kind, e.operation, e.bytes) for e in t.events if e.kind in ("ready", "launch")]


def kinds_of(events):
    return "".join({"ready": "r", "launch": "L"}[kind] for kind, *_ in events)


# ---- built in --------------------------------------------------------------------------------


def test_bucketed_launches_while_backward_goes_on_from_the_first_step():
    def body(comm):
        model = dpcore.DataParallel(layers(), comm=comm, bucket_cap_mb=0, schedule="bucketed")
        return [kinds_of(traced_step(comm, model)) for _ in range(2)]

    for of_rank in dpcore.spawn(body, 2, mode="threads"):
        assert of_rank == ["rL" * 2 * LAYERS] * 2


def test_sequential_launches_after_the_last_gradient():
    def body(comm):
        model = dpcore.DataParallel(layers(), comm=comm, bucket_cap_mb=0, schedule="sequential")
        return kinds_of(traced_step(comm, model))

    for of_rank in dpcore.spawn(body, 2, mode="threads"):
        assert of_rank == "r" * 2 * LAYERS + "L" * 2 * LAYERS


@pytest.mark.parametrize(("schedule", "buckets"), (("flat", 1), ("per_parameter", 2 * LAYERS)))
def test_how_many_buckets(schedule, buckets):
    def body(comm):
        model = dpcore.DataParallel(layers(), comm=comm, schedule=schedule)
        events = traced_step(comm, model)
        launched = [number for kind, number, _ in events if kind == "launch"]
        assert launched == list(range(buckets))
        assert len(model.bucket_report()) == buckets
        sent = sum(size for kind, _, size in events if kind == "launch")
        assert sent == sum(4 * p.numel() for p in model.parameters())

    dpcore.spawn(body, 2, mode="threads")


def test_oracle_communicates_nothing_and_says_so():
    def body(comm):
        model = dpcore.DataParallel(layers(), comm=comm, schedule="oracle")
        before = comm.stats().get("all_reduce")
        traced_step(comm, model)
        assert comm.stats().get("all_reduce") == before
        assert not model.is_exact
        return model.module[0].weight.grad.sum().item()

    one, other = dpcore.spawn(body, 2, mode="threads")
    assert one != other


def test_the_bytes_that_move_are_the_floor():
    """Buckets lie in arenas: each byte is read once and written once per rank."""

    def body(comm):
        model = dpcore.DataParallel(layers(512), comm=comm, schedule="flat")
        x = torch.ones(1, 512)
        model(x).sum().backward()
        before = comm.stats()["all_reduce"]["two_shot/push"]
        model(x).sum().backward()
        after = comm.stats()["all_reduce"]["two_shot/push"]
        moved = sum(after[key] - before[key] for key in ("peer_reads", "peer_writes"))
        return moved, sum(4 * p.numel() for p in model.parameters())

    for moved, size in dpcore.spawn(body, 2, mode="threads"):
        assert moved == size  # half of it read from, half written to the other of two ranks


def test_buckets_follow_the_order_of_arrival_of_rank_0():
    class TwoOrders(nn.Module):
        """Uses its layers forwards, or backwards: gradients then arrive the other way."""

        def __init__(self, turned):
            super().__init__()
            self.parts = layers()
            self.turned = turned

        def forward(self, x):
            for part in reversed(self.parts) if self.turned else self.parts:
                x = part(x)
            return x

    def body(comm):
        model = dpcore.DataParallel(TwoOrders(comm.rank == 0), comm=comm, bucket_cap_mb=0.005)
        first = [line.parameters for line in model.bucket_report()]
        numbers = []
        for _ in range(3):
            events = traced_step(comm, model)
            numbers.append([number for kind, number, _ in events if kind == "launch"])
        assert all(of_step == sorted(of_step) for of_step in numbers)
        rebuilt = [line.parameters for line in model.bucket_report()]
        assert rebuilt != first
        assert rebuilt[0][0].startswith("parts.0")  # last in the graph of rank 0
        return rebuilt

    of_0, of_1 = dpcore.spawn(body, 2, mode="threads")
    assert of_0 == of_1


# ---- in Python -------------------------------------------------------------------------------


class OnlyAtOptimizer(dpcore.LaunchSchedule):
    """Launches in the background and lets everything be in flight until the optimizer steps."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def caps(self, wanted):
        return [0]

    def gradient_ready(self, control, gradient):
        self.seen.append(("gradient", gradient, control.bucket_of(gradient)))

    def bucket_ready(self, control, bucket):
        assert control.is_complete(bucket)
        control.launch(bucket)

    def optimizer_step(self, control):
        self.seen.append(("optimizer", control.buckets))
        control.wait_for_all()


def test_waiting_at_the_optimizer():
    def body(comm):
        schedule = OnlyAtOptimizer()
        model = train(comm, OPTIMIZERS["adamw"], schedule=schedule)
        assert_same_values(model.module, train_alone(OPTIMIZERS["adamw"]))
        assert model.schedule == "OnlyAtOptimizer"
        count = len([p for p in model.parameters() if p.requires_grad])
        assert len(schedule.seen) == 5 * (count + 1)
        assert [entry for entry in schedule.seen if entry[0] == "optimizer"] == [
            ("optimizer", count)
        ] * 5

    dpcore.spawn(body, 2, mode="threads")


class AtForward(dpcore.LaunchSchedule):
    """Waits for a layer's gradients when its next forward begins, if no optimizer steps before."""

    def __init__(self):
        super().__init__()
        self.waited = []

    def backward_end(self, control):
        for bucket in range(control.buckets):
            control.launch(bucket, priority=-bucket)

    def forward_begin(self, control, module):
        for gradient in control.gradients_of_module(module):
            control.wait(control.bucket_of(gradient))
        self.waited.append(module)

    def optimizer_step(self, control):
        control.wait_for_all()


def test_waiting_at_the_next_forward_of_each_layer():
    def body(comm):
        schedule = AtForward()
        model = dpcore.DataParallel(layers(), comm=comm, bucket_cap_mb=0, schedule=schedule)
        for _ in range(3):
            model.zero_grad()
            traced_step(comm, model)
        return schedule.waited

    # The first forward has nothing to wait for, and the second begins with other buckets.
    assert dpcore.spawn(body, 2, mode="threads") == [list(range(LAYERS))] * 2


class Forgetful(dpcore.LaunchSchedule):
    def backward_end(self, control):
        for bucket in range(control.buckets - 1):
            control.launch(bucket)


class Hasty(dpcore.LaunchSchedule):
    def gradient_ready(self, control, gradient):
        control.launch(control.bucket_of(gradient))


class WaitsFirst(dpcore.LaunchSchedule):
    def bucket_ready(self, control, bucket):
        control.wait(bucket)


class Twice(dpcore.LaunchSchedule):
    def order(self, buckets):
        return [0] * buckets


class Raises(dpcore.LaunchSchedule):
    def bucket_ready(self, control, bucket):
        raise KeyError("mine")


@pytest.mark.parametrize(
    ("schedule", "kind", "message"),
    (
        (Forgetful, dpcore.Error, r"'Forgetful' has not launched bucket 11 \(1 gradients"),
        (Hasty, dpcore.Error, r"'Hasty': launch of bucket 1 .* 3 gradients are missing"),
        (WaitsFirst, dpcore.Error, r"'WaitsFirst': wait for bucket 0 .* not launched"),
        (Twice, dpcore.Unsupported, r"order\(\d+\) must name every bucket"),
        (Raises, KeyError, "mine"),
    ),
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_mistakes_of_schedules_are_errors_that_name_them(schedule, kind, message):
    def body(comm):
        cap = 0.005 if schedule is Hasty else 0
        with pytest.raises(kind, match=message):
            model = dpcore.DataParallel(layers(), comm=comm, bucket_cap_mb=cap, schedule=schedule())
            traced_step(comm, model)

    dpcore.spawn(body, 1, mode="threads")
