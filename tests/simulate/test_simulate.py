"""dpcore simulate: laws that it has to keep, and runs that it has to predict."""

import json
import sys
from pathlib import Path

import pytest

from dpcore.__main__ import main
from dpcore.base.link import Speed
from dpcore.errors import Error, Unsupported
from dpcore.tools.simulate import Gradients, Network, NetworkOperation, gradients_of, predict
from dpcore.tools.simulate.training import bound_seconds
from tests.command_line import status_of
from tests.show.traces import model_of, write_trace

GBIT = Speed(bytes_per_second=1.25e8)
MB = 1_000_000


def operation_seconds(nbytes, world, link, algorithm):
    operation = NetworkOperation(nbytes, [0.0] * world)
    Network(world, link, algorithm).run([operation])
    return max(operation.finished)


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("algorithm", ["two_shot", "ring"])
def test_large_operations_take_their_bytes(world, algorithm):
    """2 (N-1)/N of the data leaves every NIC: with no latency nothing else takes time."""
    seconds = operation_seconds(80 * MB, world, GBIT, algorithm)
    assert seconds == pytest.approx(2 * (world - 1) / world * 80 * MB / 1.25e8, rel=0.05)


@pytest.mark.parametrize(
    ("algorithm", "steps"), [("one_shot", 1), ("two_shot", 2), ("ring", 6), ("tree", 4)]
)
def test_small_operations_take_their_steps(algorithm, steps):
    """One latency until everybody is known to be there, and one for each step."""
    link = Speed(bytes_per_second=1e12, latency=1e-3)
    seconds = operation_seconds(1000, 4, link, algorithm)
    assert seconds == pytest.approx((1 + steps) * 1e-3, rel=0.02)


def test_one_rank_has_no_link_to_wait_for():
    """In dpcore, an operation of a world of one returns at once."""
    link = Speed(bytes_per_second=1.25e8, latency=1e-3)
    assert operation_seconds(MB, 1, link, "two_shot") == 0
    predicted = predict(even().on(1), link, "per_parameter")
    assert (predicted.step_ms, predicted.exposed_ms) == (pytest.approx(100), pytest.approx(0))


def test_operations_share_the_card():
    alone = operation_seconds(10 * MB, 2, GBIT, "two_shot")
    pair = [NetworkOperation(10 * MB, [0.0, 0.0]) for _ in range(2)]
    Network(2, GBIT).run(pair)
    assert max(max(o.finished) for o in pair) == pytest.approx(2 * alone, rel=0.05)


def test_nobody_begins_before_the_last_has_come():
    operation = NetworkOperation(MB, [0.0, 0.5])
    Network(2, GBIT).run([operation])
    assert min(operation.finished) > 0.5


def even(count=8, nbytes=1_250_000, between=0.01):
    """Gradients every 10 ms, each of which takes a 1 Gbit/s link 10 ms."""
    ready = [between * (i + 1) for i in range(count)]
    return Gradients([nbytes] * count, [0] * count, [0.02], [count * between], [ready]).on(2)


def test_schedules_in_a_case_that_can_be_counted():
    """Compute 20 + 80 ms; all bytes take 80 ms. Behind each other 180; overlapped, only the last
    gradient's 10 ms stick out."""
    work = even()
    assert predict(work, GBIT, "sequential").step_ms == pytest.approx(180, rel=0.01)
    assert predict(work, GBIT, "flat").step_ms == pytest.approx(180, rel=0.01)
    assert predict(work, GBIT, "per_parameter").step_ms == pytest.approx(110, rel=0.01)
    assert predict(work, GBIT, "oracle").step_ms == pytest.approx(100)
    two_each = predict(work, GBIT, "bucketed", bucket_cap_mb=2)
    assert two_each.buckets == 4
    assert two_each.step_ms == pytest.approx(120, rel=0.01)
    assert two_each.exposed_ms == pytest.approx(20, rel=0.02)
    assert predict(work, GBIT).bound_ms == pytest.approx(20 + 10 + 80)


@pytest.mark.parametrize("schedule", ["bucketed", "sequential", "per_parameter", "flat"])
@pytest.mark.parametrize("gbit", [0.1, 1, 10])
@pytest.mark.parametrize("world", [2, 4])
def test_no_prediction_beats_the_bound(schedule, gbit, world):
    work = even().on(world)
    link = Speed(bytes_per_second=gbit * 1.25e8, latency=50e-6)
    predicted = predict(work, link, schedule, bucket_cap_mb=1)
    assert predicted.step_ms >= bound_seconds(work, link) * 1e3 * 0.999
    assert predicted.step_ms >= predicted.exposed_ms + 100 - 1e-6


