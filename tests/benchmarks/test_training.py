"""The ranks of the training benchmarks: all learn the same, and all can be looked at."""

import gc
import json
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import dpcore
from benchmarks import noise_cost, shaped_link
from benchmarks.harness import shaped
from dpcore.tools.compare import demo
from dpcore.tools.compare.training.models import MODELS
from dpcore.tools.compare.training.ranks import SETTLING_STEPS, WARM_STEPS, kind_and_cap, warm_steps
from dpcore.tools.compare.training.start import RankFailed, run_job
from dpcore.tools.compare.training.text import LENGTH, Text
from dpcore.tools.compare.training.worker import Contender, Job
from dpcore.tools.show import figures_of, read_run
from dpcore.tools.show.buckets import bucket_spans
from dpcore.tools.show.figures import steps_of
from tests.faults.hosts import why_not


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
        assert figures.exposed_ms_per_step < figures.step_ms
        for rank in run.ranks:
            spans = bucket_spans(run, rank)
            assert spans
            assert all(span.operation >= 0 for span in spans)
            sent = sum(span.bytes for span in spans)
            assert sent == pytest.approx(4 * result["gradient_bytes"], rel=0.01)


def test_torch_is_timed_without_the_hooks_of_a_trace(tmp_path):
    """Torch DDP with a hook divides gradients in a pass of its own."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        alone = SimpleNamespace(rank=0, world_size=1, barrier=lambda: None)
        job = Job("many", ["torch"], 1, 1, str(tmp_path), world=1, optimizer="")
        contender = Contender(job, "torch", alone, Text())
        assert not contender.model._comm_hooks
        first = next(contender.model.module.parameters())
        assert not first._post_accumulate_grad_hooks
        contender.step()
        contender.trace(tmp_path / "torch.json")
        assert len(bucket_spans(*traced_rank(tmp_path / "torch.json"))) >= 4
        del contender
    finally:
        gc.collect()
        dist.destroy_process_group()


def traced_rank(path):
    run = read_run(path)
    return run, run.ranks[0]


def test_frozen_parameters_are_not_averaged():
    module = torch.nn.Linear(4, 2)
    module.weight.requires_grad = False
    contender = Contender.__new__(Contender)
    contender._module = module
    assert contender.gradient_bytes == 2 * 4


def test_the_raw_goodput_is_that_of_the_fastest_transfer(monkeypatch):
    now = iter([0.0, 2.0, 10.0, 11.0, 20.0, 24.0])
    monkeypatch.setattr(shaped.time, "perf_counter", lambda: next(now))
    alone = SimpleNamespace(rank=0, world_size=1, barrier=lambda: None)
    assert shaped.raw_goodput(alone, ["127.0.0.1"], 1000) == 1000


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
        ("torch over ours 1", "torch over ours", 1.0),
        ("dpcore auto", "dpcore auto", None),  # the schedule
        ("dpcore bucketed 0.5", "dpcore bucketed", 0.5),
        ("dpcore bucketed auto", "dpcore bucketed", "auto"),
        ("dpcore auto traced", "dpcore auto", None),
    ):
        assert kind_and_cap(name) == (kind, {} if cap is None else {"bucket_cap_mb": cap})


def test_whoever_chooses_a_schedule_settles_first():
    for name in ("dpcore", "dpcore auto", "dpcore auto 4", "dpcore auto traced"):
        assert warm_steps(name, 2) == SETTLING_STEPS
        assert warm_steps(name, 1) == WARM_STEPS  # nothing is chosen
    assert warm_steps("dpcore bucketed 4", 2) == warm_steps("torch", 2) == WARM_STEPS


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


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "namespaces can be made")
def test_training_over_a_real_link(tmp_path, monkeypatch):
    """Nobody's step beats the link, and everything that it names lies there."""
    contenders = ["alone", "torch 1", "dpcore bucketed 1"]
    kept = tmp_path / "shaped_link.jsonl"
    command = ["shaped_link", "--contenders", ",".join(contenders)]
    command += ["--rates", "200mbit", "--rounds", "1", "--model", "many"]
    command += ["--records", str(kept), "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    assert shaped_link.main() == 0
    records = {record["contender"]: record for record in map(json.loads, kept.open())}
    assert list(records) == contenders
    folder = tmp_path / "200mbit"
    model, _ = MODELS["many"]()
    gradient_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    for name, record in records.items():
        assert (record["rate"], record["model"], len(record["steps_s"])) == ("200mbit", "many", 3)
        assert record["goodput_bytes_per_s"] < 1.1 * 25e6
        trace = folder / f"{name.replace(' ', '-')}.json"
        assert trace.exists() == (name != "alone")
        if name != "alone":
            assert figures_of(read_run(trace)).world_size == 2
            assert min(record["steps_s"]) > 0.5 * gradient_bytes / 25e6  # less a burst of 64 KiB
    assert {"timeline.html", "timeline.png"} <= {path.name for path in folder.iterdir()}
    assert "dpcore-bucketed-1" in (folder / "timeline.html").read_text()


def test_what_measuring_noise_costs_is_measured():
    line = noise_cost.cost("many", 2, 2)
    assert line["step_s"] > 0
    assert list(line["costs"]) == ["every step", "one of ten"]
    assert 0 < line["bound"] < 1
    for of in line["costs"].values():
        assert of["low"] <= of["median"] <= of["high"]


def test_ranks_of_one_round_are_one_value():
    """Two ranks that see the same rounds have no narrower interval than one."""
    cpu = {"without": [1.0] * 7, "every step": [1.0 + n / 10 for n in range(7)]}
    one = {name: {"wall": [1.0] * 7, "cpu": cpu.get(name, [1.0] * 7)} for name in (
        "without", "every step", "one of ten", "two reads",
    )}  # fmt: skip
    alone, pair = noise_cost.costs_of([one], "mlp"), noise_cost.costs_of([one, one], "mlp")
    assert pair["costs"] == alone["costs"]
    other = {**one, "two reads": {"wall": [3.0] * 7, "cpu": [3.0] * 7}}
    assert noise_cost.costs_of([one, other], "mlp")["bound"] == 2.0


def test_the_first_traced_step_does_not_wait_for_a_rank_that_comes_later(tmp_path):
    """Rank 0 does: it has written the trace before."""
    path = tmp_path / "dpcore.json"

    def body(comm):
        model = dpcore.DataParallel(torch.nn.Linear(4, 4), comm=comm, schedule="bucketed")
        contender = Contender.__new__(Contender)
        contender.name, contender.model = "dpcore bucketed", model
        contender._comm, contender._trace, contender._device = comm, None, torch.device("cpu")
        contender.step = lambda recorded=False: model(torch.ones(1, 4)).sum().backward()
        contender.step()
        time.sleep(1.0 if comm.rank == 0 else 0.0)
        contender.trace(path)

    dpcore.spawn(body, 2, mode="threads")
    begins = [steps_of(rank)[0][0] for rank in read_run(path).ranks]
    assert abs(begins[1] - begins[0]) < 500_000_000
