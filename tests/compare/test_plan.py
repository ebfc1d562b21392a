"""Contenders, links and worlds as a user writes them, and what is said to mistakes."""

import os

import pytest

from dpcore.errors import Error
from dpcore.tools import records
from dpcore.tools.compare import plan
from dpcore.tools.compare.training.bare import BY_DPCORE, BY_TORCH


@pytest.mark.parametrize(
    ("text", "inner"),
    [
        ("torch", "torch"),
        ("torch:100", "torch 100"),
        ("default", "dpcore"),
        ("auto", "dpcore"),
        ("auto:4", "dpcore auto 4"),
        ("bucketed:0.5", "dpcore bucketed 0.5"),
        ("bucketed:auto", "dpcore bucketed auto"),
        ("sequential", "dpcore sequential"),
        ("priority", "dpcore priority"),
        ("zero1:4", "dpcore zero1 4"),
        ("torch-zero1:8", "torch-zero1 8"),
        ("local_sgd:4", "local_sgd:4"),
        ("diloco", "diloco:64"),
        ("hook:fp16", "hook:fp16"),
        ("torch-hook:powersgd", "torch-hook:powersgd:1"),
        ("examples/reverse_order.py:ReverseOrder", "dpcore examples/reverse_order.py:ReverseOrder"),
    ],
)
def test_contenders(text, inner, monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)
    assert plan.contender(text).inner == inner
    assert plan.contender(text).name == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bucketd", "did you mean 'bucketed'"),
        ("torch:auto", "only bucketed:auto"),
        ("torch:0", "'0' is not a size in MiB"),
        ("torch:1.2.3", "not a size in MiB"),
        ("nobody.py:Schedule", "there is no file nobody.py"),
        ("torch,torch", "named twice"),
        ("", "no contender"),
        ("local_sgd:0", "'0' is not a number of steps"),
        ("diloco:often", "'often' is not a number of steps"),
        ("hook:powersgd:0", "'0' is not a rank of matrices"),
        ("hook:", "no hook ''"),
        ("zero1:auto", "only bucketed:auto"),
        ("zero3", "did you mean 'zero"),
        ("horovod", "There are torch, default"),
    ],
)
def test_mistaken_contenders(text, said):
    with pytest.raises(Error, match=said):
        plan.contenders(text.split(","))


def test_an_unknown_model_names_those_that_are_there():
    with pytest.raises(Error, match=r"did you mean 'transformer'.*my.py:make"):
        plan.model("tranformer")
    with pytest.raises(Error, match=r"there is no file nobody.py"):
        plan.model("nobody.py:make")


def cell(kind):
    return plan.Cell("1gbit" if kind != "machine" else "", kind, 2)


def test_over_an_emulated_link_torch_sends_through_dpcore():
    """Gloo would not be slowed down, and win."""
    two = plan.Plan("mlp", tuple(plan.contenders(["torch:1", "default"])), (), 1, 1.0, 1)
    assert two.turns(cell("machine")) == ["torch 1", "dpcore", "alone", BY_TORCH, BY_DPCORE]
    assert two.turns(cell("hosts")) == two.turns(cell("machine"))
    assert two.turns(cell("emulated")) == ["torch over ours 1", "dpcore", "alone", BY_DPCORE]


def test_steps_of_a_round_are_a_multiple_of_what_local_updates_need():
    names = ["torch", "local_sgd:4", "diloco:6"]
    assert plan.Plan("mlp", tuple(plan.contenders(names)), (), 1, 1.0, 1).every == 12


def test_a_changed_hook_begins_anew(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hooks.py").write_text("def mine(state, bucket): pass")
    mine = plan.Plan("mlp", tuple(plan.contenders(["hook:hooks.py:mine"])), (), 5, 1.0, 1)
    before = mine.identity()
    (tmp_path / "hooks.py").write_text("def mine(state, bucket): return None")
    assert mine.identity() != before


def test_rounds_belong_together_while_the_files_are_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text("a = 1")
    mine = plan.Plan("my.py:make", tuple(plan.contenders(["torch"])), (), 5, 1.0, 1)
    before = mine.identity()
    assert mine.identity() == before
    (tmp_path / "my.py").write_text("a = 2")
    assert mine.identity() != before


def test_rounds_with_other_modules_or_settings_are_no_longer_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_models.py").write_text("a = 1")
    mine = plan.Plan("own_models:make", tuple(plan.contenders(["torch"])), (), 5, 1.0, 1)
    before = mine.identity()
    (tmp_path / "own_models.py").write_text("a = 2")
    after = mine.identity()
    assert after != before
    monkeypatch.setenv("DPCORE_SCHEDULE", "sequential")
    assert mine.identity() != after


def test_a_changed_tree_is_another_one_after_the_next_change(tmp_path, monkeypatch):
    (tmp_path / "dpcore").mkdir()
    file = tmp_path / "dpcore" / "a.py"
    file.write_text("a = 1")
    monkeypatch.setattr(records, "ROOT", tmp_path)
    monkeypatch.setattr(records, "commit", lambda: "abc")
    assert records.code() == "abc"
    monkeypatch.setattr(records, "commit", lambda: "abc+")
    before = records.code()
    os.utime(file, (1, 1))
    assert before.startswith("abc+") and records.code() != before
