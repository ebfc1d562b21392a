"""Schedules that go on under the next forward, in the simulator: against the model of
``reference/across_steps_time.py``, in cases that can be counted, and with mistakes."""

import random

import pytest

import dpcore
from dpcore.base.link import Speed
from dpcore.errors import Error
from dpcore.reference import across_steps_time
from dpcore.tools.simulate import Gradients, Processors, predict
from tests.across_steps.own_schedules import OWN
from tests.data_parallel.own_schedules import WaitsAtForward, WaitsAtTheOptimizer

GBIT = Speed(bytes_per_second=1.25e8)
UNIT = 0.01  # seconds of the model's unit of time


def chain(forward, backward, network, update=0.0):
    """A layer for each entry, on two ranks: an all-reduce of n bytes takes n / bandwidth."""
    layers = range(len(forward))
    ready = [UNIT * sum(backward[layer:]) for layer in layers]
    begins = [UNIT * sum(forward[:layer]) for layer in layers]
    sizes = [round(takes * UNIT * GBIT.bytes_per_second) for takes in network]
    return Gradients(
        sizes, [0] * len(layers), [UNIT * sum(forward)], [UNIT * sum(backward)], [ready],
        modules=[[layer] for layer in layers], begins=[begins], update=[UNIT * update],
    ).on(2)  # fmt: skip


def units(work, schedule):
    """Of a step; each layer is a bucket."""
    return predict(work, GBIT, schedule, 0).step_ms / 1e3 / UNIT


@pytest.mark.parametrize("seed", range(5))
def test_steps_take_what_the_model_says(seed):
    """Its network carries a phase to the end, this one the most urgent segment: so priority is
    faster, by at most one phase. Under zero2 the urgent ones overtake those that backward waits
    for, which the model leaves out."""
    of = random.Random(seed)
    count = of.choice([4, 8, 16])
    forward = [of.uniform(0.5, 1.5) for _ in range(count)]
    times = {
        "forward": forward,
        "backward": [2 * takes for takes in forward],
        "network": [of.choice([1, 2, 4, 6]) * of.uniform(0.7, 1.3) for _ in range(count)],
    }
    work = chain(**times)
    expected = {name: across_steps_time.step_time(name, **times) for name in ("plain", *NAMES)}
    for name in ("dear", "zero1"):
        assert units(work, name) == pytest.approx(expected[name], rel=0.005)
    assert units(work, "bucketed") == pytest.approx(expected["plain"], rel=0.005)
    assert units(work, "zero2") == pytest.approx(expected["zero2"], rel=0.03)
    phase = max(times["network"])
    assert expected["priority"] - phase <= units(work, "priority") <= expected["priority"] * 1.005


def test_each_call_of_the_optimizer_but_one_costs_its_time():
    """Under zero1 each bucket is updated by itself; the network is fast, so nothing hides it."""
    work = chain([1] * 4, [1] * 4, [0.01] * 4, update=1.0)
    free, costly = (
        predict(work, GBIT, "zero1", 0, processors=Processors(update_call=each)).step_ms
        for each in (0.0, 1e-3)
    )
    assert costly == pytest.approx(free + 3, abs=0.1)
    within = predict(work, GBIT, "bucketed", 0, processors=Processors(update_call=1e-3)).step_ms
    assert within == pytest.approx(predict(work, GBIT, "bucketed", 0).step_ms, rel=1e-3)


NAMES = ("priority", "dear", "zero1", "zero2")


def test_a_chain_that_can_be_counted():
    """Four layers: forward 1, backward 2, the network 3 each, so 12 a step. Plain: from the first
    gradient at 4 + 2 on, 12. dear and zero1: the second halves, 6, end with the last layer's, which
    takes 1 more; the halves of backward end 1.5 after it."""
    work = chain([1] * 4, [2] * 4, [3] * 4)
    assert units(work, "bucketed") == pytest.approx(18, rel=0.005)
    assert units(work, "dear") == pytest.approx(16.5, rel=0.005)
    assert units(work, "zero1") == pytest.approx(16.5, rel=0.005)


def test_nothing_is_exposed_where_forward_and_backward_hide_all():
    work = chain([4] * 6, [4] * 6, [0.5] * 6)
    for name in NAMES[:3]:
        predicted = predict(work, GBIT, name, 0)
        # The last gradient of backward is the first that is needed, and takes 5 ms.
        assert all(what.endswith("of bucket 5") for what in predicted.waits)
        assert predicted.step_ms == pytest.approx(480 + predicted.exposed_ms, abs=0.01)
        assert predicted.exposed_ms <= 5.1


@pytest.mark.parametrize(("name", "share"), [("priority", 1), ("dear", 1), ("zero1", 0.5)])
def test_the_optimizer_steps_all_or_its_part(name, share):
    work = chain([1] * 4, [2] * 4, [1e-6] * 4, update=4)
    assert units(work, name) == pytest.approx(12 + 4 * share, rel=0.001)
    assert units(work, "bucketed") == pytest.approx(16, rel=0.001)
    assert units(work, "oracle") == pytest.approx(16, rel=0.001)


