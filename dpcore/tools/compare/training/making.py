"""The model of a comparison: one of ours by its name, or what a user's function ``make`` returns.

    def make(rank, world):          # also make(rank) or make()
        model = ...                 # a torch.nn.Module with parameters to train
        def step(model):            # gets the model as a contender has wrapped it
            return loss             # forward; its backward is called, unless step has called it
        return model, step

``make`` is called once per contender and rank, each time with the rank as the random seed, and
should give every rank as much work as the others; all begin with rank 0's weights. ``step`` needs
no optimizer: gradients are dropped before each step. Instead of the loss it may return what has
one: an object with ``.loss``, a dict with "loss", or a tuple that begins with it.

For a GPU, ``make`` is called with it as torch's default device, so that what it creates without
naming a device is there.
"""

from __future__ import annotations

import contextlib
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dpcore.base.user_code import loaded, names_code, place_of
from dpcore.errors import Error
from dpcore.tools.compare.training.models import MODELS


@dataclass(frozen=True)
class Made:
    """A model and what runs forward and backward of it, wrapped or not."""

    module: nn.Module
    run: Callable[[Any], Any]  # what step returns; backward may be left to do


def made(name: str, rank: int, world: int, device: torch.device | None = None) -> Made:
    """``name``: one of MODELS, ``file.py:make`` or ``package.module:make``."""
    place = device or torch.device("cpu")
    default = contextlib.nullcontext() if place.type == "cpu" else place
    if not names_code(name):
        if name not in MODELS:
            raise Error(f"no model {name!r}: there are {', '.join(MODELS)}, or write my.py:make")
        with default:
            return Made(*MODELS[name]())
    with _blamed(name, "make"), default:
        returned = _called(name, loaded(name, "make"), rank, world)
    return _checked(name, returned, place)


@contextlib.contextmanager
def _blamed(name: str, what: str) -> Iterator[None]:
    """An error in the user's code names the line there, not the way to it through dpcore."""
    try:
        yield
    except Error:
        raise
    except Exception as problem:
        frames = traceback.extract_tb(problem.__traceback__)
        mine = [
            frame for frame in frames if frame.filename.endswith(Path(place_of(name)).name)
        ] or frames
        at = f"{Path(mine[-1].filename).name}:{mine[-1].lineno}: {mine[-1].line}"
        raise Error(
            f"{name}: {what} raised {type(problem).__name__}: {problem}\n  {at}"
        ) from problem


def _called(name: str, make: Any, rank: int, world: int) -> Any:
    if not callable(make):
        raise Error(f"{name} is a {type(make).__name__}, not a function make(rank, world)")
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):
        return make(rank, world)
    for arguments in ((rank, world), (rank,), ()):
        with contextlib.suppress(TypeError):
            signature.bind(*arguments)
            break
    else:
        raise Error(
            f"{name}{signature} has to take (rank, world), (rank) or nothing, and to return "
            "(model, step)"
        )
    return make(*arguments)


def _checked(name: str, pair: Any, place: torch.device) -> Made:
    wanted = f"{name} has to return (model, step), a torch.nn.Module and a function step(model)"
    if isinstance(pair, nn.Module):
        raise Error(
            f"{wanted}; it returned the model alone. Add a function that runs forward on a batch "
            "and returns the loss: return model, lambda model: model(x).square().mean()"
        )
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        count = f" of {len(pair)}" if isinstance(pair, tuple | list) else ""
        raise Error(f"{wanted}; it returned a {type(pair).__name__}{count}")
    module, step = pair
    if not isinstance(module, nn.Module) or not callable(step):
        raise Error(f"{wanted}; it returned a {type(module).__name__} and a {type(step).__name__}")
    devices = {parameter.device.type for parameter in module.parameters()}
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise Error(f"{name}: the model has no parameter to train, so there is nothing to average")
    if not devices <= {"cpu", place.type}:
        on_gpu = place.type == "cpu" and devices <= {"cpu", "cuda"}
        raise Error(
            f"{name}: the model has parameters on {' and '.join(sorted(devices))}; dpcore compare "
            f"measures this model on the {'GPU' if place.type == 'cuda' else 'CPU'}"
            + ("; for GPUs: --device cuda" if on_gpu else "")
        )
    return Made(module, step)


def loss_in(returned: Any) -> torch.Tensor | None:
    """The loss whose backward is left to do, or None where step has nothing more to do."""
    if isinstance(returned, Mapping):
        returned = returned.get("loss", returned)
    elif isinstance(returned, tuple | list) and returned:
        returned = returned[0]
    elif not isinstance(returned, torch.Tensor):
        returned = getattr(returned, "loss", returned)
    return returned if isinstance(returned, torch.Tensor) and returned.requires_grad else None


class Stepping:
    """Forward and backward of one contender. The first step, of the bare model, shows whether step
    calls backward by itself, and which parameters it leaves without a gradient."""

    def __init__(self, name: str, made: Made, autocast: str = "") -> None:
        """``autocast``: the type of device on which steps run in bfloat16, "" for none."""
        self.module = made.module
        self._run, self._name, self._autocast = made.run, name, autocast
        self._calls_backward = False
        self.unused: list[str] = []

    def look(self) -> None:
        """Runs one step of the bare model."""
        module = self.module
        module.zero_grad()
        with _blamed(self._name, "step(model)"):
            returned = self._forward(module)
        self._calls_backward = any(p.grad is not None for p in module.parameters())
        loss = loss_in(returned)
        if not self._calls_backward:
            if loss is None or loss.numel() != 1:
                raise Error(
                    f"{self._name}: step(model) has to return the loss, a tensor with one element, "
                    f"or to call backward; it returned {_said(returned)} and no parameter has a "
                    "gradient"
                )
            torch.autograd.backward(loss)
        self.unused = [
            name for name, p in module.named_parameters() if p.requires_grad and p.grad is None
        ]
        module.zero_grad()

    def step(self, model: Any) -> Any:
        """The loss, which a GPU may still have to compute, or nan where step keeps it to itself."""
        if self._calls_backward:
            self._forward(model)
            return float("nan")
        loss = self.loss(model)
        torch.autograd.backward(loss)
        return loss.detach()

    def loss(self, model: Any) -> torch.Tensor:
        """Forward alone, of a step that leaves backward to do."""
        returned = self._forward(model)
        loss = loss_in(returned)
        if loss is None:
            raise Error(f"{self._name}: step(model) returned {_said(returned)}, not the loss")
        return loss

    def _forward(self, model: Any) -> Any:
        if not self._autocast:
            return self._run(model)
        with torch.autocast(self._autocast, torch.bfloat16):
            return self._run(model)


def _said(returned: Any) -> str:
    if isinstance(returned, torch.Tensor):
        grad = "" if returned.requires_grad else " that needs no gradient"
        return f"a tensor of shape {tuple(returned.shape)}{grad}"
    return "nothing" if returned is None else f"a {type(returned).__name__}"
