"""What the simulator reads from records: each step, modules, the optimizer, and no waits."""

import json
import time

import pytest
import torch
from torch import nn

import dpcore
from benchmarks.harness.sleeping import layers
from dpcore.base.link import Speed
from dpcore.errors import Error
from dpcore.tools.simulate import Gradients, Processors, gradients_of, predict
from tests.show.profiles import GLOO
from tests.show.traces import model_of, write_trace


def edited(path, rank, **event):
    """Adds an event of this rank, in milliseconds after the begin of the first forward."""
    content = json.loads(path.read_text())
    begin = min(e["ts"] for e in content["traceEvents"] if e["name"] == "forward")
    begin_ms, end_ms = event.pop("ms")
    content["traceEvents"].append(
        {"ph": "X", "pid": rank, "tid": 1, "ts": begin + begin_ms * 1e3,
         "dur": (end_ms - begin_ms) * 1e3, **event}
    )  # fmt: skip
    path.write_text(json.dumps(content))


def test_each_step_is_kept_beside_the_least(tmp_path):
    path = write_trace(tmp_path / "run.json")
    content = json.loads(path.read_text())
    forwards = [e for e in content["traceEvents"] if e["name"] == "forward" and e["pid"] == 1]
    for early, event in enumerate(sorted(forwards, key=lambda event: event["ts"])):
        event["ts"] -= 1000 * early
    path.write_text(json.dumps(content))
    work = gradients_of(path)
    assert work.forward == pytest.approx([6e-3, 6e-3])
    assert [step.forward[0] for step in work.spread] == pytest.approx([6e-3] * 3)
    assert [step.forward[1] for step in work.spread] == pytest.approx([6e-3, 7e-3, 8e-3])
    assert [step.ready[1] for step in work.spread] == [pytest.approx(work.ready[1])] * 3
    assert [step.world for step in work.on(5).spread] == [5, 5, 5]
    link = Speed(1e12)
    taken = [predict(step, link, "sequential").step_ms for step in work.spread]
    assert taken == pytest.approx([14, 15, 16], rel=0.01)
    assert gradients_of(write_trace(tmp_path / "one.json", steps=1)).spread == ()


def test_waits_and_updates_within_forward_are_not_computed(tmp_path):
    """Forward takes 6 ms, of which it waits 2 and updates 1; backward 8, of which it waits 2."""
    path = write_trace(tmp_path / "run.json", ranks=1, steps=1)
    edited(path, 0, ms=(1, 3), cat="exposed", name="all_gather", args={"operation": 0, "bytes": 8})
    edited(path, 0, ms=(4, 5), cat="compute", name="update")
    edited(path, 0, ms=(9, 11), cat="exposed", name="all_gather", args={"operation": 0, "bytes": 8})
    work = gradients_of(path)
    assert work.forward == pytest.approx([3e-3])
    assert work.backward == pytest.approx([6e-3])
    assert work.ready[0] == pytest.approx([2e-3, 3e-3, 4e-3, 6e-3])
    assert work.update == pytest.approx([1e-3])


def test_an_update_of_parts_is_one_of_all_on_one_rank(tmp_path):
    models = [{**model_of(2), "schedule": "zero1"}]
    path = write_trace(tmp_path / "run.json", ranks=2, steps=1, models=models)
    for rank in range(2):
        edited(path, rank, ms=(15, 16), cat="compute", name="update")
    assert gradients_of(path).update == pytest.approx([2e-3, 2e-3])


def test_modules_of_a_trace(tmp_path):
    modules = [{"gradients": [2, 3], "begin": 0.0}, {"gradients": [0, 1], "begin": 0.5}]
    models = [{**model_of(2), "modules": modules}]
    work = gradients_of(write_trace(tmp_path / "run.json", models=models))
    assert work.modules == [[2, 3], [0, 1]]
    assert work.begins == [pytest.approx([0, 3e-3])] * 2
    wrong = [{**model_of(2), "modules": [{"gradients": [4], "begin": 0.0}]}]
    with pytest.raises(Error, match="a module with gradient 4, of 4 parameters"):
        gradients_of(write_trace(tmp_path / "wrong.json", models=wrong))


def test_a_description_may_say_what_forward_needs_when(tmp_path):
    def described(*needed):
        gradients = [{"bytes": 4096, "ready_ms": 2, "needed_ms": each} for each in needed]
        gradients.append({"bytes": 8192, "ready_ms": 1, "needed_ms": 3})
        content = {"forward_ms": 5, "backward_ms": 2, "update_ms": 4, "gradients": gradients}
        (tmp_path / "gradients.json").write_text(json.dumps(content))
        return gradients_of(tmp_path / "gradients.json")

    work = described(4, 1)
    assert work.modules == [[1], [2], [0]]
    assert work.begins == [pytest.approx([1e-3, 3e-3, 4e-3])]
    assert work.update == pytest.approx([4e-3])
    with pytest.raises(Error, match="needs a gradient at 6 ms, after the end of forward at 5 ms"):
        described(6)
    content = json.loads((tmp_path / "gradients.json").read_text())
    del content["gradients"][0]["needed_ms"]
    (tmp_path / "gradients.json").write_text(json.dumps(content))
    with pytest.raises(Error, match="says needed_ms of 1 of 2 gradients"):
        gradients_of(tmp_path / "gradients.json")


def test_steps_of_torchs_own_profile():
    work = gradients_of(*GLOO)
    assert len(work.spread) == 3
    assert all(0 < each < 0.1 for each in work.update)
    assert min(step.forward[0] for step in work.spread) == work.forward[0]


