"""Laws that predictions keep from 1 to 4,096 ranks, for drawn operations and links."""

import random
from dataclasses import replace

import pytest

from dpcore.base.link import Speed
from dpcore.tools.simulate import Gradients, LocalUpdates, NetworkOperation, Stragglers, predict
from dpcore.tools.simulate.classes import RepresentativeNetwork
from dpcore.tools.simulate.training import bound_seconds

MIB = 1 << 20
WORLDS = (1, 2, 16, 256, 1024, 4096)
ALGORITHMS = ("ring", "two_shot", "recursive_doubling", "halving_doubling")
MANY = [world for world in WORLDS if world > 1]


def seconds(world, link, algorithm, *sizes):
    """Until all operations are through that begin at once."""
    operations = [NetworkOperation(nbytes, [0.0]) for nbytes in sizes]
    RepresentativeNetwork(world, link, algorithm).run(operations)
    return max(operation.finished[0] for operation in operations)


def drawn(seed):
    of = random.Random(seed)
    link = Speed(10 ** of.uniform(7, 10.1), 10 ** of.uniform(-6, -3))
    return int(10 ** of.uniform(3.6, 8)), link


def messages(algorithm, world):
    """How many latencies an operation takes, the one until all have entered included."""
    steps = world.bit_length() - 1
    return (
        1
        + {
            "ring": 2 * (world - 1),
            "two_shot": 2,
            "recursive_doubling": steps,
            "halving_doubling": 2 * steps,
        }[algorithm]
    )


def least_bytes(algorithm, world, nbytes):
    if algorithm == "recursive_doubling":
        return nbytes * (world.bit_length() - 1)
    return nbytes * 2 * (world - 1) / world


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("world", MANY)
def test_nothing_is_sooner_than_its_bytes_and_its_steps(algorithm, world):
    for seed in range(4):
        nbytes, link = drawn(seed)
        took = seconds(world, link, algorithm, nbytes)
        sending = least_bytes(algorithm, world, nbytes) / link.bytes_per_second
        assert took >= max(sending, messages(algorithm, world) * link.latency) * (1 - 1e-9)


@pytest.mark.parametrize("algorithm", ["ring", "two_shot", "recursive_doubling"])
@pytest.mark.parametrize("world", MANY)
def test_one_segment_takes_just_that(algorithm, world):
    """2 (N-1) messages of 1/N in a ring, two times N-1 in a two-shot, log N of everything."""
    for latency in (1e-6, 1e-3):
        link, nbytes = Speed(1.25e9, latency), 60_000
        expected = least_bytes(algorithm, world, nbytes) / 1.25e9
        expected += messages(algorithm, world) * latency
        assert seconds(world, link, algorithm, nbytes) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("world", MANY)
def test_faster_links_and_fewer_bytes_take_no_longer(algorithm, world):
    for seed in range(3):
        nbytes, link = drawn(seed)
        took = seconds(world, link, algorithm, nbytes)
        faster = Speed(2 * link.bytes_per_second, link.latency)
        nearer = Speed(link.bytes_per_second, link.latency / 2)
        slack = 1 + 1e-9
        assert seconds(world, faster, algorithm, nbytes) <= took * slack
        assert seconds(world, nearer, algorithm, nbytes) <= took * slack
        assert seconds(world, link, algorithm, nbytes // 2) <= took * slack


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("world", MANY)
def test_two_operations_take_what_one_of_both_takes(algorithm, world):
    """Up to the latencies of one, since their steps may be hidden behind each other."""
    for seed in range(3):
        nbytes, link = drawn(seed)
        one = seconds(world, link, algorithm, 2 * nbytes)
        two = seconds(world, link, algorithm, nbytes, nbytes)
        latencies = messages(algorithm, world) * link.latency
        assert abs(two - one) <= latencies + 0.05 * one


def work(world):
    ready = [0.002 * n for n in range(1, 21)]
    return Gradients([MIB] * 20, [0] * 20, [0.02], [0.04], [ready]).on(world)


@pytest.mark.parametrize("schedule", ["bucketed", "sequential", "dear", "zero1"])
@pytest.mark.parametrize("world", WORLDS)
def test_no_step_is_shorter_than_its_bound(schedule, world):
    if 2 <= world <= 8:
        world = 2
    for link in (Speed(1.25e8, 50e-6), Speed(1.25e9, 5e-6), Speed(1.25e10, 1e-3)):
        predicted = predict(work(world), link, schedule, 4)
        across = schedule in ("dear", "zero1")
        assert predicted.step_ms >= bound_seconds(work(world), link, across) * 1e3 * 0.999


@pytest.mark.parametrize(
    "how",
    [
        Stragglers(factors=(0.5,)),
        Stragglers(factors=(0.2, 0.7)),
        Stragglers(normal=0.5),
        Stragglers(exponential=0.1, factors=(0.3,)),
    ],
)
@pytest.mark.parametrize("schedule", ["bucketed", "sequential", "zero1", LocalUpdates(4)])
def test_no_step_is_shorter_than_its_bound_with_ranks_faster_than_recorded(schedule, how):
    costly = replace(work(1), update=[0.03]).on(2)
    for link in (Speed(1.25e8, 50e-6), Speed(1.25e10, 5e-6)):
        predicted = predict(costly, link, schedule, 4, stragglers=how)
        assert predicted.step_ms >= predicted.bound_ms * 0.999


@pytest.mark.parametrize("schedule", ["bucketed", "priority", "dear", "zero1"])
@pytest.mark.parametrize("world", [1, 2, 64])
def test_the_optimizer_is_part_of_the_bound(schedule, world):
    """Nothing hides it; under zero1 each rank steps its part."""
    costly = replace(work(1), update=[0.03]).on(world)
    alone_ms = 60 + 30 / (world if schedule == "zero1" else 1)
    fast = predict(costly, Speed(1e14, 1e-9), schedule, 4)
    assert (fast.step_ms, fast.bound_ms) == pytest.approx((alone_ms, alone_ms), rel=2e-3)
    for link in (Speed(1.25e8, 50e-6), Speed(1.25e9, 5e-6)):
        predicted = predict(costly, link, schedule, 4)
        assert predicted.step_ms >= predicted.bound_ms * 0.999
    if schedule == "bucketed" and world > 1:  # the optimizer comes after all bytes
        free = predict(work(world), Speed(1.25e8, 50e-6), schedule, 4)
        slow = predict(costly, Speed(1.25e8, 50e-6), schedule, 4)
        assert slow.bound_ms == pytest.approx(free.bound_ms + 30)


@pytest.mark.parametrize("schedule", ["bucketed", "sequential", "dear"])
def test_one_rank_waits_for_nothing(schedule):
    assert predict(work(1), Speed(1e6, 1e-3), schedule).exposed_ms == pytest.approx(0, abs=1e-3)


def test_more_ranks_take_no_less():
    """Of a world of the same kind: each sends as many bytes or more, and waits for all."""
    taken = [predict(work(world), Speed(1.25e9, 50e-6)).step_ms for world in (2, 4, 16, 64, 4096)]
    assert taken == sorted(taken)
