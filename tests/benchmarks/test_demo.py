"""The demo: what it compares, what it says, and that all of it is where it says."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from dpcore.__main__ import main
from dpcore.tools.compare import demo, devices
from dpcore.tools.compare.demo_verdict import behind, ending, means, verdict
from dpcore.tools.compare.training import worker
from dpcore.tools.compare.training.worker import Job
from dpcore.tools.show import read_run
from dpcore.tools.show.buckets import bucket_spans
from tests.ranks import python
from tests.show.traces import write_trace


@pytest.mark.parametrize(
    ("gpus", "backend", "title"),
    [(0, None, None), (1, "cuda", "both ranks on one GPU"), (2, "nccl", "over NCCL")],
)
def test_the_demo_uses_what_gpus_there_are(monkeypatch, gpus, backend, title):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(devices, "why_no_gpu", lambda: "" if gpus else "no driver")
    monkeypatch.setenv("WORLD_SIZE", "2")
    scenes = demo.scenes()
    assert [scene.name for scene in scenes] == ["gpu"] * (gpus > 0) + ["machine", "link"]
    assert all(scene.contenders[0].startswith("torch") for scene in scenes)
    if gpus:
        assert scenes[0].init() == {"backend": backend}
        assert title in scenes[0].title
        job = Job("text", [], 1, 1, "", device=scenes[0].device)
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
        "choices": {"dpcore bucketed": [{"schedule": "sequential", "bucket_bytes": [4]}]},
    }
    console = Console(record=True, width=100)
    demo.tell(scene, result, tmp_path, console)
    said = console.export_text()
    rows = [line.split() for line in said.splitlines()]
    assert ["torch", "–", "2.00", "1.500"] in rows
    assert "losses differ by at most 0.1 in 1 steps" in said
    page = (tmp_path / "timeline.html").read_text()
    assert "nearest to the rounds' median, 2.00 ms. It sends after backward" in page
    kept = (tmp_path / "table.txt").read_text()
    assert ["torch", "–", "2.00", "1.500"] in [line.split() for line in kept.splitlines()]
    assert "losses differ by at most 0.1" in kept


def test_the_trace_that_is_shown_is_the_one_nearest_to_the_rounds(tmp_path, monkeypatch):
    """An odd moment, in which the shorter step seems the longer one, belies the table."""

    class Traced:
        def __init__(self, name, taken):
            self.name, self.taken = name, iter(taken)

        def trace(self, path):
            taken = next(self.taken)
            path.write_text(str(taken))
            return taken

    monkeypatch.setattr(worker, "report", lambda comm, line: None)
    contenders = [Traced("torch", [0.9, 1.05, 1.3]), Traced("dpcore zero1", [2.0, 0.6, 0.55])]
    medians = {"torch": 1.0, "dpcore zero1": 0.5}
    worker.trace_in_turn(contenders, medians, tmp_path, SimpleNamespace(rank=0))
    shown = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert shown == {"torch.json": "1.05", "dpcore-zero1.json": "0.55"}


def test_without_matplotlib_there_is_a_page_and_no_picture(tmp_path, monkeypatch):
    """As after `pip install .`, which brings no matplotlib along."""
    monkeypatch.setattr(demo, "find_spec", lambda _: None)
    scene = demo.Scene("machine", "", ("torch", "dpcore"))
    write_trace(tmp_path / "dpcore.json")
    result = {
        "seconds": {name: [[0.001], [0.002]] for name in scene.contenders},
        "losses": {name: [[1.0], [2.0]] for name in scene.contenders},
    }
    console = Console(record=True, width=200)
    demo.tell(scene, result, tmp_path, console)
    assert "no picture (it needs matplotlib)" in console.export_text()
    assert (tmp_path / "timeline.html").exists() and not (tmp_path / "timeline.png").exists()


@pytest.mark.parametrize("why_not", ["", "needs the right to make network namespaces"])
def test_over_a_slow_link_torch_and_dpcore_are_compared(monkeypatch, why_not):
    """Between namespaces over Gloo; an emulated link only slows down what goes over it."""
    monkeypatch.setattr(demo.namespaces, "why_not", lambda: why_not)
    link = demo.scenes()[1]
    assert (link.shaped, bool(link.link)) == (not why_not, bool(why_not))
    torchs = "torch over ours" if why_not else "torch"
    assert link.contenders == (torchs, "dpcore", "dpcore zero1")
    assert link.init() == ({"link": "1gbit,50us"} if why_not else {"transport": "tcp"})


def test_the_demo_over_a_link_without_rights(tmp_path, monkeypatch, capsys):
    """One step of each: the losses are compared, and everything that it names lies there."""
    python.run_first(monkeypatch, python.SETTLES_SOON)
    monkeypatch.setattr(demo.namespaces, "why_not", lambda: "needs rights that nobody has")
    link = demo.scenes()[1]
    monkeypatch.setattr(demo, "scenes", lambda: [link])
    out = str(tmp_path / "demo")
    assert main(["demo", "--out", out, "--rounds", "1", "--steps-per-round", "1"]) == 0
    said = capsys.readouterr().out
    assert "A real one needs rights that nobody has." in said
    apart = [float(number) for number in re.findall(r"losses differ by at most (\S+) in 1 ", said)]
    assert len(apart) == 1
    assert apart[0] < 1e-4
    named = [Path(name) for name in re.findall(r"(?:page|picture|table) ([^\s,]+)", said)]
    assert [path.name for path in named] == ["timeline.html", "timeline.png", "table.txt"]
    assert all(path.stat().st_size > 0 for path in named)
    assert "In short: 1 round is too few to tell which wins" in " ".join(said.split())
    assert "95%" not in said and "range of 1 round" in said
    for contender in link.contenders:
        assert contender in named[2].read_text()
        run = read_run(tmp_path / "demo" / "link" / f"{contender.replace(' ', '-')}.json")
        assert run.link == "1gbit,50us"
        for span in bucket_spans(run, run.ranks[0]):
            # Each rank sends as many bytes as the bucket has, with zero1 half of them in each
            # phase, and no link is faster than it is.
            sent = span.bytes / (2 if contender == demo.ACROSS else 1)
            assert span.end_ns - span.launch_ns > 0.95 * sent / 125e6 * 1e9


def test_what_goes_on_under_forward_is_compared_with_both(tmp_path):
    scene = demo.Scene("link", "there", ("torch", "dpcore", "dpcore zero1"), link="1gbit,50us")
    seconds = {"torch": 0.200, "dpcore": 0.180, "dpcore zero1": 0.150, "alone": 0.100}
    result = {
        "seconds": {name: [[step] * 10, [step] * 10] for name, step in seconds.items()},
        "losses": {name: [[1.0] * 10, [1.0] * 10] for name in scene.contenders},
    }
    console = Console(record=True, width=300)
    write_trace(tmp_path / "dpcore.json")
    won = demo.tell(scene, result, tmp_path, console)
    said = console.export_text()
    assert "then 0.75 of torch DDP's (95% between 0.75 and 0.75) and 0.83 of its own" in said
    assert "not tell whether" not in said
    assert won.ratio.median == pytest.approx(0.9)  # the verdict is about the defaults


def train_result(ours_ms, torch_ms, alone_ms=100.0, rounds=10):
    seconds = {"torch": torch_ms, "dpcore": ours_ms, "alone": alone_ms}
    return {
        "seconds": {
            name: [[(ms + 0.1 * (n % 3)) / 1e3 for n in range(rounds * 3)]] * 2
            for name, ms in seconds.items()
        }
    }


def test_who_wins_by_how_much_and_why():
    won = verdict("within this machine", train_result(105, 120), "torch", "dpcore", 3)
    assert won.winner == "dpcore"
    assert won.clause.startswith("dpcore wins within this machine, its step 12% shorter since ")
    assert "communication adds 5.00 ms to computing instead of 20.0 ms" in won.clause
    lost = verdict("over a link", train_result(120, 105), "torch", "dpcore", 3)
    assert lost.clause.startswith("torch DDP wins over a link, its step 12% shorter since ")
    assert ending([won, lost]) == (
        "In short: dpcore's step is 12% shorter than torch DDP's within this machine, "
        "and torch DDP's step is 12% shorter than dpcore's over a link."
    )
    scattered = verdict("here", scattering(0.0), "torch", "dpcore", 3)
    assert not scattered.winner
    assert scattered.clause.startswith("neither wins here, where their steps differ by less than")
    assert ending([scattered]) == "In short: neither dpcore nor torch DDP is faster here."


def scattering(gap_ms):
    """Ten rounds whose ratios lie around that of ``gap_ms``, dpcore's step shorter and longer."""
    steps = [[100 + gap_ms + 5 * (-1) ** n for n in range(10) for _ in range(3)]] * 2
    seconds = {"dpcore": steps, "torch": [[100.0] * 30] * 2, "alone": [[98.0] * 30] * 2}
    return {"seconds": {name: [[ms / 1e3 for ms in r] for r in of] for name, of in seconds.items()}}


