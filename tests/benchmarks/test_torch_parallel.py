"""torch's own ways to share a model over both backends: what is kept of a run, and said."""

import json
import sys

import pytest

from benchmarks import torch_parallel as benchmark
from benchmarks.harness import strategies_table
from benchmarks.harness.torch_strategies import OVERLAPPING


def test_records_and_tables():
    """Gloo takes twice as long as the slower of our ranks."""
    ours, gloos = [1.0, 2.0, 3.0], [4.0, 8.0, 12.0]
    slow = {"1F1B": ({"dpcore": [2 * x for x in ours], "gloo": gloos}, "")}
    fast = {"1F1B": ({"dpcore": ours, "gloo": ours}, "")}
    refused = {OVERLAPPING: ({"dpcore": ours}, "may hang")}
    lines = list(benchmark.records([slow | refused, fast | refused]))
    assert [line["strategy"] for line in lines] == ["1F1B", OVERLAPPING]
    ratio = {"median": 0.5, "low": 0.5, "high": 0.5, "rounds": 3, "confidence": None}
    assert lines[0]["of_gloo"] == ratio
    assert lines[0]["dpcore_s"] == 4.0
    text = benchmark.table(lines)
    assert "0.50 (0.50-0.50)\n" in text and "Gloo refuses it: may hang" in text
    lines[0]["of_gloo"]["high"] = 1.1
    assert "0.50 (0.50-1.10)*" in benchmark.table(lines)
    facts = {"machine": {"cores": 2, "cpu": "any"}, "date": "2026-11-23", "commit": "abc"}
    table = strategies_table.table_of_torch_parallel([facts | line for line in lines])
    assert "| ratio (range of 3 rounds) |" in table
    assert "| 1F1B | 4000.0 ms | 8000.0 ms | 0.50 (0.50 to 1.10) |" in table
    assert f"| {OVERLAPPING} | 2000.0 ms | refuses it | |" in table
    of_both = [facts | line | {"world": world} for line in lines for world in (4, 2)]
    two, four = strategies_table.table_of_torch_parallel(of_both).split("\n\n| |")
    assert "of 2 ranks" in two and "of 4 ranks" in four
    assert two.count("| 1F1B |") == four.count("| 1F1B |") == 1


def test_a_small_run(tmp_path, monkeypatch, capsys):
    kept = tmp_path / "kept.jsonl"
    words = ["torch_parallel", "--quick", "--strategies", "zeroredundancy"]
    monkeypatch.setattr(sys, "argv", [*words, "--records", str(kept)])
    assert benchmark.main() == 0
    plain, overlapping = map(json.loads, kept.read_text().splitlines())
    assert plain["of_gloo"]["low"] > 0 and len(plain["rounds_s"]["gloo"]) == 6
    assert overlapping["strategy"] == OVERLAPPING and "hang" in overlapping["refused"]
    assert plain["of_gloo"]["confidence"] == 0.95
    assert "Gloo refuses it" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--strategies", "FSDP9"], "none has 'FSDP9' in it"),
        (["--ranks", "3"], "not an even number"),
        (["--rounds", "0"], "from 1 on"),
    ],
)
def test_wrong_words_are_refused(words, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["torch_parallel", *words])
    with pytest.raises(SystemExit):
        benchmark.main()
    assert said in capsys.readouterr().err