def test_a_straggler_is_waited_for():
    work = even()
    late = Gradients(
        work.sizes, work.kinds, work.forward, [0.08, 0.16],
        [work.ready[0], [2 * t for t in work.ready[1]]],
    )  # fmt: skip
    predicted = predict(late, GBIT, "per_parameter")
    assert predicted.step_ms == pytest.approx(20 + 160 + 10, rel=0.01)
    assert predicted.exposed_ms == pytest.approx((90 + 10) / 2, rel=0.02)


def test_jitter_and_loss_cost_what_they_cost_on_the_link():
    """A lost message takes the link twice and a round trip more; the same seed, the same step."""
    work = even()
    steady = predict(work, Speed(1.25e8, 1e-3))
    lossy = predict(work, Speed(1.25e8, 1e-3, loss=0.2, seed=1))
    assert lossy.step_ms > steady.step_ms + 5
    assert lossy == predict(work, Speed(1.25e8, 1e-3, loss=0.2, seed=1))
    assert lossy.step_ms != predict(work, Speed(1.25e8, 1e-3, loss=0.2, seed=2)).step_ms
    late = predict(work, Speed(1.25e8, 1e-3, jitter=1e-3, seed=1))
    assert steady.step_ms < late.step_ms < lossy.step_ms
    assert late.bound_ms == pytest.approx(steady.bound_ms - 1)  # no latency is sure


# ---- where gradients come from -------------------------------------------------------------------


def test_gradients_of_a_trace(tmp_path):
    work = gradients_of(write_trace(tmp_path / "run.json"))
    assert work.sizes == [512, 512, 1024, 1024]
    assert work.forward == pytest.approx([6e-3, 6e-3])
    assert work.backward == pytest.approx([8e-3, 8e-3])
    assert work.ready[1] == pytest.approx([2e-3, 4e-3, 6e-3, 8e-3])


def test_a_disturbed_step_of_a_trace_disturbs_no_prediction(tmp_path):
    """Of three steps, two have a forward that takes longer, and two a backward."""
    path = write_trace(tmp_path / "run.json")
    content = json.loads(path.read_text())
    forwards, backwards = (
        sorted(
            (e for e in content["traceEvents"] if e["name"] == name and e["pid"] == 0),
            key=lambda event: event["ts"],
        )
        for name in ("forward", "backward")
    )
    for forward in forwards[1:]:
        forward["ts"] -= 1000  # begins a millisecond earlier
        forward["dur"] += 1000
    for backward in backwards[:2]:
        backward["dur"] += 3000
    path.write_text(json.dumps(content))
    work = gradients_of(path)
    assert work.forward[0] == pytest.approx(6e-3)
    assert work.backward[0] == pytest.approx(8e-3)
    assert predict(work, Speed(1e12), "oracle").step_ms == pytest.approx(14)
    assert bound_seconds(work, Speed(1e12)) == pytest.approx(14e-3)


def test_the_cap_of_a_trace_is_the_cap_of_its_predictions(tmp_path):
    models = [{**model_of(4), "bucket_caps": [512, 4096]}]
    work = gradients_of(write_trace(tmp_path / "run.json", buckets=4, models=models))
    assert list(work.on(4).caps) == [512, 4096]
    sizes = [512, 512, 1024, 1024, 1536, 1536, 2048, 2048]
    assert work.sizes == sizes
    assert predict(work, GBIT).buckets == 3  # 512, then until 4096: 4096, 5632
    assert predict(work, GBIT, bucket_cap_mb=25).buckets == 1
    assert predict(work, GBIT, "flat").buckets == 1


def test_gradients_of_a_description(tmp_path):
    path = tmp_path / "gradients.json"
    gradients = [{"bytes": 4096, "ready_ms": 1}, {"bytes": 8192, "ready_ms": 2}]
    path.write_text(json.dumps({"forward_ms": 1, "backward_ms": 2, "gradients": gradients}))
    work = gradients_of(path)
    assert (work.sizes, work.backward, work.world) == ([4096, 8192], [2e-3], 1)
    path.write_text(json.dumps({"forward_ms": 1, "gradients": []}))
    with pytest.raises(Error, match="backward_ms"):
        gradients_of(path)


