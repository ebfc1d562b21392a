"""Local updates, communication hooks and stragglers in the simulator."""

import math
from dataclasses import replace

import pytest

from dpcore.base.link import Speed
from dpcore.errors import Unsupported
from dpcore.tools.simulate import Gradients, Hook, LocalUpdates, Stragglers, predict
from tests.data_parallel.own_schedules import WaitsAtTheOptimizer
from tests.simulate.test_own_schedules import AsOne, Bucketed

GBIT = Speed(bytes_per_second=1.25e8)


def work(update=0.01):
    """20 + 80 + 10 ms of computing; all bytes take a link of 1 Gbit/s 80 ms on two ranks."""
    ready = [0.01 * (i + 1) for i in range(8)]
    return Gradients(
        [1_250_000] * 8, [0] * 8, [0.02], [0.08], [ready], update=[update]
    ).on(2)  # fmt: skip


# ---- local updates -------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 4, 16])
def test_local_steps_share_one_average(every):
    predicted = predict(work(), GBIT, LocalUpdates(every))
    assert predicted.step_ms == pytest.approx(110 + 80 / every, rel=0.005)
    assert predicted.exposed_ms == pytest.approx(80 / every, rel=0.01)
    assert set(predicted.waits) == {"optimizer: mean of the parameters"}
    assert predicted.bound_ms == pytest.approx(110)  # the optimizer included


def test_fragments_travel_while_steps_are_computed():
    """Each of 4 takes 20 ms; the delay of a step hides it, but not the outer optimizer."""
    at_once = predict(work(), GBIT, LocalUpdates(8, fragments=4))
    assert at_once.step_ms == pytest.approx(110 + 80 / 8, rel=0.005)
    late = predict(work(), GBIT, LocalUpdates(8, fragments=4, delay=1, outer=0.04))
    assert late.step_ms == pytest.approx(110 + 40 / 8, rel=0.005)
    assert late.exposed_ms == 0


@pytest.mark.parametrize(("world", "share"), [(2, 1 / 4), (4, 1 / 2)])
def test_blocks_of_int8_are_gathered(world, share):
    whole = predict(work().on(world), GBIT, LocalUpdates(4)).exposed_ms
    packed = predict(work().on(world), GBIT, LocalUpdates(4, bits=8)).exposed_ms
    assert packed == pytest.approx(share * whole, rel=0.02)


@pytest.mark.parametrize(
    "wrong", [{"fragments": 5}, {"fragments": 0}, {"delay": 4}, {"bits": 16}, {"sync_every": 0}]
)
def test_local_updates_are_those_that_there_are(wrong):
    with pytest.raises(Unsupported, match=r"^local updates with sync_every=\d, fragments="):
        LocalUpdates(**{"sync_every": 4, **wrong})
    with pytest.raises(Unsupported, match="hooks are for gradients"):
        predict(work(), GBIT, LocalUpdates(4), hook=Hook())


# ---- hooks ---------------------------------------------------------------------------------------


def test_compression_halves_the_bytes_and_costs_time():
    half = predict(work(0), GBIT, "sequential", hook=Hook(share=0.5))
    assert half.step_ms == pytest.approx(100 + 40, rel=0.01)
    slow = Speed(1.25e7)
    assert predict(work(0), slow, "flat", hook=Hook(share=0.5)).bound_ms == pytest.approx(30 + 400)
    costs = Hook(share=0.5, before=1e-9, after=2e-9)  # 10 MB: 10 ms, and 20 ms
    assert predict(work(0), GBIT, "flat", hook=costs).step_ms == pytest.approx(170, rel=0.01)
    # Under backward each bucket delays the next gradient; the last 5 ms of the link are hidden by
    # what is done with the others.
    assert predict(work(0), GBIT, "per_parameter", hook=costs).step_ms == pytest.approx(
        130, rel=0.01
    )


def test_a_hook_gets_each_bucket_by_itself_and_its_result_in_a_wait():
    assert predict(work(0), GBIT, AsOne, 0, hook=Hook()).waits.keys() == {
        f"end of backward: all_reduce of bucket {n}" for n in range(8)
    }
    assert predict(work(0), GBIT, Bucketed, 0, hook=Hook()) == replace(
        predict(work(0), GBIT, Bucketed, 0), waits=predict(work(0), GBIT, Bucketed, 0).waits
    )
    late = predict(work(0), GBIT, WaitsAtTheOptimizer, 0, hook=Hook())
    assert all(what.startswith("end of backward") for what in late.waits)
    with pytest.raises(Unsupported, match="'zero1' does not work with communication hooks"):
        predict(work(), GBIT, "zero1", hook=Hook())


# ---- stragglers ----------------------------------------------------------------------------------


def test_all_wait_for_a_slow_rank():
    slow = predict(work(0), GBIT, "per_parameter", stragglers=Stragglers((1, 1.5)))
    assert slow.step_ms == pytest.approx(150 + 10, rel=0.01)
    assert predict(work(0), GBIT, "oracle", stragglers=Stragglers((1, 1.5))).step_ms == 150
    across = predict(work(), GBIT, "zero1", 0, stragglers=Stragglers((2,)))
    assert across.step_ms >= 2 * 100 + 2 * 10 / 2


def test_random_ones_cost_what_the_slowest_of_each_step_takes():
    """With an exponential delay of mean m on each of N ranks, the slowest is late by m (1 + 1/2 +
    ... + 1/N) in the mean."""
    one = Gradients([1000], [0], [0.02], [0.08], [[0.08]])
    mean = {}
    for world in (1, 4):
        taken = [
            predict(
                one.on(world), Speed(1e13), "sequential",
                stragglers=Stragglers(exponential=0.2, seed=seed),
            ).step_ms
            for seed in range(12)
        ]  # fmt: skip
        mean[world] = sum(taken) / len(taken)
        error = 5 * 20 * math.sqrt(2) / math.sqrt(12 * 15)
        expected = 100 + 20 * sum(1 / n for n in range(1, world + 1))
        assert mean[world] == pytest.approx(expected, abs=error)
    assert mean[4] > mean[1] + 10


def test_the_same_seed_gives_the_same_steps():
    def of(seed):
        return predict(work(), GBIT, stragglers=Stragglers(normal=0.1, seed=seed))

    assert of(1) == of(1)
    assert of(1) != of(2)


def test_recorded_steps_are_drawn():
    late = replace(work(0), forward=[0.12] * 2)  # a step of 200 ms instead of 100
    recorded = replace(work(0), spread=(work(0), late))
    taken = predict(recorded, Speed(1e13), "oracle", stragglers=Stragglers(recorded=True)).step_ms
    assert 100 < taken < 200
    for wrong in (Stragglers(recorded=True), Stragglers(()), Stragglers(normal=-1)):
        with pytest.raises(Unsupported, match=r"several steps|numbers from 0 on"):
            predict(work(), GBIT, stragglers=wrong)
