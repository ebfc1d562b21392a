"""What a model that is wrapped without arguments chooses in its first steps, and that no choice
changes a bit."""

import hashlib
import sys
from types import SimpleNamespace

import cloudpickle
import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

import dpcore
from dpcore.comm.launch.spawn import run_processes
from dpcore.ddp.wrapper import rebuilding
from dpcore.ddp.wrapper.first_steps import FIRST, SECOND, FirstSteps, Trial, any_layout_adds_alike
from tests.data_parallel.models import (
    OPTIMIZERS,
    assert_same_values,
    part,
    seeded,
    train,
    train_alone,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])

MIB = 1 << 20
LONG = 30  # steps, after which every model is settled


# ---- the trial, with times that the test makes up ----------------------------------------------


class Ranks:
    """Stands for a model: its backward takes what ``seconds`` says of the schedule."""

    def __init__(self, seconds):
        self._seconds, self.tried = seconds, []
        self._reducer = SimpleNamespace(completed=1, backward_ns=0, use_schedule=self.tried.append)
        self._model_group = SimpleNamespace(all_reduce=lambda *_, **__: None)
        self._first_steps = SimpleNamespace(why={}, cut=None)
        self._graphs = SimpleNamespace(count=0)

    def run(self, trial):
        """How many steps it takes."""
        for step in range(100):
            if not trial.before_forward(self):
                return step
            now = self.tried[-1] if self.tried else FIRST
            self._reducer.completed += 1
            self._reducer.backward_ns = int(self._seconds(now, step) * 1e9)
        raise AssertionError("it never ends")


@pytest.mark.parametrize(("slower", "wins"), ((FIRST, SECOND), (SECOND, FIRST)))
def test_the_shorter_backward_wins_in_a_few_steps(slower, wins):
    ranks = Ranks(lambda schedule, _: 1.1 if schedule == slower else 1.0)
    assert ranks.run(Trial()) == 8
    assert ranks.tried[-1] == wins
    assert ranks._first_steps.why["schedule"].startswith(f"{wins}; in 8 steps")


def test_both_schedules_take_the_same_turns():
    ranks = Ranks(lambda *_: 1.0)
    ranks.run(Trial())
    trials = ranks.tried[:-1]
    assert trials[:4] == [FIRST, SECOND, SECOND, FIRST]
    assert trials.count(FIRST) == trials.count(SECOND)


def test_a_disturbed_step_does_not_decide():
    def seconds(schedule, step):
        disturbed = 5.0 if step == 2 else 0.0
        return disturbed + (1.0 if schedule == SECOND else 1.02)

    ranks = Ranks(seconds)
    assert ranks.run(Trial()) == 16
    assert ranks.tried[-1] == SECOND


def test_rounds_in_which_a_graph_was_compiled_do_not_count():
    """Here a graph is compiled in the second round, and before the first, which does not matter."""
    ranks = Ranks(lambda schedule, step: 1.0 if (schedule == SECOND) == (step > 10) else 2.0)
    ranks._graphs.count = 3

    def compiles_in_the_eighth_step(longest, *_, **__):
        if ranks._reducer.completed == 9:
            ranks._graphs.count += 1
            longest[-1] = 1

    ranks._model_group.all_reduce = compiles_in_the_eighth_step
    assert ranks.run(Trial()) > 8
    assert ranks.tried[-1] == SECOND


# ---- real ranks --------------------------------------------------------------------------------


def deep(width=96):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(8)))


