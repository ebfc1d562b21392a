"""When the forward of each module begins: a fact that a trace's description of a model holds.

It is seen once per model, in one forward that is recorded, by hooks that are removed after it. In
a program that has compiled code nothing is looked at, since hooks would compile it again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

_LOOKED_AT = 2  # of the forwards that are recorded: the first may still warm up


class ModuleBegins:
    """``modules``: those with parameters of their own, with the numbers of these parameters."""

    def __init__(self, root: Any, modules: Sequence[tuple[Any, Sequence[int]]]) -> None:
        self._root, self._modules = root, modules
        self._forwards = 0
        self._handles: list[Any] = []
        self._begins: dict[int, int] = {}  # by the module's id
        self._begin = self._end = 0

    def forward_begins(self) -> None:
        """Of a forward that is recorded."""
        self._forwards += 1
        self._listen_no_more()
        if self._forwards != _LOOKED_AT or _has_compiled():
            return
        for module in self._root.modules():
            self._handles.append(module.register_forward_pre_hook(self._saw))
        self._begin = time.monotonic_ns()

    def forward_ends(self) -> None:
        if self._handles:
            self._end = time.monotonic_ns()
            self._listen_no_more()

    def _listen_no_more(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _saw(self, module: Any, _: Any) -> None:
        self._begins.setdefault(id(module), time.monotonic_ns())

    def facts(self) -> list[dict[str, Any]]:
        """In the order of forward: the gradients of each module, and the share of forward that is
        over when it begins. A module that is not called, since another one reads its parameters,
        begins with the one that holds it. Empty where nothing was seen."""
        if self._end <= self._begin:
            return []
        numbers = {id(module): list(found) for module, found in self._modules}
        found: list[tuple[int, list[int]]] = []
        self._add(self._root, self._begin, numbers, found)
        found.sort(key=lambda pair: pair[0])
        seconds = self._end - self._begin
        return [
            {"gradients": gradients, "begin": round((begin - self._begin) / seconds, 4)}
            for begin, gradients in found
        ]

    def _add(
        self,
        module: Any,
        around: int,
        numbers: dict[int, list[int]],
        found: list[tuple[int, list[int]]],
    ) -> None:
        begin = self._begins.get(id(module), around)
        if gradients := numbers.pop(id(module), None):
            found.append((begin, gradients))
        for child in module.children():
            self._add(child, begin, numbers, found)


def _has_compiled() -> bool:
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and bool(utils.counters["frames"])