def test_waits_have_names():
    work = chain([1] * 8, [1] * 8, [3] * 8)
    waits = predict(work, GBIT, "zero1", 0).waits
    assert {what.split(":")[0] for what in waits} == {"forward", "optimizer"}
    assert "optimizer: reduce_scatter of bucket 7" in waits
    assert "forward: all_gather of bucket 7" in waits
    in_backward = predict(work, GBIT, "zero2", 0).waits
    assert any(what.startswith("backward: reduce_scatter of bucket ") for what in in_backward)
    assert set(predict(work, GBIT, "bucketed", 1e6).waits) == {
        "end of backward: all_reduce of bucket 0"
    }


def test_forward_goes_as_backward_where_nothing_is_known():
    """Backward spends 3 on the last layer and 1 on the first; so forward begins with 1 of 4."""
    work = Gradients([4, 8], [0, 0], [0.08], [0.4], [[0.4, 0.3]])
    assert work.modules == [[0], [1]]
    assert work.begins == [pytest.approx([0, 0.02])]
    assert work.on(2).begins == [pytest.approx([0, 0.02])] * 2


@pytest.mark.parametrize("own", OWN)
def test_own_schedules_run(own):
    """They send when something waits, so backward hides nothing: 12 and 12, of which forward hides
    at most 3."""
    work = chain([1] * 4, [2] * 4, [3] * 4)
    assert 21 <= units(work, own) <= 24.1


def test_buckets_may_be_in_flight_until_the_optimizer():
    work = chain([1] * 4, [2] * 4, [3] * 4)
    assert units(work, WaitsAtTheOptimizer) == pytest.approx(12 + 12, rel=0.01)


class Own(dpcore.LaunchSchedule):
    def phases(self):
        return ["reduce_scatter", "update", "all_gather"]

    def bucket_ready(self, control, bucket):
        control.launch(bucket)

    def optimizer_step(self, control):
        for bucket in range(control.buckets):
            control.wait(bucket)
            control.update(bucket)
            control.launch(bucket)


class UpdatesTooEarly(Own):
    def optimizer_step(self, control):
        control.update(0)


class LaunchesTheUpdate(Own):
    def optimizer_step(self, control):
        control.wait(0)
        control.launch(0)


class GathersNothing(Own):
    def optimizer_step(self, control):
        control.wait(0)
        control.update(0)


class JoinsHalves(Own):
    def backward_end(self, control):
        control.launch([0, 1])

    def bucket_ready(self, control, bucket):
        pass


class GathersUnderForward(Own):
    def phases(self):
        return ["reduce_scatter", "all_gather", "update"]

    def forward_begin(self, control, module):
        control.wait(0)
        control.launch(0)

    def optimizer_step(self, control):
        pass


class UpdatesWithoutPhase(dpcore.LaunchSchedule):
    def bucket_ready(self, control, bucket):
        control.launch(bucket)
        control.update(bucket)


class SkipsThoughExact(dpcore.LaunchSchedule):
    def backward_end(self, control):
        control.skip(0)


class OneTooMany(dpcore.LaunchSchedule):
    def backward_end(self, control):
        control.launch(control.buckets)


class OnOneRank(dpcore.LaunchSchedule):
    """The other rank has a bucket less to send, by its own account."""

    def is_exact(self):
        return False

    def backward_end(self, control):
        for bucket in range(control.buckets):
            if bucket == 3 and control.rank == 1:
                control.skip(bucket)
            else:
                control.launch(bucket)


@pytest.mark.parametrize(
    ("schedule", "message"),
    (
        (UpdatesTooEarly, "updates bucket 0 before its reduce_scatter is over; wait for the"),
        (LaunchesTheUpdate, r"bucket 0, whose next phase is update: call control\.update\(\)"),
        (GathersNothing, "has not launched all_gather of bucket 0|bucket 1 by the end of opt"),
        (JoinsHalves, r"launches \[0, 1\] as one; in its phases each bucket is scattered by"),
        (GathersUnderForward, "bucket 0 in forward_begin, where ranks may differ in the modules"),
        (UpdatesWithoutPhase, "calls update.., though its phases have no update"),
        (SkipsThoughExact, r"skips bucket 0, .* though its is_exact\(\) says"),
        (OneTooMany, r"no bucket 4: control\.buckets is 4, and they are numbered from 0"),
        (WaitsAtForward, "leaves buckets in flight at the end of backward and waits for them in f"),
        (OnOneRank, "rank 0 of the simulation waits for ever: end of backward: all_reduce of buc"),
    ),
)
def test_mistakes_are_told_as_in_a_run(schedule, message):
    with pytest.raises(Error, match=message):
        predict(chain([1] * 4, [2] * 4, [3] * 4), GBIT, schedule, 0)
