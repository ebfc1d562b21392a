"""Schedules over hosts: proved for even and uneven ones, and what they leave for the network."""

from fractions import Fraction

import pytest

from dpcore import _C, reference
from dpcore.reference import hosts_of

from .test_schedules import REDUCING, assert_right, is_proved, roots

COLLECTIVES = [
    kind for kind, names in reference.ALGORITHMS.items() if "hierarchical" in names
]  # fmt: skip
LAYOUTS = ["2+2", "3+1", "1+3", "1+1+1", "4+4", "2+3+1", "1", "5", "3+3+3", "4+1+1+2"]
INTERLEAVED = [[0, 1, 0, 1], [7, 3, 3, 7, 7], [2, 1, 0], [0, 1, 1, 0, 2, 0, 1]]
EVERY = [hosts_of(layout) for layout in LAYOUTS] + INTERLEAVED

over_hosts = pytest.mark.parametrize("hosts", EVERY, ids=str)


def fields(plan):
    return (plan.algorithm, plan.collective, plan.world, plan.chunks, plan.root, list(plan.moves))


def over_network(plan, hosts, host):
    """Shares of the buffer that leave a host, and that come to it."""
    share = Fraction(1, plan.chunks)
    out = sum(share for m in plan.moves if hosts[m.src] == host != hosts[m.dst])
    into = sum(share for m in plan.moves if hosts[m.dst] == host != hosts[m.src])
    return out, into


@pytest.mark.parametrize("collective", COLLECTIVES)
@over_hosts
def test_compiled_list_equals_its_twin_and_is_proved(collective, hosts):
    for root in roots(collective, len(hosts)):
        plan = reference.make_schedule("hierarchical", collective, len(hosts), root, hosts)
        compiled = _C.schedule("hierarchical", collective, len(hosts), root, hosts)
        assert fields(compiled) == fields(plan)
        assert compiled.ordered == plan.ordered
        assert collective not in REDUCING or compiled.ordered == _C.is_ordered(compiled)
        assert is_proved(plan)
        assert_right(plan, seed=root)
        steps = [move.step for move in plan.moves]
        assert sorted(set(steps)) == list(range(len(set(steps))))  # none without a move


@over_hosts
def test_an_all_reduce_sends_the_buffer_of_a_host_and_not_of_its_ranks(hosts):
    plan = reference.make_schedule("hierarchical", "all_reduce", len(hosts), 0, hosts)
    count = len(set(hosts))
    for host in set(hosts):
        assert over_network(plan, hosts, host) == (Fraction(2 * (count - 1), count),) * 2


@pytest.mark.parametrize("layout", ["2+2", "3+1", "4+4", "8+8+8"])
def test_two_shot_sends_more(layout):
    hosts = hosts_of(layout)
    shares = {
        name: max(
            over_network(
                reference.make_schedule(name, "all_reduce", len(hosts), 0, hosts), hosts, host
            )[0]
            for host in set(hosts)
        )
        for name in ("hierarchical", "two_shot", "ring")
    }
    assert shares["hierarchical"] < shares["two_shot"]
    # A ring passes a boundary of hosts once, too, if ranks of a host follow each other.
    assert shares["hierarchical"] <= shares["ring"]


@pytest.mark.parametrize("layout", ["2+2", "3+1", "2+2+2"])
def test_rooted_and_scattered_ones_cross_a_boundary_once_per_host(layout):
    hosts = hosts_of(layout)
    world, count = len(hosts), len(set(hosts))
    for collective, most in {
        "reduce_scatter": 1,
        "all_gather": count - 1,
        "broadcast": count - 1,
        "reduce": count - 1,
    }.items():
        plan = reference.make_schedule("hierarchical", collective, world, 0, hosts)
        for host in set(hosts):
            assert max(over_network(plan, hosts, host)) <= most, collective


def test_without_local_peers_it_is_ordered():
    hosts = [0, 1, 2]
    plan = _C.schedule("hierarchical", "all_reduce", 3, 0, hosts)
    assert _C.is_ordered(plan)
    assert not _C.is_ordered(_C.schedule("hierarchical", "all_reduce", 4, 0, [0, 0, 1, 1]))


def test_hosts_must_be_named_for_every_rank():
    with pytest.raises(Exception, match="hosts are given for 3 ranks of 4"):
        _C.schedule("hierarchical", "all_reduce", 4, 0, [0, 0, 1])
    with pytest.raises(ValueError, match="hosts are given for 3 ranks of 4"):
        reference.make_schedule("hierarchical", "all_reduce", 4, 0, [0, 0, 1])