def test_layers_that_sleep_are_not_busy(tmp_path):
    def body(comm):
        model = dpcore.DataParallel(layers([64] * 3, 0.01, 0.01)[0], comm=comm)
        with dpcore.trace(tmp_path / "run.json", comm=comm):
            model(torch.ones(4)).sum().backward()

    dpcore.spawn(body, 1, mode="threads")
    work = gradients_of(tmp_path / "run.json")
    assert work.forward[0] > 0.03
    assert work.busy[0] < 0.5
    assert work.on(3).busy == work.busy * 3
    one_core = Processors(cores=1, ranks=4)
    assert predict(work.on(4), Speed(1e12), "oracle", processors=one_core).step_ms < 150


def test_a_run_says_how_long_its_optimizer_takes(tmp_path, monkeypatch):
    taken = iter([0.03, 0.01, 0.02])

    def step(self, closure=None):
        time.sleep(next(taken))

    monkeypatch.setattr(torch.optim.SGD, "step", torch.optim.Optimizer.profile_hook_step(step))

    def body(comm):
        model = dpcore.DataParallel(layers([64] * 3, 0.001, 0.001)[0], comm=comm)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with dpcore.trace(tmp_path / "run.json", comm=comm):
            for _ in range(3):
                model(torch.ones(4)).sum().backward()
                optimizer.step()

    dpcore.spawn(body, 1, mode="threads")
    work = gradients_of(tmp_path / "run.json")
    assert 0.01 <= work.update[0] < 0.02
    assert not work.unknown
    alone = predict(work, Speed(1e12), "bucketed").step_ms
    assert alone >= 1e3 * (work.compute_seconds + work.update[0]) * 0.999


def with_closure(model):
    def closure():
        loss = model(torch.ones(4)).sum()
        loss.backward()
        return loss

    torch.optim.SGD(model.parameters(), 0.1).step(closure)


@pytest.mark.parametrize(
    "train", [lambda model: model(torch.ones(4)).sum().backward(), with_closure]
)
def test_an_optimizer_that_is_not_recorded_is_said(train, tmp_path):
    """One that calls forward and backward is no part of a step."""

    def body(comm):
        model = dpcore.DataParallel(layers([64] * 3, 0.001, 0.001)[0], comm=comm)
        with dpcore.trace(tmp_path / "run.json", comm=comm):
            train(model)

    dpcore.spawn(body, 1, mode="threads")
    (unknown,) = gradients_of(tmp_path / "run.json").unknown
    assert unknown == "the optimizer's step (it is taken to take no time)"


class Crossed(nn.Module):
    """Layers that forward needs in another order than they were made in; ``out_proj`` of attention
    is read and not called."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(16, 16)
        self.attention = nn.MultiheadAttention(16, 2)
        self.first = nn.Linear(16, 16)

    def forward(self, x):
        x = self.first(x)
        return self.last(self.attention(x, x, x)[0])


@pytest.mark.parametrize("schedule", ["oracle", "bucketed"])
@pytest.mark.filterwarnings("ignore:schedule 'oracle'")
def test_a_run_says_when_forward_begins_with_which_module(schedule, tmp_path):
    def body(comm):
        model = dpcore.DataParallel(Crossed(), comm=comm, schedule=schedule)
        with dpcore.trace(tmp_path / "run.json", comm=comm):
            for _ in range(3):
                model(torch.randn(4, 2, 16)).square().sum().backward()
        assert not any(module._forward_pre_hooks for module in model.module.modules())

    dpcore.spawn(body, 2, mode="threads")
    work = gradients_of(tmp_path / "run.json")
    names = json.loads((tmp_path / "run.json").read_text())["otherData"]["models"][0]["parameters"]
    named = [[names[gradient].rsplit(".", 1)[0] for gradient in part] for part in work.modules]
    assert [set(part) for part in named] == [
        {"first"}, {"attention"}, {"attention.out_proj"}, {"last"}
    ]  # fmt: skip
    for begins, forward in zip(work.begins, work.forward, strict=True):
        assert begins == sorted(begins)
        assert 0 <= begins[0] < begins[1] == begins[2] < begins[3] < forward
    assert len(work.spread) == 3
    assert 0 < work.busy[0] <= 1
    assert predict(work, Speed(1e7), "zero1").buckets == 1


@pytest.mark.parametrize("busy", [0.0, 0.1, 0.5, 1.0])
def test_what_ranks_waited_for_a_core_is_counted_once(busy):
    """Four ranks that were recorded on two cores: their own steps come out as they were. All of a
    step, 1.0, is what a recording has that does not say how busy they were."""
    recorded = Gradients(
        [8, 8], [0, 0], [0.04], [0.08], [[0.03, 0.06]], update=[0.02], busy=[busy]
    ).on(4)
    work = recorded.on_cores_of_their_own(2, 4)
    assert work.update[0] == pytest.approx(0.01)
    shared = Processors(cores=2, ranks=4)
    again = predict(work, Speed(1.25e8, 1e-6), "oracle", processors=shared).step_ms
    assert again == pytest.approx(140, rel=1e-3)
    twice = predict(recorded, Speed(1.25e8, 1e-6), "oracle", processors=shared).step_ms
    assert twice == pytest.approx(160 + 120 * busy, rel=1e-3)
    assert recorded.on_cores_of_their_own(4, 4) == recorded
