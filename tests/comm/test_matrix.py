"""Results against a reference over everything that can make a difference, see matrix.py.

By default a seeded choice of cases in which every pair of values occurs, per transport. With
``DPCORE_TEST_FULL=1`` also every valid case, ranks as threads.
"""

import itertools
import os

import pytest

import dpcore
from tests.comm import matrix
from tests.comm.modes import HOW

SEEDS = {"threads": 20, "processes": 21, "tcp": 22}
CHOSEN = {mode: matrix.pairwise(seed) for mode, seed in SEEDS.items()}
IS_FULL = os.environ.get("DPCORE_TEST_FULL") == "1"


def of_world(world, cases):
    return [case for case in cases if case.world == world]


def assert_right(world, cases, mode, timeout=60.0):
    results = dpcore.spawn(matrix.run_cases, world, cases, timeout=timeout, **HOW[mode])
    problems = [problem for _, of_rank in results for problem in of_rank]
    for case, fingerprints in zip(cases, zip(*(f for f, _ in results), strict=True), strict=True):
        if len(set(fingerprints)) > 1:
            problems.append(f"{case}: not the same bits on every rank")
    assert not problems, f"{len(problems)} problems:\n" + "\n".join(problems[:20])


@pytest.mark.parametrize(
    ("mode", "world", "cases"),
    [
        pytest.param(mode, world, cases, id=f"{mode}-{world}_ranks-{len(cases)}_cases")
        for mode, world in itertools.product(CHOSEN, matrix.WORLDS)
        for cases in [of_world(world, CHOSEN[mode])]
    ],
)
def test_every_pair_of_values_gives_what_the_reference_gives(mode, world, cases):
    assert_right(world, cases, mode)


if IS_FULL:

    @pytest.mark.parametrize("world", matrix.WORLDS)
    def test_every_valid_case_gives_what_the_reference_gives(world, capsys):
        cases = list(matrix.all_cases(world))
        with capsys.disabled():
            print(f"\n{world} ranks: {len(cases)} cases")
        assert_right(world, cases, "threads", timeout=300.0)


# ---- the choice itself -----------------------------------------------------------------------


def is_valid(case):
    return matrix.is_valid(*case[: matrix.BOUND])


@pytest.mark.parametrize("mode", CHOSEN)
def test_the_choice_has_every_pair_of_values_that_can_meet(mode):
    """Counted the long way, over all combinations of the axes."""
    possible = set()
    for start in itertools.product(*matrix.AXES[: matrix.BOUND]):
        if matrix.is_valid(*start):
            values = list(enumerate(start))
            possible.update(itertools.combinations(values, 2))
            possible.update(itertools.product(values, free_values()))
    possible.update(pair for pair in itertools.combinations(free_values(), 2) if differ(*pair))
    covered = set().union(*(matrix.pairs_of(case) for case in CHOSEN[mode]))
    assert covered == possible
    assert all(is_valid(case) for case in CHOSEN[mode])


def free_values():
    axes = list(enumerate(matrix.AXES))[matrix.BOUND :]
    return [(axis, value) for axis, values in axes for value in values]


def differ(one, other):
    return one[0] != other[0]


def test_the_choice_is_the_same_every_time_and_smaller_than_the_whole():
    assert matrix.pairwise(SEEDS["threads"]) == CHOSEN["threads"]
    whole = len(matrix.valid_starts()) * len(matrix.WORLDS) * len(matrix.SIZES)
    assert 500 < len(CHOSEN["threads"]) < whole / 100


def test_every_valid_case_comes_once():
    cases = list(matrix.all_cases(3))
    assert len(cases) == len(set(cases)) == len(matrix.valid_starts()) * len(matrix.SIZES)
    assert all(is_valid(case) for case in cases)
