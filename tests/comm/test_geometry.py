"""What is pure in C++, for which no rank is started: pieces, paths, the stage, TCP's share."""

import pytest

from tests.cpp import programs

pytestmark = pytest.mark.timeout(1800)  # the first builds the program


def test_pieces_paths_and_stages():
    programs.run(programs.built("asan/geometry"), says="cases: fine")


def test_how_much_a_connection_carries_at_a_time():
    programs.run(programs.built("asan/flow"), says="flow: fine")
