"""The ranks of the training benchmarks: all learn the same, and all can be looked at."""

import pytest
import torch
from rich.console import Console

from benchmarks import demo, shaped_link
from benchmarks.training import worker
from benchmarks.training.ranks import kind_and_cap
from benchmarks.training.start import RankFailed, run_job
from benchmarks.training.text import LENGTH, Text
from benchmarks.training.worker import Job
from dpcore.show import figures_of, read_run
from dpcore.show.buckets import bucket_spans
from tests.show.traces import write_trace


def test_torch_and_dpcore_learn_the_same_and_leave_traces(tmp_path):
    names = ["torch", "dpcore bucketed 1"]
    lines = []
    result = run_job(Job("text", names, 1, 2, str(tmp_path)), lines.append)
    assert [line["step"] for line in lines if "step" in line] == sorted(2 * names, reverse=True)
    torch_losses, ours = (demo.losses(result, name) for name in names)
    assert ours == pytest.approx(torch_losses, abs=1e-4)
    assert 3 < ours[0] < 5  # a guess among 64 letters: ln 64 is 4.2
    assert result["gradient_bytes"] > 12 << 20
    assert all(len(seconds) == 2 for name in names for seconds in result["seconds"][name])
    assert demo.step_ms(result, "torch") > 0
    for name in names:
        run = read_run(tmp_path / f"{name.replace(' ', '-')}.json")
        figures = figures_of(run)
        assert (figures.world_size, figures.steps) == (2, 4)
        assert 0 <= figures.overlap <= 1
        assert figures.exposed_ms < figures.step_ms
        for rank in run.ranks:
            spans = bucket_spans(run, rank)
            assert spans
            assert all(span.operation >= 0 for span in spans)
            sent = sum(span.bytes for span in spans)
            assert sent == pytest.approx(4 * result["gradient_bytes"], rel=0.01)


def test_a_rank_that_fails_says_why(tmp_path):
    with pytest.raises(RankFailed, match="no_such_schedule"):
        run_job(Job("text", ["dpcore no_such_schedule"], 1, 1, str(tmp_path)), lambda _: None)


def test_batches_are_the_same_for_any_number_of_ranks():
    text = Text()
    whole = text.batch(3, 0, 1, 8)
    assert whole.shape == (8, LENGTH + 1)
    assert torch.equal(whole, torch.cat([text.batch(3, rank, 4, 8) for rank in range(4)]))
    assert not torch.equal(whole, text.batch(4, 0, 1, 8))
    begin = "".join(text.alphabet[number] for number in text.numbers[:31])
    assert begin == "CHAPTER I. DOWN THE RABBIT-HOLE"


def test_names_of_contenders():
    for name, kind, cap in (
        ("torch", "torch", None),
        ("torch 100", "torch", 100.0),
        ("dpcore auto", "dpcore auto", None),  # the schedule
        ("dpcore bucketed 0.5", "dpcore bucketed", 0.5),
        ("dpcore bucketed auto", "dpcore bucketed", "auto"),
        ("dpcore auto traced", "dpcore auto", None),
    ):
        assert kind_and_cap(name) == (kind, {} if cap is None else {"bucket_cap_mb": cap})


def test_the_bound_of_a_shaped_link():
    """20 ms to the first gradient and 1 MB at 10 MB/s, or computing, where that takes longer."""
    result = {
        "seconds": {"alone": [[0.05, 0.04, 0.05], [0.01, 0.06, 0.05]], "torch": [[0.3], [0.24]]},
        "raw": [[11e6, 10e6, 12e6], [10e6, 11e6, 11e6]],
        "first_gradient": [[0.01], [0.02]],
        "gradient_bytes": 1_000_000,
    }
    made = shaped_link.figures(result)
    assert made["steps"] == {"alone": 0.05, "torch": 0.3}
    assert made["bound"] == pytest.approx(0.02 + 0.1)
    assert "torch                        300.0      2.50" in shaped_link.table("100mbit", made)
    result["gradient_bytes"] = 1000
    assert shaped_link.figures(result)["bound"] == 0.05
    lines = shaped_link.records("100mbit", "transformer", result)
    assert [line["contender"] for line in lines] == ["alone", "torch"]


@pytest.mark.parametrize(
    ("gpus", "backend", "title"),
    [(0, None, None), (1, "cuda", "both ranks on one GPU"), (2, "nccl", "over NCCL")],
)
def test_the_demo_uses_what_gpus_there_are(monkeypatch, gpus, backend, title):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(demo._C, "cuda_probe", lambda: {"problem": "" if gpus else "no driver"})
    monkeypatch.setenv("WORLD_SIZE", "2")
    scenes = demo.scenes()
    assert [scene.name for scene in scenes] == ["machine", "link"] + ["gpu"] * (gpus > 0)
    if gpus:
        assert scenes[-1].init() == {"backend": backend}
        assert title in scenes[-1].title
        job = Job("text", [], 1, 1, "", device=scenes[-1].device)
        assert worker.has_own_gpus(job) == (gpus == 2)
        assert [worker.device_of(job, rank).index for rank in range(2)] == [0, gpus - 1]
    assert worker.device_of(Job("text", [], 1, 1, ""), 1) == torch.device("cpu")


def test_the_demo_tells_of_runs_without_a_trace(tmp_path):
    """On a GPU torch DDP leaves none; the other figures stand."""
    scene = demo.Scene("gpu", "", ("torch", "dpcore bucketed"))
    write_trace(tmp_path / "dpcore-bucketed.json")
    result = {
        "seconds": {name: [[0.001], [0.002]] for name in scene.contenders},
        "losses": {"torch": [[1.0], [2.0]], "dpcore bucketed": [[1.25], [2.0]]},
    }
    console = Console(record=True, width=100)
    demo.tell(scene, result, tmp_path, console)
    said = console.export_text()
    rows = [line.split() for line in said.splitlines()]
    assert ["torch", "2.00", "–", "–", "1.500"] in rows
    assert "losses differ by at most 0.1 in 1 steps" in said
    assert (tmp_path / "timeline.html").exists()
