"""benchmarks/gpu as far as it goes without a GPU: what it trains, checks and says."""

import pytest
import torch
from torch import nn

import dpcore
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import sharing, steps
from benchmarks.gpu.models import ResNet50
from dpcore.tools.compare.training.models import Language
from tests.cuda_host.conftest import stand_in  # noqa: F401  (a fixture)
from tests.ranks.devices import on_devices


def shape_of(module):
    parameters = list(module.parameters())
    return sum(p.numel() for p in parameters), len(parameters)


def test_shapes_are_those_of_their_names():
    assert shape_of(ResNet50()) == (25_557_032, 161)
    with torch.device("meta"):
        count, tensors = shape_of(Language(50257, 768, 12, 12, 1024))
    assert 123e6 < count < 125e6 and tensors == 146


@pytest.mark.usefixtures("stand_in")
def test_launches_of_a_step_are_checked():
    def body(comm):
        model, step = steps.many_tensors(lambda m: dpcore.DataParallel(m, comm=comm), "cpu")
        step()
        assert steps.check_launches(model, step) == len(model.bucket_report())

        def on_the_host(module):
            return dpcore.DataParallel(module, comm=comm._on_host)

        on_host, step_on_host = steps.many_tensors(on_the_host, "cpu")
        with pytest.raises(RuntimeError, match=r"took 0 launches and copied 400 gradients alone"):
            steps.check_launches(on_host, step_on_host)
        assert steps.launches_of(model, step) == {"launches_per_step": len(model.bucket_report())}
        assert "took 0 launches" in steps.launches_of(on_host, step_on_host)["wrong"]

    on_devices(body, 1)


def test_steps_run_on_the_processor_as_well():
    model, step = steps.resnet50(lambda module: module, place="cpu", batch=2, side=32)
    step()
    assert all(p.grad is not None for p in model.parameters())


def test_only_a_model_of_dpcore_counts_launches():
    with pytest.raises(TypeError, match="Linear are not counted"):
        steps.check_launches(nn.Linear(1, 1), lambda: None)


def test_targets_are_judged():
    rows = [
        {"of_copy": 0.9, "target_of_copy": 0.85},
        {"of_copy": 0.8, "target_of_copy": 0.85},
        {"of_torch": 0.9, "target_of_torch": 0.95},
        {"of_torch": 1.0, "target_of_torch": 0.95},
        {"of_torch": 0.9, "target_of_torch": 0.95, "wrong": "took 0 launches"},
        {"what": "copy"},
    ]
    for row in rows:
        gpu.judge(row)
    assert [row.get("reached") for row in rows] == [True, False, True, False, False, None]


def test_shared_steps_are_those_of_the_slowest_rank(monkeypatch):
    of_ranks = [
        {"dpcore": [1.0, 2.0, 9.0], "torch over gloo": [8.0, 8.0, 8.0]},
        {"dpcore": [3.0, 1.0, 1.0], "torch over gloo": [1.0, 1.0, 1.0]},
    ]
    monkeypatch.setattr(dpcore, "spawn", lambda *_, **__: of_ranks)
    ours, torchs = sharing.shared_steps("400-tensors", steps.many_tensors)
    assert (ours["contender"], ours["seconds"], ours["of_torch"]) == ("dpcore", 3.0, 3 / 8)
    assert (torchs["seconds"], "target_of_torch" in torchs) == (8.0, False)
    gpu.judge(ours)
    assert ours["reached"]


def test_a_section_that_fails_leaves_the_others(monkeypatch, capsys):
    def breaks(*_):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(gpu, "copy_rate", lambda: 4.0)
    monkeypatch.setattr(gpu, "reduction", lambda *_: {"what": "reduction", "bytes_per_s": 3.0})
    monkeypatch.setattr(gpu, "flattening", breaks)
    monkeypatch.setattr(gpu, "all_reduce", lambda *_: [])
    monkeypatch.setattr(gpu, "_steps_of_one", lambda *_: [])
    monkeypatch.setattr(gpu, "shared_steps", lambda *_: [])
    heard = []
    rows, failures = gpu.measured(told=lambda rows, failures: heard.append(len(rows)))
    assert heard[:4] == [1, 4, 7, 10], "the file is not written after every section"
    assert [row["of_copy"] for row in rows] == [1.0] + 9 * [0.75]
    assert len(failures) == 3
    assert failures["flatten 4096 float32"].endswith("RuntimeError: no such kernel")
    assert "reduction float16" in capsys.readouterr().err

    with_target = {"what": "flatten", "bytes_per_s": 1.0, "target_of_copy": 0.85}
    monkeypatch.setattr(gpu, "flattening", lambda *_: [with_target])
    monkeypatch.setattr(gpu, "copy_rate", breaks)
    rows, failures = gpu.measured()
    assert list(failures) == ["copy"]
    assert len(rows) == 12 and not any("reached" in row for row in rows)

    rows, failures = gpu.measured(ends_at=0.0)
    assert rows == [] and failures["step 400-tensors"].endswith("no time was left")


def test_only_some_sections_beside_the_copy(monkeypatch):
    monkeypatch.setattr(gpu, "copy_rate", lambda: 4.0)
    monkeypatch.setattr(gpu, "shared_steps", lambda name, _: [{"what": "shared step"}])
    rows, failures = gpu.measured(only="shared step")
    sections = ["copy", "shared step 400-tensors", "shared step gpt2-124m-bf16"]
    assert [row["section"] for row in rows] == sections and not failures


def test_a_step_that_went_another_way_is_a_failure(monkeypatch):
    row = {"what": "step", "of_torch": 0.5, "target_of_torch": 0.95, "wrong": "took 0 launches"}
    for name in ("reduction", "flattening", "all_reduce", "shared_steps"):
        monkeypatch.setattr(gpu, name, lambda *_: [])
    monkeypatch.setattr(gpu, "_reductions", lambda *_: [])
    monkeypatch.setattr(gpu, "copy_rate", lambda: 4.0)
    monkeypatch.setattr(gpu, "_steps_of_one", lambda *_: [dict(row)])
    rows, failures = gpu.measured()
    names = ["step gpt2-124m-bf16", "step resnet50-bf16", "step 400-tensors"]
    assert failures == {name: f"{name}: took 0 launches" for name in names}
    assert [row["reached"] for row in rows[1:]] == [False] * 3, "and its times are in the file"


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gpu"])
    assert gpu.main() == 1
    assert capsys.readouterr().err.startswith("no GPU: ")
