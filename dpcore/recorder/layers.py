"""Layers in a trace: spans around the forward and the backward of modules.

Two hooks of the module bound its forward. Hooks on tensors bound its backward: it begins when the
gradient of its output arrives and ends when that of its input does. Nothing is wrapped, and the
hooks return nothing, so results keep their bits. A layer whose input needs no gradient, such as an
embedding, gets no backward span, because no hook would see its end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from dpcore.errors import Unsupported

Add = Callable[[str, int, int], None]  # name, begin, end
Hook = Callable[..., None]


def record_layers(modules: Any, add: Add) -> list[Any]:
    """Installs the hooks. Returns their handles: ``remove()`` ends the recording."""
    handles: list[Any] = []
    latest = [(0, 0)]  # the gradient with which the latest backward began, and when
    for name, module in _named(modules):
        before, behind = _hooks(f"layer {name}", latest, add)
        handles.append(module.register_forward_pre_hook(before))
        handles.append(module.register_forward_hook(behind, with_kwargs=True))
    return handles


def _named(modules: Any) -> list[tuple[Any, Any]]:
    if hasattr(modules, "items"):
        found = list(modules.items())
    else:
        found = list(enumerate(modules)) if isinstance(modules, Iterable) else []
    if not found or not all(hasattr(module, "register_forward_hook") for _, module in found):
        raise Unsupported(
            f"trace.layers: {type(modules).__name__} holds no modules; pass a list of layers, such "
            "as model.blocks, or a mapping with names for them"
        )
    return found


def _hooks(name: str, latest: list[tuple[int, int]], add: Add) -> tuple[Hook, Hook]:
    begun: list[int] = []

    def before(*_: Any) -> None:
        begun.append(time.monotonic_ns())

    def behind(_: Any, arguments: Any, named: Any, output: Any) -> None:
        if not begun:
            return
        add(name, begun.pop(), time.monotonic_ns())
        source = _with_gradient((*arguments, *named.values()))
        result = _with_gradient(output)
        if source is None or result is None:
            return
        back: list[int] = []

        def begins(gradient: Any) -> None:
            back.append(time.monotonic_ns())
            latest[0] = id(gradient), back[-1]

        def ends(gradient: Any) -> None:
            if not back:
                return
            begin, (which, when) = back.pop(), latest[0]
            # The previous layer's backward begins with the same gradient; its hook runs first.
            is_shared = which == id(gradient) and when > begin
            add(f"{name} back", begin, when if is_shared else time.monotonic_ns())

        result.register_hook(begins)
        source.register_hook(ends)

    return before, behind


def _with_gradient(values: Any) -> Any:
    """The first tensor in ``values`` that requires a gradient."""
    candidates = values if isinstance(values, list | tuple) else (values,)
    return next((value for value in candidates if getattr(value, "requires_grad", False)), None)
