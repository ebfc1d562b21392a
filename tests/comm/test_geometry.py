"""Pieces, paths and the stage's buffers: pure functions in C++, for which no rank is started."""

import pytest

from tests.cpp import programs

pytestmark = pytest.mark.timeout(1800)  # the first builds the program


def test_pieces_paths_and_stages():
    programs.run(programs.built("asan/geometry"), says="cases: fine")
