"""The default beside everything that can be asked for: its arithmetic, and a small run."""

import json
import sys

import pytest

from benchmarks import defaults
from benchmarks.harness import beside_default, step_tables
from dpcore.tools.ratios import in_turn, paired, turns
from tests.faults.hosts import why_not

CELL = defaults.Cell("host2", "many", "1")


def result(seconds, steps=2):
    return {
        "seconds": seconds, "raw": [[], []], "steps": steps,
        "threads": {"dpcore": 1, "torch": 2},
        "choices": {
            "dpcore": [{"schedule": "bucketed", "bucket_bytes": [8], "said": at} for at in "ab"],
            "torch": [None, None],
        },
    }  # fmt: skip


def line(contender, low, high, cell="host2/many/1"):
    ratio = {"median": (low + high) / 2, "low": low, "high": high}
    line = {"cell": cell, "contender": contender, "step_s": 0.01, "ratio": ratio}
    return line | {"rounds_s": [0.01] * 6}


def test_a_ratio_is_that_of_the_same_round():
    drifting = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]
    half = paired([seconds / 2 for seconds in drifting], drifting)
    assert (half.median, half.low, half.high) == (0.5, 0.5, 0.5)


def test_a_contender_is_compared_with_the_turns_of_the_default_beside_its_own():
    found = defaults.neighbours([1, 3, 5, 7, 10, 30, 50, 70, 2, 4, 6, 8], ["b", "c", "d"])
    orders = ["abacada", "adacaba", "acadaba"]
    assert [turns("abcd", number) for number in range(3)] == [list(order) for order in orders]
    assert found == {"b": [1, 50, 8], "c": [3, 30, 4], "d": [5, 10, 6]}


def test_records_of_a_run():
    """Two rounds of two steps, the default's before and after torch's; of each step the slower
    rank counts, and of each turn the second step."""
    ours = [[0.1, 0.2, 0.2, 0.1, 0.4, 0.4, 0.3, 0.4], [0.2, 0.1, 0.2, 0.3, 0.3, 0.4, 0.5, 0.5]]
    torch = [[0.4, 0.4, 0.5, 0.4], [0.1, 0.1, 0.1, 0.5]]
    default, other = defaults.records(CELL, result({"dpcore": ours, "torch": torch}), 2)
    assert default["rounds_s"] == pytest.approx([0.25, 0.45])
    assert other["default_rounds_s"] == pytest.approx([0.2, 0.4])
    assert default["settled"]
    assert "ratio" not in default
    assert other["rounds_s"] == pytest.approx([0.4, 0.5])
    assert other["ratio"].pop("confidence") is None  # two rounds have a range only
    expected = {"median": 0.65, "low": 0.5, "high": 0.8, "rounds": 2}
    assert other["ratio"] == pytest.approx(expected)
    assert "range of 2 rounds" in beside_default.details(CELL.name, [default, other])
    assert "upper end (range of 2 rounds)" in beside_default.summary([default, other])
    assert other["default_s"] == pytest.approx(0.3)


def test_a_layout_that_changes_after_the_warm_up_is_reported():
    made = result({"dpcore": [[0.1] * 4] * 2, "torch": [[0.1, 0.1]] * 2})
    made["choices"]["dpcore"][1] = {"schedule": "bucketed", "bucket_bytes": [4, 4], "said": "a"}
    lines = list(defaults.records(CELL, made, 2))
    assert not lines[0]["settled"]
    assert "not settled" in beside_default.details(CELL.name, lines)


def test_targets_and_the_table():
    default = {"cell": "host2/many/1", "contender": "dpcore", "step_s": 0.01, "settled": True}
    default |= {"rounds_s": [0.01] * 6}
    lines = [default, line("dpcore sequential", 0.9, 1.03), line("dpcore bucketed 1", 1.0, 1.04)]
    lines += [line("torch", 0.9, 1.0), line("torch 1", 1.1, 1.2), line("torch 4", 0.8, 0.9)]
    assert [beside_default.missed(one) for one in lines] == [False, False, True, True, False, False]
    text = beside_default.summary(lines)
    assert "upper end (95%)" in text
    assert "1.04*" in text
    assert "1.20 torch 1" in text
    assert text.endswith("2 of the targets missed")
    facts = {
        "machine": {"cores": 2, "cpu": "any"},
        "date": "2026-11-23",
        "commit": "abc",
        "load": 1,
    }
    markdown = step_tables.table_of_defaults([facts | one for one in lines])
    assert "| host2/many/1 | 10.0 ms | 0.97 (1.03) | – | 1.02 (**1.04**) |" in markdown
    assert "| 0.95 (**1.00**) | 1.15 (1.20) torch 1 |" in markdown
    again = [*lines, line("dpcore bucketed 1", 0.9, 1.0)]  # measured once more
    assert beside_default.summary(again).endswith("1 of the targets missed")


def test_cells_are_chosen_by_patterns():
    names = [cell.name for cell in defaults.chosen_cells("host4/mlp,1gbit/*/all")]
    assert names == [
        "host4/mlp/1", "host4/mlp/all", "1gbit/mlp/all", "1gbit/transformer/all", "1gbit/many/all",
        "1gbit/ten/all", "1gbit/gpt2/all",
    ]  # fmt: skip


def test_what_does_not_fit_takes_part_in_another_run():
    assert defaults.portions("abcdefg", 3) == [["a", "d", "g"], ["b", "e"], ["c", "f"]]
    assert defaults.portions("abc", 5) == [["a", "b", "c"]]
    assert defaults.portions("ab", -1) == [["a"], ["b"]]
    assert defaults.that_fit(CELL) > 12


def test_a_run_without_a_cell_fails(monkeypatch):
    monkeypatch.setattr(defaults.namespaces, "why_not", lambda: "needs rights")
    monkeypatch.setattr(sys, "argv", ["defaults", "--cells", "1gbit/many/1"])
    assert defaults.main() == 1


def test_nobody_always_comes_after_the_same_one():
    orders = [in_turn("abcd", number) for number in range(8)]
    assert "".join(orders[0]) == "abcd"
    assert all(sorted(order) == list("abcd") for order in orders)
    before = {order[order.index("a") - 1] for order in orders if order[0] != "a"}
    assert before == {"b", "d"}
    assert {tuple(in_turn("ab", number)) for number in range(2)} == {("a", "b"), ("b", "a")}


@pytest.mark.parametrize(
    "cell",
    [
        "host4/many/1",
        pytest.param("1gbit/many/1", marks=pytest.mark.skipif(bool(why_not()), reason=why_not())),
    ],
)
def test_a_small_run(tmp_path, monkeypatch, capsys, cell):
    kept = tmp_path / "defaults.jsonl"
    command = ["defaults", "--cells", cell, "--contenders", "dpcore bucketed 1,torch"]
    command += ["--rounds", "2", "--seconds", "0.01", "--records", str(kept)]
    monkeypatch.setattr(sys, "argv", command)
    assert defaults.main() == 0
    records = [json.loads(text) for text in kept.read_text().splitlines()]
    assert [r["contender"] for r in records] == ["dpcore", "dpcore bucketed 1", "torch"]
    for record in records:
        assert (record["cell"], len(record["rounds_s"])) == (cell, 2)
        assert ("goodput_bytes_per_s" in record) == (cell == "1gbit/many/1")
        assert ("choice" in record) == (record["contender"] != "torch")
        assert {"machine", "commit", "load", "versions"} <= set(record)
    assert capsys.readouterr().out.splitlines()[-2].startswith(cell)
