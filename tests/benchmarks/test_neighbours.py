"""Busy loops that come and go, and what is computed from times beside them."""

import json
import sys
import time

import pytest

from benchmarks import neighbours as benchmark
from benchmarks.harness import step_tables
from benchmarks.harness.neighbours import Neighbours, neighbours
from dpcore.base.processes import look_at


def used_within(loop, seconds):
    before = look_at(loop.pid).processor_seconds
    time.sleep(seconds)
    return look_at(loop.pid).processor_seconds - before


def test_neighbours_are_busy_when_told_and_else_asleep():
    with neighbours(1) as made:
        (loop,) = made._loops
        assert used_within(loop, 0.1) < 0.05
        for _ in range(2):
            made.busy(True)
            begin = look_at(loop.pid).processor_seconds
            deadline = time.monotonic() + 20
            while look_at(loop.pid).processor_seconds < begin + 0.1 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert look_at(loop.pid).processor_seconds >= begin + 0.1
            made.busy(False)
            made.busy(False)  # says so again
            assert used_within(loop, 0.1) < 0.05
        made.busy(True)
    assert loop.returncode is not None


def test_neighbours_end_with_the_one_that_started_them():
    for loaded in (False, True):
        made = Neighbours(1)
        made.busy(loaded)
        (loop,) = made._loops
        loop.stdin.close()  # as the kernel does when a process ends
        assert loop.wait(timeout=20) == 0
        loop.stdout.close()


def test_ratios():
    """Loaded, computing takes twice as long: what takes three times as long is 1.5 of its share."""
    quiet, loaded = [1.0, 1.0, 2.0], [2.0, 2.0, 4.0]
    times = {
        "computing/computing/quiet": quiet, "computing/computing/loaded": loaded,
        "FSDP2/dpcore/quiet": quiet, "FSDP2/dpcore/loaded": [3 * q for q in quiet],
        "FSDP2/Gloo/quiet": [2 * q for q in quiet], "FSDP2/Gloo/loaded": [2 * q for q in quiet],
    }  # fmt: skip
    faster = {name: [seconds / 2 for seconds in rounds] for name, rounds in times.items()}
    lines = list(benchmark.records([times, faster]))
    assert [(line["what"], line["contender"]) for line in lines] == [
        ("computing", "computing"), ("FSDP2", "dpcore"), ("FSDP2", "Gloo"),
    ]  # fmt: skip
    ours = lines[1]
    assert ours["of_fair_share"]["median"] == 1.5
    assert ours["quiet_of_gloo"]["median"] == 0.5
    assert ours["loaded_of_gloo"]["median"] == 1.5
    text = benchmark.table(lines)
    assert text.count("1.50 (1.50-1.50)*") == 2
    assert "takes 2.00 times as long" in text
    assert text.endswith("in brackets: range of 3 rounds")
    facts = {"machine": {"cores": 2, "cpu": "any"}, "date": "2026-11-23", "commit": "abc"}
    row = "| FSDP2 | 1000.0 ms | 3000.0 ms | 0.50 (0.50 to 0.50) | 1.50 (1.50 to 1.50) |"
    assert row in step_tables.table_of_neighbours([facts | line for line in lines])


@pytest.mark.hurried  # with busy loops of its own
def test_a_small_run(tmp_path, monkeypatch, capsys):
    kept = tmp_path / "neighbours.jsonl"
    command = ["neighbours", "--model", "many", "--sizes", "4K", "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", [*command, "--seconds", "0.01", "--records", str(kept)])
    assert benchmark.main() == 0
    records = [json.loads(text) for text in kept.read_text().splitlines()]
    assert [(r["what"], r["contender"]) for r in records] == [
        ("computing", "computing"), ("all-reduce 4 KiB", "dpcore"), ("all-reduce 4 KiB", "Gloo"),
        ("DataParallel", "dpcore"), ("DataParallel", "Gloo"), ("FSDP2", "dpcore"),
        ("FSDP2", "Gloo"),
    ]  # fmt: skip
    assert all(len(r["rounds_s"]["loaded"]) == 2 for r in records)
    assert "computing alone takes" in capsys.readouterr().out
