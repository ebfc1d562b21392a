"""The optimizers of examples/course against the formulas of their papers, number by number, and
against timm's where that is installed."""

import copy
import importlib
import importlib.util
import math
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

import dpcore as dp
from tests.course.conftest import COURSE
from tests.data_parallel.models import Small, batch, part

sys.path.insert(0, str(COURSE))
from optimizers import Lamb, Lars, NovoGrad

DECAY = 0.1


def length(values):
    return math.sqrt(sum(value * value for value in values))


def lars(w, g, state, is_layer, lr=0.5, momentum=0.9, eta=0.01):
    local = eta * length(w) / (length(g) + DECAY * length(w)) if is_layer else 1.0
    before = state.get("v", [0.0] * len(w))
    state["v"] = [
        momentum * v + lr * local * (a + DECAY * b) for v, a, b in zip(before, g, w, strict=True)
    ]
    return [b - v for b, v in zip(w, state["v"], strict=True)]


def lamb(w, g, state, is_layer, lr=0.02, beta1=0.9, beta2=0.999, eps=1e-6):
    t = state["t"] = state.get("t", 0) + 1
    state["m"] = [
        beta1 * m + (1 - beta1) * a for m, a in zip(state.get("m", [0.0] * len(g)), g, strict=True)
    ]
    state["v"] = [
        beta2 * v + (1 - beta2) * a * a
        for v, a in zip(state.get("v", [0.0] * len(g)), g, strict=True)
    ]
    r = [
        (m / (1 - beta1**t)) / (math.sqrt(v / (1 - beta2**t)) + eps)
        for m, v in zip(state["m"], state["v"], strict=True)
    ]
    u = [a + DECAY * b for a, b in zip(r, w, strict=True)]
    ratio = length(w) / length(u) if is_layer and length(w) > 0 else 1.0
    return [b - lr * ratio * a for a, b in zip(u, w, strict=True)]


def novograd(w, g, state, is_layer, lr=0.02, beta1=0.95, beta2=0.98, eps=1e-8):
    square = length(g) ** 2
    state["v"] = beta2 * state["v"] + (1 - beta2) * square if "v" in state else square
    scaled = [a / (math.sqrt(state["v"]) + eps) + DECAY * b for a, b in zip(g, w, strict=True)]
    before = state.get("m", [0.0] * len(g))
    state["m"] = [beta1 * m + a for m, a in zip(before, scaled, strict=True)]
    return [b - lr * m for b, m in zip(w, state["m"], strict=True)]


MAKE = {
    "lars": lambda p: Lars(p, lr=0.5, momentum=0.9, weight_decay=DECAY, eta=0.01),
    "lamb": lambda p: Lamb(p, lr=0.02, weight_decay=DECAY),
    "novograd": lambda p: NovoGrad(p, lr=0.02, weight_decay=DECAY),
}
FORMULAS = {"lars": lars, "lamb": lamb, "novograd": novograd}


def gradients_of(model, step):
    x, y = batch(step)
    model.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()


