"""The benchmark of local updates: it runs, counts what was sent, and reads curves as it says."""

import json
import sys

import pytest

from benchmarks import local_updates
from benchmarks.harness import step_tables


def test_a_short_run(tmp_path, monkeypatch):
    kept = tmp_path / "local_updates.jsonl"
    command = ["local_updates", "--sync-every", "1,8", "--steps", "8", "--seeds", "2"]
    monkeypatch.setattr(sys, "argv", [*command, "--link", "1gbit", "--records", str(kept)])
    assert local_updates.main() == 0
    records = {line["contender"]: line for line in map(json.loads, kept.open())}
    assert list(records) == local_updates.contenders([1, 8])
    assert len(records) == 5
    for line in records.values():
        assert line["tokens"] == 8 * 2 * 8 * 64
        assert line["loss"]["low"] <= line["loss"]["mean"] <= line["loss"]["high"]
        begin, *_, end = line["curves"][0]
        assert (begin[0], end[0]) == (0, 8)
        assert begin[3] > end[3] > 2  # it has learnt, and is no wonder
        assert line["seconds"] > 0
    parameters = 420_000  # bytes, about
    sent = {name: line["bytes"] - line["curves"][0][0][1] for name, line in records.items()}
    assert sent["LocalSGD 1"] == pytest.approx(8 * parameters, rel=0.1)
    assert sent["LocalSGD 8"] == sent["DiLoCo 8"] == pytest.approx(parameters, rel=0.1)
    # A quarter of the bytes, of three of four fragments, and of the last one what has left by then.
    assert parameters / 4 * 3 / 4 * 0.9 < sent["DiLoCo 8 streamed"] < parameters / 4 * 1.1
    table = step_tables.table_of_local_updates(list(records.values()))
    assert all(f"| {name} | " in table for name in records)


def test_losses_are_read_between_the_moments():
    curve = [(0, 10.0, 0.0, 4.0), (4, 50.0, 2.0, 3.0), (8, 90.0, 6.0, 2.5)]
    assert local_updates.loss_at(curve, 1, 30.0) == 3.5
    assert local_updates.loss_at(curve, 2, 4.0) == 2.75
    assert local_updates.loss_at(curve, 1, 1000.0) == 2.5
    assert local_updates.loss_at(curve, 1, 10.0) == 4.0


def test_intervals():
    assert local_updates.interval([2.0]) == {"mean": 2.0, "low": 2.0, "high": 2.0}
    found = local_updates.interval([1.0, 2.0, 3.0])
    assert found["mean"] == 2.0
    assert found["high"] - 2.0 == pytest.approx(2.484, abs=1e-3)  # 4.303 / sqrt(3)
    nine = local_updates.interval([float(n) for n in range(9)])
    assert nine["high"] - 4.0 == pytest.approx(2.306 * 7.5**0.5 / 3)


@pytest.mark.parametrize(
    "wrong", (["--sync-every", "a"], ["--seeds", "0"], ["--seeds", "17"], ["--steps", "-1"])
)
def test_wrong_arguments(wrong, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["local_updates", *wrong])
    with pytest.raises(SystemExit):
        local_updates.main()
    assert wrong[0] in capsys.readouterr().err
