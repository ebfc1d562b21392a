"""Right programs: whatever is said of one of them is a false alarm."""

from functools import cache

import pytest

from tests.mistakes.judging import of
from tests.mistakes.right import PROGRAMS
from tests.mistakes.running import over_dpcore

WAYS = ("tcp", "priority", "dear", "zero1", "gloo", "torch")
ALONE = [name for name, known in PROGRAMS.items() if not known.in_group]
IN_GROUP = [name for name, known in PROGRAMS.items() if known.in_group]
ELSEWHERE = [(way, name) for way in WAYS for name in PROGRAMS if way in PROGRAMS[name].ways]


@cache
def told(way, names):
    return over_dpcore({name: PROGRAMS[name].program for name in names}, way)


@pytest.mark.parametrize("name", ALONE)
def test_nothing_is_said(name):
    assert not of(told("shm", tuple(ALONE))[name], "warn", "raise")


@pytest.mark.parametrize("name", IN_GROUP)
def test_nothing_is_said_in_a_group_of_torch(name):
    assert not of(told("gloo", tuple(IN_GROUP))[name], "warn", "raise")


@pytest.mark.parametrize(("way", "name"), ELSEWHERE)
def test_nothing_is_said_elsewhere(way, name):
    names = tuple(known for known in PROGRAMS if way in PROGRAMS[known].ways)
    assert not of(told(way, names)[name], "warn", "raise")
