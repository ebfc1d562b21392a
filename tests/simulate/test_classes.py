"""One rank that stands for all takes what every rank takes, and thousands of ranks no time."""

import random
import time

import pytest

from dpcore import reference
from dpcore.base.link import Speed
from dpcore.errors import Unsupported
from dpcore.tools.simulate import Gradients, Network, NetworkOperation, predict
from dpcore.tools.simulate.classes import RepresentativeNetwork
from dpcore.tools.simulate.processors import Processors
from dpcore.tools.simulate.shapes import SHAPES, shape_of

KIB, MIB = 1 << 10, 1 << 20
BUSY = Processors(operation=20e-6, message=3e-6, copied_byte=1e-10, reduced_byte=2e-10, wake=8e-6)
ANY_WORLD, POWERS = (9, 12, 16, 64), (16, 32, 64)
WORLDS = {
    "ring": ANY_WORLD,
    "two_shot": ANY_WORLD,
    "one_shot": (9, 16),
    "recursive_doubling": POWERS,
    "halving_doubling": POWERS,
}


def seconds_of(network, operations):
    """When each is through; of (bytes, moment of the launch, priority)."""
    made = [
        NetworkOperation(nbytes, [moment] * network.ranks, priority)
        for nbytes, moment, priority in operations
    ]
    network.run(made)
    return [max(operation.finished) for operation in made]


def both(world, link, algorithm, operations, processors=Processors.free()):  # noqa: B008
    every = seconds_of(Network(world, link, algorithm, processors), operations)
    one = seconds_of(RepresentativeNetwork(world, link, algorithm, processors), operations)
    return every, one


@pytest.mark.parametrize("key", SHAPES, ids="-".join)
@pytest.mark.parametrize("world", [2, 3, 5, 8, 16])
def test_rounds_are_those_of_the_moves(key, world):
    """As many messages leave rank 0 in each step as the algorithm says."""
    collective, algorithm = key
    shape = shape_of(collective, algorithm, world)
    if shape is None:
        assert world & (world - 1)
        return
    plan = reference.make_schedule(algorithm, collective, world)
    sent = [0] * (1 + max(move.step for move in plan.moves))
    for move in plan.moves:
        sent[move.step] += move.src == 0
    assert [each.messages for each in shape.rounds for _ in range(each.times)] == sent
    assert shape.chunks == plan.chunks


@pytest.mark.parametrize("algorithm", WORLDS)
@pytest.mark.parametrize("gbit", [0.1, 10])
def test_an_operation_takes_what_it_takes_on_every_rank(algorithm, gbit):
    """1 us to 1 ms, 4 KiB to as many MiB as are simulated soon on every rank; 100 MiB on 9."""
    of = random.Random(algorithm + str(gbit))
    for world in WORLDS[algorithm]:
        for latency in (1e-6, 50e-6, 1e-3):
            nbytes = of.choice([4 * KIB, 300 * KIB, MIB if world > 12 else 8 * MIB])
            link = Speed(gbit * 1.25e8, latency)
            every, one = both(world, link, algorithm, [(nbytes, 0.0, 0)])
            within = 0.02 if algorithm == "halving_doubling" else 0.01
            assert one == pytest.approx(every, rel=within), (world, link, nbytes)


def test_so_does_one_of_100_mib():
    every, one = both(9, Speed(1.25e9, 50e-6), "two_shot", [(100 * MIB, 0.0, 0)])
    assert one == pytest.approx(every, rel=1e-3)


def check(every, one):
    """All are through after the same time; each by itself may change places with a few messages of
    another one."""
    assert max(one) == pytest.approx(max(every), rel=0.01)
    assert one == pytest.approx(every, abs=0.02 * max(every))


