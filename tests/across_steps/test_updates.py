"""How often the optimizer is called for the buckets of a step, and how a schedule asks for that."""

import time

import pytest
import torch

import dpcore
from tests.across_steps.models import INPUTS, Chain
from tests.across_steps.test_equal import SCHEDULES

CAP_MB = 1e-5  # a bucket for each parameter
MOST_SECONDS = 10


class AllAtOnce(dpcore.LaunchSchedule):
    """Waits for everything in the first module, and updates it in one call."""

    def __init__(self):
        self.over = []

    def phases(self):
        return ["all_reduce", "update"]

    def bucket_ready(self, control, bucket):
        control.launch(bucket, background=False)

    def forward_begin(self, control, module):
        buckets = range(control.buckets)
        self.over.append([control.is_over(bucket) for bucket in buckets])
        control.wait_for_all()
        assert all(map(control.is_over, buckets))
        control.update([*buckets, 0])
        control.update(list(buckets))  # none is left


def operations(comm):
    """That are over."""
    reducing = ("all_reduce", "reduce_scatter", "all_gather")
    return sum(
        path["operations"] for kind in reducing for path in comm.stats().get(kind, {}).values()
    )


def calls_of_a_step(comm, schedule, phases=0):
    """Of the optimizer, for the buckets of one step that the next forward ends; and how many there
    are. With ``phases``, forward begins when each bucket has been so many operations."""
    torch.manual_seed(0)
    model = dpcore.DataParallel(
        Chain().double(), comm=comm, schedule=schedule, bucket_cap_mb=CAP_MB
    )
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = dpcore.DistributedOptimizer(inner, model)
    calls = []
    inner.register_step_pre_hook(
        lambda inner, *_: calls.append(len(inner.param_groups[0]["params"]))
    )
    x = torch.ones(2, INPUTS).double() * (1 + comm.rank)
    buckets = len(list(model.parameters()))
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x).sum()
        wanted = operations(comm) + phases * buckets
        loss.backward()
        optimizer.step()
        calls.clear()
        while phases and operations(comm) < wanted:
            time.sleep(0.001)
    model(x)
    assert sum(calls) == buckets == len(list(model.bucket_report()))
    return calls, buckets


@pytest.mark.parametrize(("schedule", "phases"), [("priority", 1), ("dear", 2)])
def test_all_that_has_come_is_updated_in_one_call(schedule, phases):
    def body(comm):
        return calls_of_a_step(comm, schedule, phases)

    for calls, buckets in dpcore.spawn(body, 2, mode="threads", timeout=MOST_SECONDS):
        assert calls == [buckets]


def test_a_schedule_of_ones_own_updates_several_in_one_call():
    def body(comm):
        schedule = AllAtOnce()
        calls, buckets = calls_of_a_step(comm, schedule)
        return calls, buckets, schedule.over

    for calls, buckets, over in dpcore.spawn(body, 2, mode="threads", timeout=MOST_SECONDS):
        assert calls == [buckets]
        # Nobody drives a bucket before the wait.
        assert not any(map(any, over))


def test_an_update_of_several_names_the_one_that_is_not_there():
    class Hasty(AllAtOnce):
        def forward_begin(self, control, module):
            control.update([0, 1])

    def body(comm):
        with pytest.raises(dpcore.Error, match=r"update of bucket 0 .* before its all_reduce"):
            calls_of_a_step(comm, Hasty())

    dpcore.spawn(body, 2, mode="threads", timeout=MOST_SECONDS)


class CountsInItsGroups(torch.optim.SGD):
    """As timm's Adan does."""

    element_wise = True

    def step(self):
        super().step()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1


class CountsInATensor(CountsInItsGroups):
    def __init__(self, parameters, lr):
        super().__init__(parameters, lr)
        self.param_groups[0]["step"] = torch.tensor(0)

    def step(self):
        torch.optim.SGD.step(self)
        for group in self.param_groups:
            group["step"] += 1


@pytest.mark.parametrize("kind", [CountsInItsGroups, CountsInATensor])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_count_in_param_groups_would_be_lost(schedule, kind):
    def body(comm):
        model = dpcore.DataParallel(Chain(), comm=comm, schedule=schedule)
        optimizer = dpcore.DistributedOptimizer(kind(model.parameters(), lr=0.1), model)
        model(torch.ones(2, INPUTS)).sum().backward()
        with pytest.raises(dpcore.Unsupported, match=r"Counts\w+\.step\(\) changes 'step'"):
            optimizer.step()
            model.flush()

    dpcore.spawn(body, 2, mode="threads", timeout=MOST_SECONDS)
