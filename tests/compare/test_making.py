"""What make may take and return, what step may return, and what is said to anything else."""

import pytest
import torch
from torch import nn

from dpcore.base.user_code import loaded
from dpcore.errors import Error
from dpcore.tools.compare.training.making import Stepping, loss_in, made
from dpcore.tools.compare.training.ranks import schedule_of

BEGIN = "import torch\nfrom torch import nn\nmodel = nn.Linear(2, 1)\nx = torch.ones(3, 2)\n"
LOSS = "lambda model: model(x).sum()"


def file(folder, text):
    path = folder / f"own_{abs(hash(text))}.py"
    path.write_text(BEGIN + text)
    return f"{path}:make"


@pytest.mark.parametrize("arguments", ["rank, world", "rank", "", "*all", "rank, world, more=1"])
def test_make_takes_what_it_wants(tmp_path, arguments):
    name = file(tmp_path, f"def make({arguments}): return model, {LOSS}")
    stepping = Stepping(name, made(name, 1, 4))
    stepping.look()
    stepping.step(stepping.module)
    assert stepping.module.weight.grad.tolist() == [[3.0, 3.0]]


@pytest.mark.parametrize(
    "step",
    [
        LOSS,
        "lambda model: {'loss': model(x).sum(), 'logits': x}",
        "lambda model: (model(x).sum(), x)",
        "lambda model: type('Output', (), {'loss': model(x).sum()})()",
        "lambda model: model(x).sum().backward()",
        "lambda model: [loss := model(x).sum(), loss.backward()][0]",  # returned after backward
    ],
)
def test_step_returns_a_loss_or_calls_backward(tmp_path, step):
    """Never twice: the gradient is that of one backward."""
    name = file(tmp_path, f"def make(): return model, {step}")
    stepping = Stepping(name, made(name, 0, 2))
    stepping.look()
    for _ in range(2):
        stepping.module.zero_grad()
        stepping.step(stepping.module)
        assert stepping.module.weight.grad.tolist() == [[3.0, 3.0]]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return model", "returned the model alone"),
        ("return model, model, 3", "returned a tuple of 3"),
        ("return None", "it returned a NoneType"),
        (f"return {LOSS}, model.weight", "returned a function and a Parameter"),
        ("return nn.ReLU(), len", "no parameter to train"),
        (f"return nn.Linear(2, 1, device='meta'), {LOSS}", "parameters on meta"),
    ],
)
def test_make_that_returns_something_else(tmp_path, body, said):
    name = file(tmp_path, f"def make(rank, world): {body}")
    with pytest.raises(Error, match=said):
        made(name, 0, 2)


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ("lambda model: None", "it returned nothing and no parameter has a gradient"),
        ("lambda model: model(x)", r"a tensor of shape \(3, 1\)"),
        ("lambda model: model(x).sum().detach()", "needs no gradient"),
        ("lambda model: 3.0", "it returned a float"),
    ],
)
def test_a_step_without_a_loss(tmp_path, step, said):
    name = file(tmp_path, f"def make(): return model, {step}")
    with pytest.raises(Error, match=said):
        Stepping(name, made(name, 0, 2)).look()


def test_a_parameter_without_a_gradient_is_seen(tmp_path):
    name = file(tmp_path, f"model.unused = nn.Linear(1, 1)\ndef make(): return model, {LOSS}")
    stepping = Stepping(name, made(name, 0, 2))
    stepping.look()
    assert stepping.unused == ["unused.weight", "unused.bias"]


def test_names_that_lead_nowhere(tmp_path):
    path = file(tmp_path, "def other(): pass").removesuffix(":make")
    for name, said in (
        (f"{path}:make", "has no 'make'; it has .*other"),
        (f"{tmp_path}/none.py:make", "there is no file"),
        ("no_such_module:make", "no module 'no_such_module'"),
    ):
        with pytest.raises(Error, match=said):
            loaded(name, "make")
    three = file(tmp_path, "def make(a, b, c): pass")
    with pytest.raises(Error, match="has to take"):
        made(three, 0, 2)
    with pytest.raises(Error, match="is a int, not a function"):
        made(file(tmp_path, "make = 3"), 0, 2)


def test_a_file_may_import_what_lies_beside_it(tmp_path):
    (tmp_path / "beside_it.py").write_text("LAYERS = 3")
    name = file(tmp_path, f"import beside_it\ndef make(): return model, {LOSS}")
    assert isinstance(made(name, 0, 2).module, nn.Linear)


def test_own_schedules(tmp_path):
    path = tmp_path / "own_schedule.py"
    path.write_text(
        "import dpcore\nclass Mine(dpcore.LaunchSchedule):\n    pass\nready = Mine()\nwrong = 3\n"
    )
    assert type(schedule_of(f"{path}:Mine")).__name__ == "Mine"
    assert type(schedule_of(f"{path}:ready")).__name__ == "Mine"
    with pytest.raises(Error, match=r"is not a dpcore.LaunchSchedule but a int"):
        schedule_of(f"{path}:wrong")


def test_a_loss_that_needs_no_gradient_is_none():
    assert loss_in(torch.ones(1)) is None
    assert loss_in(torch.ones(1, requires_grad=True)) is not None
