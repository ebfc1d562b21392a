"""dpcore show: what is read from a file, and the numbers that are made of it."""

import json
import random

import numpy as np
import pytest

import dpcore as dp
from dpcore.__main__ import main
from dpcore.errors import Error
from dpcore.recorder.intervals import union_of, union_of_spans
from dpcore.tools.show import figures_of, read_run
from dpcore.tools.show.buckets import bucket_spans, pack_lanes, parameters_of
from dpcore.tools.show.figures import steps_of
from dpcore.tools.show.picture import window_of

from .traces import MS, model_of, says_nothing, write_trace


@pytest.fixture
def run(tmp_path):
    return read_run(write_trace(tmp_path / "run.json"))


def test_figures_of_a_run_that_is_known(run):
    """20 ms a step: forward 6, backward 8 with the first bucket sent in its middle, 4 exposed."""
    figures = figures_of(run)
    assert (figures.world_size, figures.steps, figures.step_ms) == (2, 3, pytest.approx(20, abs=2))
    # In flight from 10 to 18 with a gap of none: 10..15 and 14..18.
    assert figures.communication_ms_per_step == pytest.approx(8)
    assert figures.exposed_ms_per_step == pytest.approx(4)
    # The names without a step are of the whole trace, for the run as for its ranks.
    assert (figures.exposed_ms, figures.communication_ms) == pytest.approx((12, 24))
    assert figures.ranks[0].exposed_ms == pytest.approx(12)
    assert figures.overlap == pytest.approx(0.5)
    assert figures.headline == "exposed 4.00 of 8.00 ms of communication per step, overlap 50%"
    first = figures.ranks[0]
    assert (first.forward_ms, first.backward_ms) == (pytest.approx(6), pytest.approx(8))
    (operation,) = figures.operations
    assert (operation.name, operation.count, operation.bytes) == ("all_reduce", 12, 6 * 3072)
    assert operation.paths == {"ring/moves": 6, "two_shot/stage": 6}
    (wait,) = figures.waits
    assert (wait.name, wait.count) == ("a message", 12)
    assert wait.total_ms == pytest.approx(6 * (4 + 3))


def test_accumulated_gradients_are_one_step(run):
    """A backward that sends nothing ends no step. Without buckets at all each forward is one."""
    rank = run.ranks[0]
    begins = [begin for begin, _ in steps_of(rank)]
    rank.launches = [e for e in rank.launches if e.begin_ns >= begins[1]]
    assert [begin for begin, _ in steps_of(rank)] == [begins[0], begins[2]]
    rank.launches = []
    assert [begin for begin, _ in steps_of(rank)] == begins


def test_an_earlier_file_tells_paths_by_collective(tmp_path):
    told = {"paths": {"all_reduce": {"two_shot/push": 4, "one_shot/stage": 2}}}
    path = write_trace(tmp_path / "run.json", ran=says_nothing, **told)
    (operation,) = figures_of(read_run(path)).operations
    assert operation.paths == told["paths"]["all_reduce"]


def test_exposed_time_without_communication_hides_nothing_and_adds_nothing(tmp_path):
    """Rank 1 waits a millisecond less: the mean is in between, and the overlap follows."""
    figures = figures_of(read_run(write_trace(tmp_path / "run.json", late=1.0)))
    assert [rank.exposed_ms for rank in figures.ranks] == pytest.approx([12, 9])
    assert figures.overlap == pytest.approx(1 - 3.5 / 8)


def test_buckets_fill_wait_and_travel(run):
    spans = bucket_spans(run, run.ranks[0])
    assert len(spans) == 6
    first = spans[0]
    times = (first.first_ready_ns, first.last_ready_ns, first.launch_ns, first.end_ns)
    assert [time / MS for time in times] == pytest.approx([8, 10, 10, 15])
    assert (first.bucket, first.bytes, first.operation) == (0, 1024, 0)
    assert parameters_of(run, 0, 1024) == "layer0.weight, layer0.bias"
    assert parameters_of(run, 0, 999) == ""  # of a plan that is no longer
    lanes = pack_lanes(spans)
    for a, lane_of_a in zip(spans, lanes, strict=True):
        for b, lane_of_b in zip(spans, lanes, strict=True):
            if a is not b and lane_of_a == lane_of_b:
                assert a.end_ns <= b.first_ready_ns or b.end_ns <= a.first_ready_ns


def test_buckets_of_two_models_are_not_mixed_up(tmp_path):
    path = write_trace(tmp_path / "run.json", models=[model_of(2), model_of(2)])
    run = read_run(path)
    assert parameters_of(run, 0, 1024) == ""
    assert all(s.first_ready_ns == s.launch_ns for s in bucket_spans(run, run.ranks[0]))


def test_unions_and_intersections_of_random_spans():
    chance = random.Random(3)
    for _ in range(30):
        pairs = [[chance.randrange(200) for _ in range(2)] for _ in range(2 * 12)]
        spans = [(min(pair), max(pair)) for pair in pairs]
        a, b = (union_of_spans(*zip(*part, strict=True)) for part in (spans[:12], spans[12:]))
        cells = [
            {t for begin, end in part for t in range(begin, end)}
            for part in (spans[:12], spans[12:])
        ]
        assert a.total_ns == len(cells[0])
        assert a.within(b) == len(cells[0] & cells[1])
        begin, end = sorted((chance.randrange(200), chance.randrange(200)))
        assert a.between(begin, end) == len(cells[0] & set(range(begin, end)))


