"""When dynamo compiles a part of a wrapped model: one graph, or graphs that torch cuts.

dynamo asks torch's class which model's forward is running, and gives what it has traced to
DDPOptimizer, which cuts the graph where buckets end. Where Inductor compiles it, the graph stays
whole instead, and an operation behind each gradient lets it leave early (operations.py).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel.distributed import DistributedDataParallel

from dpcore.ddp.compiled import torch_private

if TYPE_CHECKING:
    from dpcore import _C
    from dpcore.ddp.wrapper.wrapped import Wrapped


AT_ITS_END = (
    "all gradients of a compiled backward come at its end, so that nothing overlaps with it"
)
LATE = (
    f"{AT_ITS_END}: the model was compiled before it was wrapped. Wrap it before its first "
    "compiled forward, or call torch._dynamo.reset() after wrapping (docs/compile.md)"
)
_NOT_HEARD = (
    "its graph was compiled within backward, as in a re-entrant checkpoint, or only some inputs "
    "were asked for, as by backward(inputs=...)"
)
IN_VAIN = (
    "has compiled nothing: dynamo skips the frames of torch's own classes. Use torch.compile() of "
    "the module, or compile() of a module of your own around it (docs/compile.md)"
)

_NAMED = 3  # parameters or modules in a line


class Graphs:
    """What dynamo has compiled of a model."""

    def __init__(self) -> None:
        self.whole = 0  # graphs with operations
        self.cut = 0  # graphs that were given to DDPOptimizer
        self.why_cut = ""
        self._has_said = False

    @property
    def count(self) -> int:
        """How many there are."""
        return self.whole + self.cut

    def are_late(self, reducer: _C.Reducer) -> bool:
        """Whether one graph, which nothing has cut, has delivered all gradients at its end."""
        early, compiled = reducer.early_gradients, reducer.compiled_gradients
        return self.cut == 0 and compiled > 0 and early == 0

    def warn(self, model: Wrapped) -> None:
        """Warns once for each model that was compiled before it was wrapped, or in vain."""
        for line in self.in_words(model):
            if not self._has_said and line.endswith((LATE, IN_VAIN)):
                self._has_said = True
                warnings.warn(f"{model._model_group.name}: {line}", stacklevel=2)

    def in_words(self, model: Wrapped) -> list[str]:
        """Lines for the report of buckets; none for a model that is not compiled."""
        reducer = model._reducer
        early, compiled = reducer.early_gradients, reducer.compiled_gradients
        declined = reducer.declined_gradients
        if self.cut:
            return [f"torch.compile: graphs are cut where buckets end, because {self.why_cut}"]
        if self.are_late(reducer) and not declined:
            why = _why_unseen(model) or (_NOT_HEARD if self.whole else "")
            return [f"{AT_ITS_END}: {why} (docs/compile.md)" if why else LATE]
        if not compiled:
            return _compiled_in_vain(model.module)
        lines = [f"torch.compile: {early} of {compiled} gradients left while their graph ran"]
        for why in dict.fromkeys(declined.values()):
            names = _first([name for name, reason in declined.items() if reason == why])
            lines.append(f"torch.compile: not those of {names}: {why}")
        return lines


def _first(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def listen() -> None:
    """Takes part in what dynamo compiles from here on, if this torch has what that needs."""
    torch_private.when_dynamo_compiles(_compile, lambda: _running()[1] is not None)


def _running() -> tuple[Any, Graphs | None]:
    """The model whose forward runs, with its graphs unless it is of torch's own class."""
    model: Any = DistributedDataParallel._active_ddp_module
    return model, getattr(model, "_graphs", None)


def _compile(backend: Any, graph: Any, inputs: Any, cut: Callable[[], Any]) -> Any:
    model, graphs = _running()
    if graphs is None:
        return cut()
    model._reducer.look_again()
    why = why_cut(model, backend, graph)
    if why:
        graphs.cut += 1
        graphs.why_cut = why
        if torch_private.missing() or not torch_private.is_inductor(backend):
            return cut()
    from dpcore.ddp.compiled.operations import AnnounceGradients, CacheKey, behind_producers

    if why:
        with torch_private.passes(backend, CacheKey):
            return cut()
    graphs.whole += 1
    with torch_private.passes(backend, AnnounceGradients, behind_producers):
        return backend(graph, inputs)


def _why_unseen(model: Wrapped) -> str:
    """Why dynamo does not ask dpcore what to do with graphs of this model; empty if it does."""
    if model._across is not None:
        return f'schedule="{model.schedule}" waits in hooks on modules, which divide the model'
    if not model._is_seen_by_dynamo:
        return "ranks are threads, which share the class by which dynamo asks"
    return torch_private.why_dynamo_does_not_ask()


def _compiled_in_vain(module: torch.nn.Module) -> list[str]:
    """A line if ``compile()`` was called of modules in which dynamo compiles nothing."""
    names = [
        name or "the model"
        for name, part in module.named_modules()
        if part._compiled_call_impl is not None and torch_private.is_skipped(part)
    ]
    return [f"compile() of {_first(names)} {IN_VAIN}"] if names else []


def seen_by_dynamo(module: Any) -> Any:
    """A function that calls the module, where dynamo is asked to compile and would skip the frames
    of torch.nn's own class, as those of ``nn.Sequential``; else the module itself."""
    if torch_private.is_compiling() and torch_private.is_skipped(module):
        return torch_private.in_a_frame_of_its_own(module)
    return module


def why_cut(model: Wrapped, backend: Any, graph: Any) -> str:
    """Why gradients could not leave one graph early; empty if they can."""
    if missing := _said_missing():
        return f"this torch has no {missing}"
    if not torch_private.is_inductor(backend):
        return "the backend is not Inductor"
    if not torch_private.takes_operations(backend):
        return "Inductor's options ask for cpp_wrapper or for another pass over joint graphs"
    if torch_private.has_graphs_within(graph):
        return "the graph calls subgraphs"
    if model.static_graph:
        return "static_graph=True expects gradients when autograd adds them"
    if model._comm_hooks:
        return "a communication hook may change parameters that the graph still reads"
    return ""


@functools.cache
def _said_missing() -> str:
    missing = torch_private.missing()
    if missing:
        warnings.warn(
            f"dpcore: torch {torch.__version__} has no {missing}, so graphs of compiled models are "
            "cut where buckets end, as by torch DDP",
            stacklevel=2,
        )
    return missing
