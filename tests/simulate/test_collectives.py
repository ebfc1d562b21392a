"""Which moves the simulator runs for each collective: those that the core would run."""

import pytest

from dpcore import _C
from dpcore.base.link import Speed
from dpcore.comm.communicators.costs import Costs
from dpcore.errors import Unsupported
from dpcore.reference import algorithms_of, make_schedule
from dpcore.tools.simulate import Links, Network, NetworkOperation
from dpcore.tools.simulate.choice import DEFAULT_COSTS, choose, price_of
from dpcore.tools.simulate.lanes import lanes_of

GBIT = Speed(1.25e8, 50e-6)
MB = 1_000_000
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
ALL = [(c, a) for c in COLLECTIVES for a in algorithms_of(c)]


def seconds_of(collective, nbytes, world, algorithm="two_shot", link=GBIT, asked=None):
    operation = NetworkOperation(nbytes, [0.0] * world, collective=collective, algorithm=asked)
    Network(world, link, algorithm).run([operation])
    return max(operation.finished)


def test_the_defaults_are_the_cores():
    assert DEFAULT_COSTS.as_list() == _C.default_costs()


@pytest.mark.parametrize(("collective", "algorithm"), ALL)
@pytest.mark.parametrize("hosts", [[0, 1], [0, 1, 2, 3], [0, 0, 1, 1], [0, 0, 0, 1, 1, 1, 2, 2, 2]])
def test_algorithms_cost_what_the_core_expects(collective, algorithm, hosts):
    costs = Costs.of_list([2e-6, 1e-6, 0.2e-9, 50e-6, 7e-6, 8e-9, 0.1e-9], "")
    fixed, per_byte = price_of(
        make_schedule(algorithm, collective, len(hosts), hosts=hosts), hosts, costs
    )
    native = _C.schedule(algorithm, collective, len(hosts), 0, hosts)
    for nbytes in (0, 10 * MB):
        expected = _C.expected_seconds(native, hosts, costs.as_list(), nbytes)
        assert fixed + nbytes * per_byte == pytest.approx(expected)


def chosen(comm):
    sizes = (1000, 100_000, 10 * MB)
    return {
        (choice.collective, nbytes): choice.algorithm
        for nbytes in sizes
        for choice in comm.explain(nbytes).choices
        if choice.collective in COLLECTIVES
    }


@pytest.mark.parametrize("world", [2, 4])
def test_auto_is_what_a_communicator_over_that_link_chooses(world, monkeypatch, tmp_path):
    import dpcore

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # default costs
    of_run = dpcore.spawn(chosen, world, mode="threads", link="1gbit,50us")[0]
    ours = {(c, n): choose(c, n, world, Links.of_text("1gbit,50us", world)) for c, n in of_run}
    assert ours == of_run
    assert len(set(ours.values())) > 2


def test_auto_does_not_know_how_fast_a_real_link_is():
    """Without a calibrated network it takes the default of 10 Gbit/s for it."""
    slow = Speed(1.25e7, 20e-6)
    assert choose("all_reduce", 40_000, 4, Links.of(slow)) == "two_shot"
    assert choose("all_reduce", 40_000, 4, Links.tcp(slow)) == "one_shot"


@pytest.mark.parametrize("world", [3, 4, 8])
@pytest.mark.parametrize(("collective", "algorithm"), ALL)
def test_lanes_are_the_programs_of_the_core(world, collective, algorithm):
    lanes = lanes_of(make_schedule(algorithm, collective, world), takes_turns=True)
    native = _C.schedule(algorithm, collective, world)
    for rank in range(world):
        own = lanes.by_rank[rank]
        order = [chunk for chunk in _C.order_of_chunks(native, rank) if chunk in own]
        assert list(own) == order
        turns = {
            (step.number, target, chunk): turn
            for chunk, steps in own.items()
            for step in steps
            for target, turn in zip(step.sends, step.turns, strict=True)
        }
        of_core = {
            (step, target, chunk): None if source < 0 else (source, awaited, ago)
            for step, target, chunk, source, awaited, ago in _C.turns(native, rank)
        }
        assert turns == of_core


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("collective", ["reduce_scatter", "all_gather"])
def test_the_halves_of_an_all_reduce_take_half_of_it(collective, world):
    """One entry each, and (N-1)/N of the data in either direction."""
    whole = seconds_of("all_reduce", 8 * MB, world)
    assert seconds_of(collective, 8 * MB, world) == pytest.approx(whole / 2, rel=0.02)


def test_a_broadcast_takes_its_bytes_once():
    assert seconds_of("broadcast", 8 * MB, 2) == pytest.approx(64e-3, rel=0.02)
    assert seconds_of("broadcast", 8 * MB, 4, "auto") < 1.1 * 64e-3  # by ring, in segments


def swing(world):
    """The moves of an all-reduce in which all give all to all."""
    return [(0, a, b, 0, True) for a in range(world) for b in range(world) if a != b]


def test_algorithms_of_ones_own():
    for world in (2, 4):
        one_shot = seconds_of("all_reduce", 100_000, world, "one_shot")
        assert seconds_of("all_reduce", 100_000, world, swing) == pytest.approx(one_shot)
        assert seconds_of("all_reduce", 100_000, world, asked=swing) == pytest.approx(one_shot)
    made = _C.schedule("ring", "all_reduce", 4)
    assert seconds_of("all_reduce", MB, 4, made) == seconds_of("all_reduce", MB, 4, "ring")
    # The other collectives choose.
    assert seconds_of("all_gather", MB, 4, swing) == seconds_of("all_gather", MB, 4, "auto")


def test_an_algorithm_that_is_asked_for_has_to_be_there():
    with pytest.raises(Unsupported, match="all_gather has no algorithm 'two_shot'"):
        seconds_of("all_gather", MB, 4, asked="two_shot")
