"""One host that stands for all takes what every rank takes, and hundreds of ranks some seconds."""

import time
from dataclasses import replace

import pytest

from dpcore import reference
from dpcore.base.link import Speed
from dpcore.errors import Unsupported
from dpcore.tools.simulate import Gradients, Network, NetworkOperation, predict
from dpcore.tools.simulate.links import Links
from dpcore.tools.simulate.processors import Processors
from dpcore.tools.simulate.shapes import FOLDED, fold_of
from tests.simulate.test_classes import BUSY, KIB, MIB, check, check_steps, seconds_of

INTRA, INTER = Speed(1e9, 2e-6), Speed(1.25e8, 50e-6)


def links_of(kind, ranks_per_host):
    levels = Links.levels(INTRA, INTER, ranks_per_host)
    return {
        "levels": levels,
        "memory": replace(levels, intra=Speed()),
        "oversubscribed": replace(levels, oversubscribed=4.0),
        "tcp": replace(Links.tcp(INTER), intra=INTRA, ranks_per_host=ranks_per_host),
    }[kind]


@pytest.mark.parametrize(("collective", "algorithm"), FOLDED)
@pytest.mark.parametrize(("hosts", "own"), [(4, 2), (2, 4), (3, 3), (16, 1)])
def test_what_a_host_sends_is_what_it_gets_from_another(collective, algorithm, hosts, own):
    """Folded, the moves that leave the first host are those that come to it."""
    world = hosts * own
    fold = fold_of(collective, algorithm, world, links_of("levels", own))
    if fold is None:
        assert world & (world - 1)
        return
    on_hosts = [rank // own for rank in range(world)]
    moves = reference.make_schedule(algorithm, collective, world, hosts=on_hosts).moves
    leaving = [each for each in moves if each.src < own]
    coming = {(each.step, *each[1:4]) for each in moves if each.dst < own}
    assert {(step, *fold(src, dst, chunk)) for step, src, dst, chunk, _ in leaving} == coming
    assert len(leaving) == len(coming)


@pytest.mark.parametrize("kind", ["levels", "memory", "oversubscribed", "tcp"])
@pytest.mark.parametrize("algorithm", ["hierarchical", "two_shot", "ring", "recursive_doubling"])
def test_operations_take_what_they_take_on_every_rank(algorithm, kind):
    operations = [(300 * KIB, 0.0, 0), (MIB, 0.001, 1), (MIB // 2, 0.004, 0)]
    for hosts, own in ((4, 2), (4, 4), (3, 3)):
        links, world = links_of(kind, own), hosts * own
        if fold_of("all_reduce", algorithm, world, links) is None:
            continue
        for processors in (Processors.free(), BUSY):
            every = seconds_of(Network(world, links, algorithm, processors), operations)
            one = seconds_of(Network(world, links, algorithm, processors, own), operations)
            check(every, one)


@pytest.mark.parametrize("schedule", ["bucketed", "dear", "priority"])
def test_schedules_take_what_they_take_on_every_rank(schedule, monkeypatch):
    ready = [0.002 * n for n in range(1, 9)]
    work = Gradients([MIB // 4] * 8, [0] * 8, [0.01], [0.016], [ready]).on(12)
    links = links_of("levels", 4)
    check_steps(monkeypatch, "one_host_stands_for_all", work, links, schedule, 1, "hierarchical")


def test_hundreds_of_ranks_take_some_seconds():
    """Every rank simulated takes a minute for 64. The bound is for a busy machine."""
    work = Gradients([25 * MIB] * 2, [0] * 2, [0.1], [1.0], [[0.5, 1.0]])
    links = Links.levels(Speed(6.25e9, 2e-6), Speed(1.25e9, 50e-6), 8)
    begin = time.process_time()
    predicted = predict(work.on(256), links, "per_parameter", None, "hierarchical")
    assert predicted.step_ms >= predicted.bound_ms
    assert time.process_time() - begin < 20


def test_hosts_that_differ_are_simulated_each():
    assert fold_of("all_reduce", "tree", 16, links_of("levels", 2)) is None
    assert fold_of("all_reduce", "hierarchical", 15, links_of("levels", 2)) is None
    assert fold_of("broadcast", "hierarchical", 16, links_of("levels", 2)) is None
    assert fold_of("all_reduce", "halving_doubling", 16, links_of("tcp", 2)) is None


@pytest.mark.parametrize("algorithm", ["two_shot", "one_shot", "recursive_doubling", "ring"])
def test_halves_take_what_they_take_on_every_rank(algorithm):
    links = links_of("levels", 2)
    for collective in ("reduce_scatter", "all_gather"):
        every, one = (
            NetworkOperation(4 * KIB, [0.0] * ranks, collective=collective) for ranks in (16, 2)
        )
        Network(16, links, algorithm).run([every])
        Network(16, links, algorithm, ranks=2).run([one])
        assert max(one.finished) == pytest.approx(max(every.finished), rel=0.01)


def test_an_algorithm_for_one_operation_in_which_hosts_differ_is_refused():
    network = Network(16, links_of("levels", 2), "ring", ranks=2)
    with pytest.raises(Unsupported, match="tree of 16 ranks: hosts do different things"):
        network.run([NetworkOperation(MIB, [0.0] * 2, algorithm="tree")])