def drawn(of, algorithm):
    """A world, a link and some operations that share it."""
    world = of.choice(WORLDS[algorithm])
    link = Speed(10 ** of.uniform(8, 11) / 8, 10 ** of.uniform(-6, -3))
    most = MIB if world > 16 or algorithm == "one_shot" else 8 * MIB
    sizes = [min(most, int(10 ** of.uniform(3.6, 7))) for _ in range(of.choice([2, 3, 5]))]
    span = 16 * sum(sizes) / link.bytes_per_second / 8
    return world, link, [
        (nbytes, of.uniform(0, span), of.choice([0, number])) for number, nbytes in enumerate(sizes)
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("algorithm", ["ring", "two_shot", "one_shot", "recursive_doubling"])
def test_operations_overtake_each_other_as_on_every_rank(algorithm, seed):
    world, link, operations = drawn(random.Random(f"{algorithm}{seed}"), algorithm)
    every, one = both(world, link, algorithm, operations)
    check(every, one)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("algorithm", ["ring", "two_shot", "recursive_doubling"])
def test_processors_are_as_busy_as_on_every_rank(algorithm, seed):
    world, link, operations = drawn(random.Random(f"busy {algorithm}{seed}"), algorithm)
    every, one = both(world, link, algorithm, operations, BUSY)
    assert max(one) == pytest.approx(max(every), rel=0.03)


def test_what_repeats_is_passed_over_without_an_effect(monkeypatch):
    """Operations of many sizes in a ring of 512: they drift towards each other, meet, and starve
    those that are less urgent."""
    operations = [(400 * KIB + 1000 * n, n * 2e-3, n % 7) for n in range(12)]
    link = Speed(1.25e8, 50e-6)
    passed = seconds_of(RepresentativeNetwork(512, link, "ring"), operations)
    monkeypatch.setattr(
        "dpcore.tools.simulate.classes._Periods.after", lambda periods, now, *rest: now
    )
    followed = seconds_of(RepresentativeNetwork(512, link, "ring"), operations)
    assert passed == followed


@pytest.mark.parametrize("rate", [1.25e8, 1.25e10])
def test_trains_take_what_their_segments_take(rate, monkeypatch):
    """Operations of many segments, of which later ones are more urgent, and one of few."""
    operations = [(10 * MIB + 1000 * n, n * 3e-3, n % 3) for n in range(6)] + [(MIB, 0.01, 2)]
    link = Speed(rate, 50e-6)
    trains = seconds_of(RepresentativeNetwork(1024, link, "recursive_doubling"), operations)
    monkeypatch.setattr("dpcore.tools.simulate.shapes.TRAINS", 1 << 30)
    each = seconds_of(RepresentativeNetwork(1024, link, "recursive_doubling"), operations)
    assert trains != each
    assert trains == pytest.approx(each, rel=0.01)


def test_trains_take_what_they_take_on_every_rank():
    """Where the window holds all segments."""
    operations = [(4 * MIB, 0.0, 0), (4 * MIB, 0.0, 1)]
    link = Speed(1.25e9, 500e-6)
    every, one = both(16, link, "recursive_doubling", operations)
    assert one == pytest.approx(every, rel=0.01)


@pytest.mark.parametrize("algorithm", ["two_shot", "ring", "recursive_doubling"])
def test_thousands_of_ranks_take_no_time(algorithm):
    """100 buckets on 4,096 ranks. The bound is for a machine that does much else."""
    ready = [0.01 * n for n in range(1, 101)]
    work = Gradients([25 * MIB + 4 * n for n in range(100)], [0] * 100, [0.1], [1.0], [ready])
    begin = time.process_time()
    predicted = predict(work.on(4096), Speed(1.25e10, 5e-6), "per_parameter", None, algorithm)
    assert predicted.buckets == 100
    assert predicted.step_ms >= predicted.bound_ms
    assert time.process_time() - begin < 5


def check_steps(monkeypatch, decides, *asked):
    """``decides``: whether not every rank is simulated."""
    one = predict(*asked)
    monkeypatch.setattr(f"dpcore.tools.simulate.training.{decides}", lambda *_: False)
    every = predict(*asked)
    assert one.step_ms == pytest.approx(every.step_ms, rel=0.01)
    assert one.exposed_ms == pytest.approx(every.exposed_ms, rel=0.02, abs=0.05)


@pytest.mark.parametrize("schedule", ["bucketed", "sequential", "dear", "zero1", "priority"])
def test_schedules_take_what_they_take_on_every_rank(schedule, monkeypatch):
    ready = [0.002 * n for n in range(1, 13)]
    work = Gradients([MIB] * 12, [0] * 12, [0.01], [0.024], [ready]).on(12)
    link = Speed(1.25e9, 50e-6)
    check_steps(monkeypatch, "stands_for_all", work, link, schedule, 2, "ring")


def test_a_rank_that_cannot_stand_for_others_is_refused():
    for algorithm, world in (("tree", 16), ("recursive_doubling", 12)):
        network = RepresentativeNetwork(world, Speed(1.25e8), algorithm)
        with pytest.raises(Unsupported, match="one cannot stand for all"):
            seconds_of(network, [(MIB, 0.0, 0)])