def test_words_and_interval_of_a_verdict_are_of_one_estimate():
    """Few rounds have a range, and no winner even if 1 is outside of it."""
    few = verdict("here", train_result(105, 120, rounds=3), "torch", "dpcore", 3)
    assert few.ratio.high < 1 and not few.winner
    assert few.clause == "3 rounds are too few to tell which wins here"
    assert few.said == (
        "3 rounds are too few to tell which wins here. "
        "(dpcore's step over torch DDP's: 0.875, range of 3 rounds: 0.875 to 0.875.)"
    )
    won = verdict("here", train_result(105, 120), "torch", "dpcore", 3)
    assert "0.875, 95% between 0.875 and 0.875, 10 rounds.)" in won.said
    for gap in (-20.0, 0.0, 20.0):
        one = verdict("here", scattering(gap), "torch", "dpcore", 3)
        is_apart = not one.ratio.low <= 1 <= one.ratio.high
        assert bool(one.winner) == is_apart == ("Neither" not in one.said)


def test_what_communication_adds_is_never_below_nothing():
    """A busy machine may make computing alone the slower one."""
    odd = verdict("here", train_result(20, 105, alone_ms=107), "torch", "dpcore", 3)
    assert odd.clause == "dpcore wins here, its step 81% shorter"  # neither has costs to name
    real = verdict("here", train_result(20, 120, alone_ms=107), "torch", "dpcore", 3)
    assert real.clause.endswith("adds nothing that can be measured to computing instead of 13.0 ms")
    tied = verdict("here", train_result(107, 107, alone_ms=120), "torch", "dpcore", 3)
    assert "-" not in tied.clause and "adds nothing that can be measured with dpcore" in tied.clause
    (why,) = behind(verdict("here", train_result(110, 105, 200), "torch", "dpcore", 3), None, None)
    assert why.startswith("dpcore's step is longer; `dpcore compare`")


def test_no_column_in_which_dpcore_is_behind_goes_without_a_sentence():
    won = verdict("here", train_result(105, 120), "torch", "dpcore", 3)
    assert behind(won, (1.0, 5.0), None) == []
    (why,) = behind(won, (4.0, 1.0), {"schedule": "sequential", "bucket_bytes": [8]})
    assert "exposed time is 3.00 ms longer: since it sends after backward" in why
    lost = verdict("here", train_result(120, 105), "torch", "dpcore", 3)
    (why,) = behind(lost, None, None)
    assert "dpcore's step is longer since" in why
    tied = verdict("here", train_result(120, 105, rounds=3), "torch", "dpcore", 3)
    (why,) = behind(tied, None, None)
    assert "longer here, and 3 rounds are too few to conclude anything" in why
    scattered = verdict("here", scattering(1.0), "torch", "dpcore", 3)
    (why,) = behind(scattered, None, None)
    assert "less than steps scatter" in why


def test_two_gpus_average_by_nccl():
    choice = {"schedule": "bucketed", "bucket_bytes": [4, 4]}
    assert "memory that all have mapped" in means(choice, is_link=False)
    assert means(choice, is_link=False, by_nccl=True).endswith("; NCCL averages them on the GPUs.")