def test_the_command_prints_a_table_and_json(tmp_path, capsys):
    path = str(write_trace(tmp_path / "run.json"))
    assert (
        main(
            ["simulate", path, "--link", "1mbit,1ms", "--schedule", "bucketed:0.001,per_parameter"]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "4 gradients of 0.0 MiB, 2 ranks, link 1mbit,1ms" in out
    assert "per_parameter" in out
    # Computing takes 6 + 8 ms; 3072 bytes at 1 Mbit/s 24.6, from the first gradient on.
    assert "take at least 14.0 ms; with communication" in out
    assert "no step is shorter than" in out
    assert main(["simulate", path, "--link", "1mbit,1ms", "--schedule", "bucketed,flat"]) == 0
    bucketed, flat = capsys.readouterr().out.splitlines()[-2:]
    assert "1, 25" in bucketed
    assert "–" in flat
    options = ["--link", "1gbit", "--world", "4", "--algorithm", "ring", "--schedule", "flat"]
    assert main(["simulate", path, "--json", *options]) == 0
    (line,) = json.loads(capsys.readouterr().out)
    assert (line["schedule"], line["algorithm"], line["buckets"]) == ("flat", "ring", 1)


def test_the_help_offers_no_link_none(capsys):
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "or none" not in said
    assert "(default: those of the trace, at least 2)" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--link", "fast"], "--link: 'fast' is not a link; write a rate such as 1gbit"),
        (["--link", "none"], "--link none: a prediction is for a link, such as 1gbit,50us"),
        (["--link", "0gbit"], "'0gbit' is out of range"),
        (["--link", "1gbit", "--world", "-3"], "--world: '-3' is not a whole number of ranks"),
        (["--link", "1gbit", "--world", "0"], "--world: '0' is not a whole number of ranks"),
        (["--link", "1gbit", "--schedule", "bucketed:inf"], "'inf' is not a size in MiB"),
        (["--link", "1gbit", "--schedule", "bucketed:nan"], "'nan' is not a size in MiB"),
        (["--link", "1gbit", "--schedule", "bucketed:-1"], "'-1' is not a size in MiB"),
        (["--link", "1gbit", "--schedule", "bucketed:0"], "'0' is not a size in MiB"),
        (["--link", "1gbit", "--schedule", "soon"], "choose from bucketed"),
        (["--link", "1gbit", "--algorithm", "circle"], "choose from one_shot"),
    ],
)
def test_the_command_explains_mistakes(tmp_path, capsys, options, message):
    path = str(write_trace(tmp_path / "run.json"))
    assert status_of("simulate", path, *options) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("dpcore simulate: ") and message in line


def test_traces_of_no_model_or_two_are_refused(tmp_path):
    path = write_trace(tmp_path / "run.json", models=[])
    with pytest.raises(Error, match="shows 0 models"):
        gradients_of(path)
    with pytest.raises(Unsupported, match="choose from"):
        predict(even(), GBIT, "soon")


# ---- against runs --------------------------------------------------------------------------------


@pytest.mark.quiet(seconds=13)
def test_runs_over_an_emulated_link_take_what_was_predicted(monkeypatch):
    """Layers that sleep, over 200 Mbit/s: little of a processor is needed, so what a busy machine
    adds is on top, also on top of computing alone, which the prediction begins with. (The measured
    cells are in docs/simulator.md.)"""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2]))
    from benchmarks import simulated
    from benchmarks.harness.simulated_cells import ORACLE, Column, judged

    contenders = ("dpcore sequential 1", "dpcore bucketed 1")
    column = Column("200mbit,200us", 2, "sleeping_light", contenders)
    record = simulated.run(column, rounds=2, steps=2) | {"processors": {}}
    record["rounds_s"] = {name: [min(times)] * 2 for name, times in record["rounds_s"].items()}
    cells = {cell.contender: cell for cell in judged(record)}
    assert set(cells) == set(record["rounds_s"]) - {ORACLE}
    for cell in cells.values():
        assert 0.8 * cell.predicted_ms < cell.measured_ms < 1.5 * cell.predicted_ms + 60, cell
    sequential, bucketed = (cells[name].predicted_ms for name in contenders)
    assert sequential - bucketed > 30


def test_it_needs_no_compiled_code():
    import subprocess

    code = "import sys, dpcore.tools.simulate.command; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "dpcore._C"} & set(out.stdout.split())
