"""The twins in dpcore/reference: all schedules give what plain data parallel training gives, and so
does the compiled reducer with `bucketed`. A mistake of the usual kinds in a schedule is seen.
"""

import numpy as np
import pytest
import torch

import dpcore
from dpcore.reference import across_steps
from dpcore.reference.across_steps import SCHEDULES, Dear, Plain, Priority, Zero1, Zero2
from dpcore.reference.across_steps_time import step_time
from tests.across_steps.programs import CASES
from tests.across_steps.sides import OPTIMIZERS, Twin, Wrapped

WITH_TWIN = [name for name, case in CASES.items() if case.has_twin]
LATE = [name for name in SCHEDULES if name != "plain"]


def trained(name, kind, schedule, world):
    side = Twin(world, CASES[name], kind, schedule)
    CASES[name].program(side)
    return side.weights()


def assert_same(mine, others):
    assert mine.keys() == others.keys()
    for name in mine:
        torch.testing.assert_close(mine[name], others[name], rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", WITH_TWIN)
def test_twins_of_all_schedules_give_the_same(name, kind):
    for world in (1, 2, 3, 4):
        plain = trained(name, kind, "plain", world)
        for schedule in LATE:
            assert_same(trained(name, kind, schedule, world), plain)


@pytest.mark.usefixtures("one_processor")
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", WITH_TWIN)
def test_the_plain_twin_is_data_parallel(name, kind):
    def body(comm):
        side = Wrapped(comm, CASES[name], kind, "bucketed")
        CASES[name].program(side)
        return side.weights()

    for world in (1, 3):
        for weights in dpcore.spawn(body, world, mode="threads"):
            assert_same(weights, trained(name, kind, "plain", world))


def test_what_a_rank_of_zero1_keeps_is_a_part():
    side = Twin(4, CASES["plain"], "adamw", "zero1")
    CASES["plain"].program(side)
    kept = sum(layer["mean"].size for layer in side.training.states[0])
    whole = sum(p.numel() for p in side.module.parameters())
    padding = 4 * len(side.training.layers)
    assert whole / 4 <= kept <= whole / 4 + padding


def test_what_a_rank_of_zero2_keeps_of_the_gradients_is_a_part():
    """And four whole ones at most travel at a time."""
    side = Twin(3, CASES["plain"], "sgd", "zero2")
    training = side.training
    most = 0

    def launch(phase, layer, memory):
        nonlocal most
        type(training).launch(training, phase, layer, memory)
        if phase is across_steps.reduce_scatter:
            most = max(most, sum(bool(phases) for phases in training.phases))

    training.launch = launch
    side.backward(0)
    assert most == training.at_a_time == 4
    kept = [list(layer) for layer in training.gradients[2] if isinstance(layer, dict)]
    assert kept == [[2]] * (len(training.layers) - 4)


def test_where_each_schedule_waits():
    """From `step()` to the end of the next forward, in the log of rank 0."""
    logs = {}
    for name in SCHEDULES:
        side = Twin(2, CASES["plain"], "sgd", name)
        for number in range(2):
            side.backward(number)
            side.step()
        log = side.training.log
        last = side.training.layers[-1]
        begin = log.index("step()") + 1
        logs[name] = log[begin : log.index(f"forward {last}", begin) + 1]
    each = {
        "plain": ["forward {}"],
        "priority": ["wait for {}", "update {}", "forward {}"],
        "dear": ["wait for {}", "update {}", "forward {}"],
        "zero1": ["wait for {}", "forward {}"],
        "zero2": ["wait for {}", "forward {}"],
    }
    in_step = ["wait for {}", "update {}", "send all_gather {}"]
    before = {"plain": ["update {}"], "zero1": in_step, "zero2": in_step}
    lent = {f"wait for {layer}" for layer in range(4, last + 1)}  # zero2 did so in backward
    for name, log in logs.items():
        turn = range(last + 1) if name == "plain" else range(last, -1, -1)
        expected = [line.format(layer) for layer in turn for line in before.get(name, ())]
        if name == "zero2":
            expected = [line for line in expected if line not in lent]
        expected += [line.format(layer) for layer in range(last + 1) for line in each[name]]
        assert log == expected


# ---- one mistake each ------------------------------------------------------------------------


class LeavesOutAWait(Priority):
    def wait(self, layer):
        if layer != 2:
            super().wait(layer)


class GathersOneBucketLate(Zero1):
    def forward_needs(self, rank, layer):
        if layer:
            self.wait(layer - 1)


class GathersGradientsOneBucketLate(Dear):
    def forward_needs(self, rank, layer):
        if (settings := self.recorded[rank].pop(layer, None)) is not None:
            self.update(rank, layer, settings)
        self.wait(layer)


class TakesTheRateOfTheNextStep(Priority):
    """The settings themselves are recorded, and no copy of them."""

    def optimizer_step(self):
        for recorded in self.recorded:
            recorded.update({layer: self.settings[layer] for layer in self.has_gradient})


class SkipsTheLastStep(Dear):
    """Nobody looks at what is left when training is over."""

    def result(self, rank=0):
        self.recorded[rank].clear()
        return super().result(rank)


class ClipsByItsOwnPart(Zero1):
    def clip(self, norm):
        for layer in self.layers:
            self.wait(layer)
        for rank in self.ranks:
            mine = [gradient[rank] for gradient in self.gradients[rank]]
            scale = min(1.0, norm / (sum((g**2).sum() for g in mine) ** 0.5 + 1e-6))
            for gradient in self.gradients[rank]:
                gradient *= scale


class KeepsTheRowOfAnother(Zero2):
    def wait(self, layer):
        super().wait(layer)
        if isinstance(self.gradients[0][layer], dict):
            self.gradients[0][layer][0][...] = self.gradients[1][layer][1]


class UpdatesBeforeItsPartIsThere(Zero1):
    def optimizer_step(self):
        for layer in self.layers:
            for rank in self.ranks:
                self.update(rank, layer, self.settings[layer])
            self.launch(across_steps.all_gather, layer, self.weights)


class Sums(Plain):
    def gradient_ready(self, layer):
        def twice(buckets):
            across_steps.all_reduce(buckets)
            for bucket in buckets:
                bucket *= len(buckets)

        self.launch(twice, layer, self.gradients)


KILLED_BY = {
    LeavesOutAWait: "plain",
    GathersOneBucketLate: "plain",
    GathersGradientsOneBucketLate: "plain",
    TakesTheRateOfTheNextStep: "learning rates",
    SkipsTheLastStep: "plain",
    ClipsByItsOwnPart: "clipping by norm",
    KeepsTheRowOfAnother: "plain",
    UpdatesBeforeItsPartIsThere: "plain",
    Sums: "plain",
}


@pytest.mark.parametrize("mutant", KILLED_BY, ids=lambda mutant: mutant.__name__)
def test_a_mistake_is_seen(mutant, monkeypatch):
    name = KILLED_BY[mutant]
    monkeypatch.setitem(SCHEDULES, "mutant", mutant)
    mistaken = trained(name, "sgd", "mutant", 2)
    with pytest.raises(AssertionError):
        assert_same(mistaken, trained(name, "sgd", "plain", 2))


# ---- the model of time -----------------------------------------------------------------------


def test_no_schedule_beats_computing_or_the_network():
    for network in (0.5, 1, 2, 3, 5, 8):
        layers = {"forward": [1] * 5, "backward": [2] * 5, "network": [network] * 5}
        times = {name: step_time(name, **layers) for name in SCHEDULES}
        last = layers["forward"][-1] + layers["backward"][-1]
        bound = max(15, 5 * network + last)
        assert all(time >= bound - 1e-9 for time in times.values())
        assert all(times[name] <= times["plain"] for name in LATE)
    assert times["dear"] < times["plain"]


def test_memory_for_four_buckets_costs_time_where_gradients_come_in_a_burst():
    """The last layers' gradients are there at once, and the first ones compute for long."""
    layers = {"forward": [1] * 8, "backward": [8, 8, 0, 0, 0, 0, 0, 0], "network": [4] * 8}
    assert step_time("zero2", **layers) > step_time("zero1", **layers)
    steady = {"forward": [1] * 8, "backward": [2] * 8, "network": [4] * 8}
    assert step_time("zero2", **steady) == step_time("zero1", **steady)


def test_a_step_of_one_layer_hides_nothing():
    for name in SCHEDULES:
        assert step_time(name, [1], [2], [4]) == pytest.approx(7)


def test_urgent_buckets_overtake():
    """Large gradients come first, the small one that forward begins with last."""
    layers = {"forward": [6, 1, 1], "backward": [1, 1, 1], "network": [0.5, 4, 4]}
    assert step_time("priority", **layers) < step_time("plain", **layers)
    assert np.isclose(step_time("plain", **layers), 8 + 1 + 8.5)
