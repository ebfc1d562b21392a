"""The page of a predicted step: its trace says what the prediction says, and what was recorded."""

import json

import pytest

from dpcore.__main__ import main
from dpcore.base.link import Speed
from dpcore.tools.show.figures import steps_of
from dpcore.tools.show.reading import read_run
from dpcore.tools.simulate import Gradients, gradients_of, predict
from dpcore.tools.simulate.recording import Recording
from tests.command_line import status_of

READY = [0.01 * n for n in range(1, 7)]
WORK = Gradients([1 << 20] * 6, [0] * 6, [0.03], [0.06], [READY], update=[0.006]).on(2)
LINK = Speed(1.25e8, 50e-6)


@pytest.mark.parametrize("schedule", ["bucketed", "sequential", "priority", "dear", "zero1"])
def test_the_trace_of_a_prediction_says_what_was_predicted(schedule, tmp_path):
    told = Recording()
    predicted = predict(WORK, LINK, schedule, 2, told=told)
    assert predicted == predict(WORK, LINK, schedule, 2)
    told.write_trace(tmp_path / "run.json")
    run = read_run(tmp_path / "run.json")
    assert len(run.ranks) == 2
    for rank in run.ranks:
        *_, before, last = steps_of(rank)
        assert (last[0] - before[0]) * 1e-6 == pytest.approx(predicted.step_ms, abs=0.1)
        waits = [e.ms for e in rank.exposed if before[0] <= e.begin_ns < last[0]]
        assert sum(waits) == pytest.approx(predicted.exposed_ms, abs=0.1)
        launches = [e for e in rank.launches if before[0] <= e.begin_ns < last[0]]
        halves = 2 if schedule in ("dear", "zero1") else 1
        assert len(launches) == halves * predicted.buckets


def test_what_was_predicted_from_comes_out_of_the_trace(tmp_path):
    told = Recording()
    predict(WORK, LINK, "bucketed", 2, told=told)
    told.write_trace(tmp_path / "run.json")
    again = gradients_of(tmp_path / "run.json")
    assert again.sizes == WORK.sizes
    for name in ("forward", "backward", "update"):
        assert getattr(again, name) == pytest.approx(getattr(WORK, name), abs=1e-5)
    assert again.ready[0] == pytest.approx(READY, abs=1e-5)


@pytest.fixture
def described(tmp_path):
    path = tmp_path / "gradients.json"
    gradients = [{"bytes": 1 << 20, "ready_ms": 10 * n} for n in range(1, 7)]
    path.write_text(json.dumps({"forward_ms": 30, "backward_ms": 60, "gradients": gradients}))
    return str(path)


def test_the_command_writes_the_page_of_a_run(described, tmp_path, capsys):
    page = tmp_path / "step.html"
    asked = ["simulate", described, "--link", "1gbit,50us", "--page", str(page)]
    assert main([*asked, "--schedule", "dear:2"]) == 0
    text = page.read_text()
    assert "reduce_scatter" in text
    assert "gradient 3" in text
    assert status_of(*asked, "--schedule", "local:4") == 2
    assert "local updates send none" in capsys.readouterr().err
