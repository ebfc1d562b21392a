"""The museum beside torch DDP, in a small version, and the table of docs/mistakes.md."""

import sys

from benchmarks import mistakes
from benchmarks.harness.mistakes_table import table_of_mistakes
from dpcore.tools.records import load


def test_each_mistake_has_a_line_for_torch_and_for_dpcore(tmp_path, monkeypatch, capsys):
    path = tmp_path / "mistakes.jsonl"
    words = ["mistakes", "--only", "set_epoch_forgotten,forward_leaves_out"]
    monkeypatch.setattr(sys, "argv", [*words, "--records", str(path)])
    assert mistakes.main() == 0
    lines = {(line["mistake"], line["who"]): line for line in load(path)}
    unused, order = "a_layer_that_forward_leaves_out", "set_epoch_forgotten"
    assert {key: line["told"] for key, line in lines.items()} == {
        (order, "torch DDP"): "silent",
        (order, "shm"): "silent",
        (unused, "torch DDP"): "raise",
        (unused, "shm"): "raise",
    }
    assert lines[unused, "shm"]["class"] == "Error"
    of_torch, of_dpcore = capsys.readouterr().out.split("\nshm\n")
    assert f"{unused:44}  raise   step 2" in of_torch
    assert f"{unused:44}  raise   step 1" in of_dpcore
    table = table_of_mistakes(list(lines.values()))
    assert f"| [`{unused}`](https://github.com/" in table
    assert "| error, step 2 | error, step 1: *rank 0: 2 of 6 parameters did not" in table
    assert "| silent | silent | `sampler.set_epoch(epoch)`" in table


def test_a_mistake_that_only_torch_was_tried_with_has_a_dash():
    record = {
        "mistake": "m", "who": "torch DDP", "kind": "data", "address": "there", "what": "A * | B.",
        "remedy": "mend it", "told": "waits", "step": 3, "text": "Timed out", "date": "2026-11-28",
        "commit": "c", "machine": {"cores": 2, "cpu": "CPU"},
    }  # fmt: skip
    assert r"| [`m`](there): A \* \| B. | waits, step 3 | – | mend it |" in table_of_mistakes(
        [record]
    )