def trained(comm, steps=LONG, **options):
    model = dpcore.DataParallel(seeded(deep), comm=comm, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        x = torch.randn(6, 96, generator=torch.Generator().manual_seed(100 * step + comm.rank))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model


def digest(model):
    hasher = hashlib.sha256()
    for value in model.module.state_dict().values():
        hasher.update(value.numpy().tobytes())
    return hasher.hexdigest()


@pytest.mark.parametrize("world", (2, 3))
def test_ranks_choose_alike_and_train_as_one_process(world):
    def body(comm):
        model = train(comm, OPTIMIZERS["momentum"], steps=LONG)
        assert_same_values(model.module, train_alone(OPTIMIZERS["momentum"], steps=LONG))
        assert model._first_steps.is_settled
        return model.schedule, model.bucket_bytes_cap, model.stats()["chosen"]

    chosen = dpcore.spawn(body, world, mode="threads")
    assert all(one == chosen[0] for one in chosen)
    schedule, _, why = chosen[0]
    assert schedule in (FIRST, SECOND) and why["schedule"].startswith(schedule)


def test_the_report_says_what_was_chosen():
    def body(comm):
        model = trained(comm)
        return str(model.bucket_report()), model.stats()["chosen"]

    (report, why), _ = dpcore.spawn(body, 2, mode="threads")
    assert f"buckets chosen: {why['buckets']}" in report
    assert f"schedule chosen: {why['schedule']}" in report


@pytest.mark.parametrize("link", (None, "1gbit,50us"))
@pytest.mark.parametrize("world", (3, 4))
def test_no_size_of_buckets_changes_a_bit(world, link, monkeypatch):
    monkeypatch.setattr("dpcore.ddp.wrapper.first_steps.cut_for_the_end", lambda _: None)

    def digests(cap):
        monkeypatch.setattr(rebuilding, "best_caps", lambda *_: [cap])

        def body(comm):
            model = trained(comm)
            return digest(model), len(model.bucket_report())

        found = dpcore.spawn(body, world, mode="threads", link=link)
        assert len(set(found)) == 1
        return found[0]

    small, many = digests(MIB // 16)
    large, few = digests(100 * MIB)
    assert many > few
    assert small == large


@pytest.mark.parametrize(("share", "is_one"), ((1e-3, True), (1e-9, False)))
def test_buckets_that_leave_after_backward_are_large_if_that_saves_something(
    share, is_one, monkeypatch
):
    """Backward takes some milliseconds here."""
    speed = rebuilding.Speed(latency=share, share=share, bandwidth=1e8)
    monkeypatch.setattr(rebuilding, "measured_speed", lambda *_: speed)
    monkeypatch.setattr(rebuilding, "best_caps", lambda *_: [MIB // 16])
    monkeypatch.setattr("dpcore.ddp.wrapper.first_steps.median_ratio", lambda _: 0.9)

    def body(comm):
        model = trained(comm)
        return model.schedule, len(model.bucket_report()), digest(model), model.stats()["chosen"]

    of_ranks = dpcore.spawn(body, 2, mode="threads")
    assert of_ranks[0] == of_ranks[1]
    schedule, found, bits, why = of_ranks[0]
    assert (schedule, found == 1) == (SECOND, is_one)
    assert (why["buckets"] == rebuilding.AT_THE_END) == is_one
    monkeypatch.setattr("dpcore.ddp.wrapper.first_steps.median_ratio", lambda _: 1.1)
    assert dpcore.spawn(body, 2, mode="threads")[0][2] == bits


@pytest.mark.parametrize(
    ("in_vain", "rebuilt_before"), ((0, 1), (1, 1), (3, 2), (8, 3), (9, 3)), ids=str
)
def test_implausible_measurements_are_repeated_and_all_ranks_choose_alike(
    in_vain, rebuilt_before, monkeypatch
):
    """The first measurements of rank 1 find that a small operation takes longer than a large one.
    Three are made before each of three forwards."""
    measured = []

    def seconds_of(group, tensors):
        if tensors[0].numel() > 1:
            return 1e-2
        if len(tensors) > 1:
            return 2e-4
        if group.rank == 1:
            measured.append(tensors)
        return 1.0 if group.rank == 1 and len(measured) <= in_vain else 1e-4

    monkeypatch.setattr(rebuilding, "_seconds_of", seconds_of)

    def body(comm):
        model = dpcore.DataParallel(deep(), comm=comm, schedule="bucketed")
        rebuilt = []
        for _ in range(5):
            model(torch.ones(6, 96)).sum().backward()
            rebuilt.append(model.bucket_report().rebuilt)
        return rebuilt.index(True), model._caps, model.stats()["chosen"]["buckets"]

    first, second = dpcore.spawn(body, 2, mode="threads")
    assert first == second
    at, _, why = first
    assert at == rebuilt_before
    if in_vain == 9:
        assert "as without measuring: in 3 steps, small operations took longer" in why
    else:
        assert "take 100 us, one of many 14.3 us, and bytes 30.1 MB/s" in why


def test_a_communication_hook_keeps_the_buckets_of_the_second_step(monkeypatch):
    speed = rebuilding.Speed(latency=1e-3, share=1e-3, bandwidth=1e8)
    monkeypatch.setattr(rebuilding, "measured_speed", lambda *_: speed)
    monkeypatch.setattr(rebuilding, "best_caps", lambda *_: [MIB // 16])
    monkeypatch.setattr("dpcore.ddp.wrapper.first_steps.median_ratio", lambda _: 0.9)

    def body(comm):
        model = dpcore.DataParallel(deep(), comm=comm)
        state = PowerSGDState(model.process_group, start_powerSGD_iter=3)
        model.register_comm_hook(state, powerSGD_hook)
        counts = []
        for _ in range(LONG):
            model.zero_grad()
            model(torch.randn(6, 96)).square().mean().backward()
            counts.append(len(model.bucket_report()))
        return model.schedule, model._first_steps.is_settled, counts[1] > 1, {*counts[1:]}

    (schedule, is_settled, has_several, counts), _ = dpcore.spawn(body, 2, mode="threads")
    assert (schedule, is_settled, has_several, len(counts)) == (SECOND, True, True, 1)


def test_who_names_sequential_and_no_cap_gets_large_buckets():
    def body(comm):
        model = trained(comm, steps=3, schedule=SECOND)
        return len(model.bucket_report()), model.stats()["chosen"]

    assert dpcore.spawn(body, 2, mode="threads")[0] == (1, {"buckets": rebuilding.AT_THE_END})


def test_a_model_on_processes_has_the_same_bits_in_every_run():
    def body(comm):
        return digest(trained(comm))

    assert len({*dpcore.spawn(body, 3), *dpcore.spawn(body, 3)}) == 1


def test_who_names_a_schedule_or_a_cap_gets_it_from_the_first_step_on():
    def body(comm):
        named = trained(comm, schedule=SECOND, bucket_cap_mb=0.05)
        caps = named.bucket_bytes_cap
        return named.schedule, caps, named.stats()["chosen"], named._reducer.has_rebuilt

    assert dpcore.spawn(body, 2, mode="threads")[0] == (SECOND, int(0.05 * MIB), {}, True)


class TwoSizes(dpcore.LaunchSchedule):
    def caps(self, wanted):
        return [MIB // 16, MIB // 8]

    def bucket_ready(self, control, bucket):
        control.launch(bucket)


@pytest.mark.parametrize("schedule", ("flat", "per_parameter", TwoSizes()))
@pytest.mark.parametrize("asked", ({}, {"bucket_cap_mb": "auto"}))
def test_a_schedule_with_sizes_of_its_own_measures_none(schedule, asked):
    def body(comm):
        model = trained(comm, steps=3, schedule=schedule, **asked)
        return model.stats()["chosen"], model._reducer.has_rebuilt

    assert dpcore.spawn(body, 2, mode="threads") == [({}, True)] * 2


def test_a_rank_without_inputs_takes_part_in_the_choice():
    def body(comm):
        model = dpcore.DataParallel(deep(), comm=comm)
        with model.join():
            for step in range(3 if comm.rank == 0 else LONG):
                x = torch.randn(6, 96, generator=torch.Generator().manual_seed(step))
                model(x).square().mean().backward()
        return model.schedule, model._first_steps.why

    first, second = dpcore.spawn(body, 2, mode="threads")
    assert first == second and "schedule" in first[1]


def test_evaluation_and_no_sync_do_not_count():
    def body(comm):
        model = dpcore.DataParallel(deep(), comm=comm)
        x = part(torch.randn(6, 96), comm)
        for _ in range(LONG):
            with torch.no_grad():
                model(x)
            with model.no_sync():
                model(x).sum().backward()
            model(x)  # its backward never comes
            model(x).sum().backward()
        return model._first_steps.is_settled, model.schedule

    first, second = dpcore.spawn(body, 2, mode="threads")
    assert first == second and first[0]


# ---- where nothing is measured -----------------------------------------------------------------


def test_a_communicator_with_an_algorithm_of_its_own_keeps_it():
    def body(comm):
        steps = FirstSteps(comm, "default", "auto")
        return steps.chooses_caps, steps.adds_in_order, trained(comm, steps=2)._caps

    of_rank = dpcore.spawn(body, 2, mode="threads", algorithm="ring")
    assert of_rank[0] == (False, False, [MIB, 25 * MIB])


def test_one_rank_measures_nothing():
    def body(comm):
        model = trained(comm, steps=3)
        return model.schedule, "schedule" in model.stats()["chosen"]

    assert dpcore.spawn(body, 1, mode="threads") == [(FIRST, False)]


@pytest.mark.parametrize(
    ("hosts", "alike"), (("0,0,0,0", True), ("0,1,2,3", True), ("0,0,1,1", False))
)
def test_ranks_that_share_a_card_keep_the_algorithm_that_spares_it(hosts, alike):
    def body(comm):
        return any_layout_adds_alike(comm)

    outcomes = run_processes(
        body,
        4,
        (),
        environment={"DPCORE_PRETEND_HOSTS": hosts, "XDG_CACHE_HOME": "/nonexistent"},
        options={"transport": "shm+tcp"},
    )
    assert [outcome.error or outcome.result for outcome in outcomes] == [alike] * 4