def test_the_numbers_are_those_of_the_trace(tmp_path):
    """A run of real ranks: what the file says is what ``Trace`` said."""

    def body(comm, path):
        values = [np.ones(20_000, np.float32) for _ in range(3)]
        with dp.trace(path) as t:
            for _ in range(4):
                works = [comm.all_reduce(value, async_op=True) for value in values]
                with t.span("computing"):
                    np.sort(np.random.default_rng(0).random(20_000))
                for work in works:
                    work.wait()
        return t.exposed_ms, t.communication_ms, t.by_wait()

    path = tmp_path / "run.json"
    said = dp.spawn(body, 2, path, mode="threads", link="10gbit,20us")
    run = read_run(path)
    figures = figures_of(run)
    for rank, (exposed_ms, communication_ms, by_wait) in zip(figures.ranks, said, strict=True):
        assert rank.exposed_ms == pytest.approx(exposed_ms, abs=1e-3)
        assert rank.communication_ms == pytest.approx(communication_ms, abs=1e-3)
        assert 0 <= rank.overlap <= 1
        waits = {e.name for e in run.ranks[rank.rank].waits}
        assert waits == set(by_wait)
    assert (run.transport, run.link) == ("inproc", "10gbit,20us")
    (operation,) = figures.operations
    assert sum(operation.paths.values()) == operation.count == 24
    assert figures.steps == 0
    assert union_of(run.ranks[0].exposed).total_ns * 1e-6 == pytest.approx(said[0][0], abs=1e-3)


def test_a_run_of_a_model_names_its_parameters(tmp_path):
    from tests.data_parallel.models import Small
    from tests.data_parallel.test_trace import one_step

    path = tmp_path / "run.json"

    def body(comm):
        model = dp.DataParallel(Small(), comm=comm, bucket_cap_mb=0.01)
        one_step(comm, model)
        with dp.trace(path, comm=comm):
            for step in range(2):
                one_step(comm, model, step)
        return len(model.bucket_report())

    buckets, _ = dp.spawn(body, 2, mode="threads")
    run = read_run(path)
    spans = bucket_spans(run, run.ranks[1])
    assert len(spans) == 2 * buckets
    for span in spans:
        assert span.operation >= 0
        assert span.first_ready_ns <= span.last_ready_ns <= span.launch_ns < span.end_ns
    # After the plan of the first step the second one's is the described one.
    described = [parameters_of(run, span.bucket, span.bytes) for span in spans[-buckets:]]
    names = [name for name, p in Small().named_parameters() if p.requires_grad]
    assert all(any(name in text for name in names) for text in described)


def test_files_that_are_no_traces_are_explained(tmp_path):
    with pytest.raises(Error, match="after an error each rank writes its own"):
        read_run(tmp_path / "missing.json")
    (tmp_path / "half.json").write_text('{"traceEv')
    with pytest.raises(Error, match="is not a trace"):
        read_run(tmp_path / "half.json")
    (tmp_path / "other.json").write_text('{"traceEvents": []}')
    with pytest.raises(Error, match="was not written by dpcore"):
        read_run(tmp_path / "other.json")
    path = write_trace(tmp_path / "empty.json", steps=0)
    with pytest.raises(Error, match="has no events"):
        read_run(path)


# ---- the command ---------------------------------------------------------------------------------


def test_a_name_with_brackets_is_printed_as_it_is(tmp_path, capsys):
    path = tmp_path / "run.json"

    def body(comm):
        with dp.trace(path, comm=comm) as trace, trace.span("warm [/up]"):
            comm.all_reduce(np.ones(4))

    dp.spawn(body, 2, mode="threads")
    assert main(["show", str(path)]) == 0
    assert "warm [/up]" in capsys.readouterr().out


def test_show_writes_a_page_and_prints_tables(tmp_path, capsys):
    path = write_trace(tmp_path / "run.json")
    assert main(["show", str(path), "--png", str(tmp_path / "run.png"), "--steps", "2"]) == 0
    out = capsys.readouterr().out
    assert "run: exposed 4.00 of 8.00 ms of communication per step, overlap 50%" in out
    assert "layer0.weight" in out
    assert (tmp_path / "run.html").stat().st_size > 20_000
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_has_forward_and_backward_of_ranks_that_begin_apart(tmp_path):
    run = read_run(write_trace(tmp_path / "run.json", ahead=15.0))
    begin, end = window_of(run, (3, 3))
    for rank in run.ranks:
        whole = {e.name for e in rank.compute if begin <= e.begin_ns and e.end_ns <= end}
        assert whole >= {"forward", "backward"}, f"rank {rank.rank}"


def test_show_as_json(tmp_path, capsys):
    path = write_trace(tmp_path / "run.json")
    assert main(["show", "--json", str(path)]) == 0
    (figures,) = json.loads(capsys.readouterr().out)
    assert figures["overlap"] == pytest.approx(0.5)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.json"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run.json", "--png", "x.png", "--steps", "7"], "has the steps 1 to 3"),
        (["run.json", "run.json"], "is named twice"),
        (["nothing.json"], "there is no file"),
        (["run.json", "--steps", "2"], "--steps is for a picture: add --png FILE"),
        (["run.json", "--json", "--open"], "--open needs a page: add --html FILE"),
        (["run.json", "--csv", "x.csv", "--open"], "--open needs a page: add --html FILE"),
        (["run.json", "--json", "--csv", "-"], "--json and --csv - both print: leave one out"),
    ],
)
def test_show_explains_mistakes(tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    write_trace(tmp_path / "run.json")
    assert main(["show", *arguments]) == 2
    assert message in capsys.readouterr().err