@pytest.mark.parametrize("name", MAKE)
def test_its_steps_are_those_of_the_paper(name):
    model = Small()
    trained = [p for p in model.parameters() if p.requires_grad]
    expected = [p.detach().flatten().tolist() for p in trained]
    states = [{} for _ in trained]
    optimizer = MAKE[name](trained)
    for step in range(3):
        gradients_of(model, step)
        expected = [
            FORMULAS[name](w, p.grad.flatten().tolist(), state, p.dim() > 1)
            for w, p, state in zip(expected, trained, states, strict=True)
        ]
        optimizer.step()
        for parameter, wanted in zip(trained, expected, strict=True):
            assert parameter.flatten().tolist() == pytest.approx(wanted, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", MAKE)
def test_it_goes_on_from_what_was_saved(name):
    model = Small()
    optimizer = MAKE[name](model.parameters())
    gradients_of(model, 0)
    optimizer.step()
    other = copy.deepcopy(model)
    again = MAKE[name](other.parameters())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, of in ((model, optimizer), (other, again)):
        gradients_of(one, 1)
        of.step()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", MAKE)
def test_weights_and_gradients_of_zero_stay_numbers(name):
    zero = nn.Parameter(torch.zeros(2, 3))
    still = nn.Parameter(torch.ones(2, 3))
    optimizer = MAKE[name]([zero, still, nn.Parameter(torch.ones(1))])  # the last has no gradient
    for _ in range(2):
        zero.grad, still.grad = torch.ones(2, 3), torch.zeros(2, 3)
        optimizer.step()
    assert zero.isfinite().all() and still.isfinite().all()
    assert not zero.eq(0).any()


def test_a_negative_rate_is_refused():
    with pytest.raises(ValueError, match=r"Lars: lr=-1 must be 0 or more"):
        Lars([nn.Parameter(torch.ones(1))], lr=-1)


@pytest.mark.parametrize("schedule", ["priority", "dear"])
@pytest.mark.parametrize("name", MAKE)
def test_across_steps_it_is_what_it_is_alone(name, schedule):
    def body(comm):
        models = []
        for how in ("bucketed", schedule):
            model = dp.DataParallel(Small(), comm=comm, schedule=how, deterministic=True)
            optimizer = MAKE[name]([p for p in model.parameters() if p.requires_grad])
            if how == schedule:
                optimizer = dp.DistributedOptimizer(optimizer, model)
            for step in range(3):
                x, y = (part(tensor, comm) for tensor in batch(step))
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
            models.append(list(model.parameters()))
        for plain, across in zip(*models, strict=True):
            torch.testing.assert_close(across, plain, rtol=1e-12, atol=1e-14)

    dp.spawn(body, 2, mode="threads")


def test_zero1_refuses_what_needs_whole_parameters():
    def body(comm):
        model = dp.DataParallel(Small(), comm=comm, schedule="zero1")
        with pytest.raises(dp.Unsupported, match="Lamb needs them whole"):
            dp.DistributedOptimizer(Lamb(model.parameters()), model)

    dp.spawn(body, 1, mode="threads")


def timms(monkeypatch, name):
    """One file of timm. The package itself imports torchvision, which is not needed here."""
    found = importlib.util.find_spec("timm")
    if found is None:
        pytest.skip("timm is not installed: pip install --no-deps timm")
    folder = Path(found.submodule_search_locations[0])
    for package, place in (("timm", folder), ("timm.optim", folder / "optim")):
        module = types.ModuleType(package)
        module.__path__ = [str(place)]
        monkeypatch.setitem(sys.modules, package, module)
    return importlib.import_module(f"timm.optim.{name}")


@pytest.mark.parametrize("name", MAKE)
def test_timms_go_the_same_way(name, monkeypatch):
    """On matrices: timm scales biases too. Without what timm adds to the papers (clipping)."""
    made = {
        "lars": lambda p: timms(monkeypatch, "lars").Lars(
            p, lr=0.5, momentum=0.9, weight_decay=DECAY, trust_coeff=0.01, eps=0.0
        ),
        "lamb": lambda p: timms(monkeypatch, "lamb").Lamb(
            p, lr=0.02, weight_decay=DECAY, max_grad_norm=None
        ),
        "novograd": lambda p: timms(monkeypatch, "nvnovograd").NvNovoGrad(
            p, lr=0.02, weight_decay=DECAY
        ),
    }
    ours, theirs = Small(), Small()
    pairs = []
    for model, make in ((ours, MAKE[name]), (theirs, made[name])):
        matrices = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
        pairs.append((model, make(matrices)))
    for step in range(5):
        for model, optimizer in pairs:
            gradients_of(model, step)
            optimizer.step()
    before = Small()
    close = {"rtol": 1e-5, "atol": 1e-8} if name == "novograd" else {"rtol": 1e-9, "atol": 1e-12}
    for a, b, c in zip(*(m.parameters() for m in (ours, theirs, before)), strict=True):
        torch.testing.assert_close(a, b, **close)  # timm's NovoGrad has its square in float32
        assert (a.dim() > 1 and a.requires_grad) == (not torch.equal(a, c))
