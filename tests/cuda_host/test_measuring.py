"""The tools that measure a training, on devices of the host: what events of their streams say."""

import statistics

import pytest
import torch
import torch.distributed as dist

import dpcore as dp
from dpcore.recorder.step_figures import line_of
from tests.data_parallel.models import Small, batch, part
from tests.data_parallel.test_monitor import MS, Layers, train
from tests.data_parallel.test_noise_scale import by_the_paper, gradient, of_all_ranks, ratio_of_sums
from tests.data_parallel.test_trace import ACROSS, measured
from tests.ranks.devices import on_devices
from tests.ranks.groups import in_group

pytestmark = pytest.mark.usefixtures("fake")
BACKENDS = ("nccl", "cuda")
ROWS = 12


def stepped(comm, schedule):
    """A model, and a function that trains it for so many steps."""
    model = dp.DataParallel(Layers(1 * MS), comm=comm, schedule=schedule)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = dp.DistributedOptimizer(plain, model) if model._across is not None else plain

    def train_for(steps):
        for _ in range(steps):
            train(model, 1)
            optimizer.step()

    return model, train_for


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "schedule", ("bucketed", "sequential", "priority", "dear", "zero1", "zero2")
)
def test_the_monitor_reads_events_of_the_streams(backend, schedule):
    def body(comm):
        model, train_for = stepped(comm, schedule)
        lines = []
        with dp.monitor(model, 8, lines.append) as monitor:
            train_for(20)
            assert monitor._knows_times
            steps = list(monitor._steps)
        assert not comm._native.sums(0, comm._native.mark())  # it no longer watches
        return lines, monitor.last, statistics.median(step.compute_ms for step in steps)

    (lines, last, computed), (none, of_other, _) = on_devices(body, 2, backend=backend)
    assert [line["step"] for line in lines] == [8, 16] and not none
    assert last == {**of_other, "notes": last["notes"]}
    assert 6 < last["compute_ms"] <= last["step_ms"] and computed > 6  # six naps of 1 ms
    assert last["communication_ms"] > 0
    assert 0 <= last["exposed_ms"] <= last["step_ms"]
    assert last["bytes"] > 0 and "of communication, overlap" in line_of(last)


def test_a_trace_beside_the_monitor_costs_it_some_steps():
    def body(comm):
        model, train_for = stepped(comm, "bucketed")
        with dp.monitor(model, 50, to=None) as monitor:
            train_for(5)
            with dp.trace(comm=comm) as traced:
                train_for(3)
            train_for(6)
            figures = monitor.figures()
        assert [event.name for event in traced.events].count("forward") == 3
        return figures["steps"]

    for steps in on_devices(body, 2):
        assert 6 <= steps <= 12


def test_a_refreshed_model_and_one_whose_neighbour_ends_are_still_watched():
    def body(comm):
        model, train_for = stepped(comm, "bucketed")
        other, _ = stepped(comm, "bucketed")
        beside = dp.monitor(other, 8, to=None)
        with dp.monitor(model, 8, to=None) as monitor:
            train_for(3)
            model.refresh()
            beside.close()
            train_for(12)
            assert monitor.figures()["communication_ms"] > 0
            assert len(monitor._steps) >= 10
        assert comm._watched == 0

    on_devices(body, 2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_noise_scale_is_what_the_paper_says(backend):
    def body(comm):
        module, alone = Small(), Small()
        model = dp.DataParallel(module, comm=comm, bucket_cap_mb=0.003)
        expected = []
        with dp.gradient_noise_scale(model, every=1) as g:
            for step in range(3):
                x, y = (part(tensor, comm) for tensor in batch(step))
                each = of_all_ranks(comm, gradient(alone, x, y))
                small, big = each.square().sum(1).mean().item(), each.mean(0).square().sum().item()
                expected.append(by_the_paper(small, big, ROWS / 2, ROWS))
                model.zero_grad()
                torch.nn.functional.mse_loss(model(x), y).backward()
        assert g.value == pytest.approx(ratio_of_sums(expected), rel=1e-9)

    on_devices(body, 2, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("schedule", ("bucketed", "sequential", *ACROSS))
def test_overlap_under_every_schedule(backend, schedule):
    on_devices(measured, 2, schedule, backend=backend)


def test_the_noise_scale_over_a_group_of_torch():
    """That of the same gradients over a communicator."""

    def body():
        model = dp.DataParallel(Small(), comm=dp.TorchCommunicator(dist.group.WORLD))
        with dp.gradient_noise_scale(model, every=1) as g:
            for step in range(3):
                x, y = (tensor.chunk(2)[dist.get_rank()] for tensor in batch(step))
                model.zero_grad()
                torch.nn.functional.mse_loss(model(x), y).backward()
        return g.value

    def over_a_communicator(comm):
        model = dp.DataParallel(Small(), comm=comm)
        with dp.gradient_noise_scale(model, every=1) as g:
            for step in range(3):
                x, y = (part(tensor, comm) for tensor in batch(step))
                model.zero_grad()
                torch.nn.functional.mse_loss(model(x), y).backward()
        return g.value

    first, second = in_group(body, 2, device="nccl")
    assert first == second == pytest.approx(on_devices(over_a_communicator, 2)[0], rel=1e-9)
