"""What needs no rank in C++: pieces, paths, stages, shares of TCP, runs, processors, meeting."""

import pytest

from tests.cpp import programs

pytestmark = pytest.mark.timeout(1800)  # the first builds the program


def test_pieces_paths_and_stages():
    programs.run(programs.built("asan/geometry"), says="cases: fine")


def test_how_much_a_connection_carries_at_a_time():
    programs.run(programs.built("asan/flow"), says="flow: fine")


def test_when_a_run_sends_and_when_it_asks():
    programs.run(programs.built("asan/runs"), says="runs: fine")


def test_a_thread_leaves_processors():
    programs.run(programs.built("asan/processors"), says="processors: fine")


def test_most_copies_go_the_faster_way():
    programs.run(programs.built("asan/way_to_peers"), says="way: fine")


def test_more_connections_than_are_heard_side_by_side():
    programs.run(programs.built("asan/meeting"), says="meeting: fine")
