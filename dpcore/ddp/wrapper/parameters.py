"""The parameters that a wrapped model averages, and a check that they have not changed.

torch DDP looks only in its constructor: parameters that are added, replaced or unfrozen later are
trained on each rank by itself, and the ranks silently drift apart. Here the next forward raises.

The check is nearly free: torch calls a hook when a parameter or module is registered, and a step
only looks at frozen parameters. dynamo traces the hook, because forward registers modules as well:
``self.layers[:2]`` of a ``ModuleList`` makes another one.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from dpcore.errors import Error

_NAMES_IN_MESSAGES = 8


def kept_parameters(module: nn.Module, ignored: Iterable[str]) -> list[tuple[str, nn.Parameter]]:
    """All parameters that are not ignored, with names. As in torch, a shared parameter is ignored
    only if all its names are; else it is listed once, under its first name that is not."""
    left_out = set(ignored)
    kept: dict[int, tuple[str, nn.Parameter]] = {}
    for prefix, part in module.named_modules():
        for own, parameter in part.named_parameters(prefix, recurse=False):
            if own not in left_out:
                kept.setdefault(id(parameter), (own, parameter))
    return list(kept.values())


def trained_parameters(module: nn.Module, ignored: Iterable[str]) -> list[tuple[str, nn.Parameter]]:
    """The ``kept_parameters`` that require a gradient."""
    return [(name, p) for name, p in kept_parameters(module, ignored) if p.requires_grad]


def names_to_ignore(module: nn.Module, delayed: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """The names that the program ignores, and all names of the delayed parameters."""
    late = {id(parameter): name for name, parameter in delayed}
    everything = module.named_parameters(remove_duplicate=False)
    return {
        *getattr(module, "_ddp_params_and_buffers_to_ignore", ()),
        *late.values(),
        *(name for name, parameter in everything if id(parameter) in late),
    }


def comes_sparse(module: nn.Module, parameters: Sequence[torch.Tensor]) -> list[bool]:
    sparse = {
        id(part.weight)
        for part in module.modules()
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse
    }
    return [id(parameter) in sparse for parameter in parameters]


def modules_with_parameters(
    module: nn.Module, parameters: Sequence[torch.Tensor]
) -> list[tuple[nn.Module, list[int]]]:
    """Each module with trained parameters of its own, and their numbers."""
    number_of = {id(parameter): number for number, parameter in enumerate(parameters)}
    found = []
    for part in module.modules():
        own = [number_of[id(p)] for p in part.parameters(recurse=False) if id(p) in number_of]
        if own:
            found.append((part, own))
    return found


def ignore_by_name(module: nn.Module, names: Iterable[str]) -> None:
    """Stores the names on a module as torch does, with the mark that other libraries look for."""
    names = list(names)
    vars(module)["_ddp_params_and_buffers_to_ignore"] = names
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if name in names:
            vars(tensor)["_ddp_ignored"] = True


class ParameterWatch:
    """Remembers the wrapped parameters, and raises when they have changed."""

    def __init__(
        self, module: nn.Module, trained: Sequence[tuple[str, torch.Tensor]], ignored: set[str]
    ) -> None:
        self._module = module
        self._ignored = ignored
        self._trained = {id(parameter) for _, parameter in trained}
        self._frozen = [
            parameter
            for _, parameter in kept_parameters(module, ignored)
            if not parameter.requires_grad
        ]
        self._mark_modules()
        self.touched = False
        with _watches_lock:
            _watches.add(self)
        _listen()

    def _mark_modules(self) -> None:
        for part in self._module.modules():
            vars(part)[_MARK] = True

    def check(self, learns: bool) -> bool:
        """Raises with the names of changed parameters where the forward ``learns``: others may use
        another adapter, say. Returns whether modules may have changed."""
        if _registered:
            _touch_all()
        if self.touched or self.has_thawed():
            if learns:
                self._compare()
            return True
        return False

    def has_thawed(self) -> bool:
        """Whether a parameter learns that did not when the model was wrapped."""
        return any(parameter.requires_grad for parameter in self._frozen)

    def _compare(self) -> None:
        now = trained_parameters(self._module, self._ignored)
        new = [name for name, parameter in now if id(parameter) not in self._trained]
        if new:
            names = ", ".join(new[:_NAMES_IN_MESSAGES]) + (
                ", ..." if new[_NAMES_IN_MESSAGES:] else ""
            )
            raise Error(
                f"{names}: added, replaced or unfrozen after the model was wrapped, so the "
                "gradients would stay each rank's own. Call refresh() of the wrapped model, on "
                "all ranks, after such a change"
            )
        self._mark_modules()
        self.touched = False


_MARK = "_dpcore_watches"  # an attribute of modules whose parameters are watched
_registered = False  # in a marked module, since the watches were told
_watches: weakref.WeakSet[ParameterWatch] = weakref.WeakSet()
_watches_lock = threading.RLock()  # ranks may be threads, and a set must not grow while it is read
_listening = False


def _listen() -> None:
    """Installs one hook of each kind for all models of the process, once."""
    global _listening
    if not _listening:
        _listening = True
        register_module_parameter_registration_hook(_note)
        register_module_module_registration_hook(_note)
        register_module_buffer_registration_hook(_note)


def _note(module: nn.Module, name: str, what: Any) -> None:
    """The hook. dynamo can trace it, and nothing of it is left in a graph that registers in a
    module of its own making."""
    global _registered
    # The names of buffers that are known are looked up before each forward.
    if _MARK in module.__dict__ and name not in module._buffers:
        _registered = True


# dynamo skips the files of this package (torch_face/dynamo.py), but traces code that has no file.
_note.__code__ = _note.__code__.replace(co_filename="<dpcore>")


def _touch_all() -> None:
    global _registered
    with _watches_lock:
        _registered = False
        for watch in _watches:
            watch.touched = True
