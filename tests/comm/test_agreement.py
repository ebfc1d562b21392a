"""The agreement of ranks that survive or take in others: every interleaving of three of them.

tests/cpp/agreement.cpp says what is held in each state.
"""

import pytest

from tests.cpp.programs import built, run

pytestmark = pytest.mark.timeout(1800)  # the first builds the program


@pytest.mark.parametrize(
    ("ballots", "deaths", "mistakes"),
    [("memory", 1, 1), ("tcp", 1, 1), ("cut", 1, 2), ("grow", 1, 1), ("grow_tcp", 1, 1)],
)
def test_every_interleaving_ends_with_one_group(ballots, deaths, mistakes):
    said = run(built("asan/agreement"), ballots, deaths, mistakes, says=" 0 deadlines")
    assert int(said.split()[0]) > 20_000  # states
