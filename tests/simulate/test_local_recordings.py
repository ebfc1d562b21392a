"""Traces of LocalSGD and DiLoCo: what they say, what is shown, and what is predicted from them."""

import csv
import json

import pytest
import torch
from torch import nn

import dpcore as dp
from dpcore.__main__ import main
from dpcore.base.link import parse_speed
from dpcore.errors import Unsupported
from dpcore.recorder.file import LOCAL_STEP
from dpcore.tools.show.figures import figures_of
from dpcore.tools.show.reading import read_run
from dpcore.tools.simulate import LocalUpdates, predict
from dpcore.tools.simulate.gradients import gradients_of
from tests.simulate.local_runs import written


def test_what_a_step_computes_is_what_neither_waits_nor_sends(tmp_path):
    work = gradients_of(written(tmp_path / "run.json", computing=(10, 14)))
    assert work.sizes == [750_000, 500_000]
    assert [f + b for f, b in zip(work.forward, work.backward, strict=True)] == [0.010, 0.014]
    assert work.updates == {
        "sync_every": 4, "fragments": 1, "delay": 0, "bits": 32, "outer": pytest.approx(0.002),
    }  # fmt: skip
    # 1.25 MB between two ranks at 1 Gbit/s take 10 ms, once in four steps.
    predicted = predict(work, parse_speed("1gbit"), LocalUpdates.of(work), algorithm="two_shot")
    assert predicted.step_ms == pytest.approx(14 + (10 + 2) / 4, rel=0.01)
    rarer = predict(work, parse_speed("1gbit"), LocalUpdates.of(work, 8))
    assert rarer.step_ms == pytest.approx(14 + (10 + 2) / 8, rel=0.01)


def test_a_spreadsheet_has_a_row_for_what_each_rank_sent(tmp_path):
    path, table = written(tmp_path / "run.json", intervals=3), tmp_path / "rows.csv"
    assert main(["show", str(path), "--csv", str(table)]) == 0
    with open(table, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["rank"], row["step"]) for row in rows] == [
        (rank, step) for rank in "01" for step in ("4", "8", "12")
    ]
    for row in rows:
        assert (row["bucket"], row["bytes"], row["parameters"]) == ("0", "1250000", "a, b")
        assert float(row["in_flight_ms"]) == float(row["exposed_ms"]) == 20


def test_what_has_no_gradients_is_asked_for_none(tmp_path, capsys):
    path = written(tmp_path / "run.json")
    with pytest.raises(Unsupported, match=r"'dear': .* no gradients, so only local:16"):
        predict(gradients_of(path), parse_speed("1gbit"), "dear")
    asked = ["simulate", str(path), "--link", "1gbit"]
    for more in (["--best"], ["--schedule", "bucketed"], ["--page", str(tmp_path / "x.html")]):
        assert main([*asked, *more]) == 2
    said = capsys.readouterr().err
    assert f"--best compares schedules of gradients, and {path} has none" in said
    assert "'bucketed': the recording is of local updates" in said
    assert main([*asked, "--json"]) == 0
    (line,) = json.loads(capsys.readouterr().out)
    assert line["schedule"] == "local:4" and "gradients" in line["unknown"][0]
    assert "3 recorded intervals" in line["interval"]
    assert main([*asked, "--schedule", "local,local:8", "--world", "2,8"]) == 0
    assert "2 parameters of 1.2 MiB, 8 ranks" in capsys.readouterr().out
    assert main([*asked, "--until", "0.9"]) == 0
    assert capsys.readouterr().out.startswith("local:4 by two_shot over 1gbit ")


def test_stragglers_as_recorded_are_those_of_all_intervals(tmp_path, capsys):
    """Also around the shortest and the longest one, between which the prediction lies."""
    path = written(tmp_path / "run.json")
    asked = ["simulate", str(path), "--link", "1gbit", "--json"]
    lines = []
    for more in ([], ["--straggler", "recorded"]):
        assert main([*asked, *more]) == 0
        lines += json.loads(capsys.readouterr().out)
    assert lines[0]["step_ms"] == pytest.approx(lines[1]["step_ms"], rel=0.01)  # all are alike


def test_others_have_as_many_fragments_as_were_recorded(tmp_path):
    path = written(tmp_path / "run.json", sync_every=8, fragments=2, delay=3, bits=8)
    work = gradients_of(path)
    assert LocalUpdates.of(work, 32) == LocalUpdates(32, 2, 3, 8, outer=work.updates["outer"])
    with pytest.raises(Unsupported, match=r"sync_every is at least .*, here 8"):
        LocalUpdates.of(work, 4)


def test_steps_are_shown(tmp_path):
    figures = figures_of(read_run(written(tmp_path / "run.json")))
    assert (figures.steps, figures.step_ms) == (12, 10)
    assert figures.exposed_ms_per_step == pytest.approx(20 / 4)


@pytest.mark.parametrize("kind", ("LocalSGD", "DiLoCo"))
def test_a_trace_of_a_block(kind, tmp_path):
    path = tmp_path / "run.json"

    def body(comm):
        module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        if kind == "LocalSGD":
            block = dp.LocalSGD(module, optimizer, 4, comm=comm)
        else:
            outer = torch.optim.SGD(module.parameters(), lr=0.7)
            block = dp.DiLoCo(module, optimizer, outer, 4, 2, 1, comm=comm)
        with block:
            for number in range(12):
                if number == 4:  # a trace may begin after some steps
                    recorded = dp.trace(path, comm=comm).__enter__()
                optimizer.zero_grad()
                module(torch.ones(2, 8)).sum().backward()
                optimizer.step()
            recorded.__exit__(None, None, None)

    dp.spawn(body, 2, mode="threads")
    run = read_run(path)
    (described,) = run.models
    fragments = 1 if kind == "LocalSGD" else 2
    assert described["parameters"] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert described["parameter_bytes"] == [256, 32, 128, 16]
    sizes = [bucket["bytes"] for bucket in described["buckets"]]
    assert sizes == ([432] if fragments == 1 else [256, 176])
    for rank in run.ranks:
        steps = [event for event in rank.compute if event.name == LOCAL_STEP]
        assert len(steps) == 8 and {step.model for step in steps} == {described["number"]}
        assert [a.end_ns for a in steps[:-1]] == [b.begin_ns for b in steps[1:]]
        # One may still be in flight at the end.
        assert fragments + 1 <= len(rank.operations) <= 2 * fragments
    work = gradients_of(path)
    outer = work.updates["outer"]
    assert LocalUpdates.of(work) == LocalUpdates(4, fragments, fragments - 1, outer=outer)
    assert predict(work, parse_speed("1gbit"), LocalUpdates.of(work)).step_ms > 0
