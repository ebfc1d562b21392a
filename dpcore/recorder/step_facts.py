"""What recorded steps show beside their events: when forward begins with which module, how much of
a core the program uses, and how long the optimizer takes.

Modules are seen once per model, in one recorded forward, by hooks that are removed after it. In a
program that has compiled code they are not looked at, since hooks would compile it again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

_LOOKED_AT = 2  # of the forwards that are recorded: the first may still warm up


class StepFacts:
    """``modules``: those with parameters of their own, with the numbers of these parameters."""

    def __init__(self, root: Any, modules: Sequence[tuple[Any, Sequence[int]]]) -> None:
        self._root, self._modules = root, modules
        self._forwards = 0
        self._handles: list[Any] = []
        self._begins: dict[int, int] = {}  # by the module's id
        self._begin = self._end = 0  # of the forward that was looked at
        self._step = (0, 0)  # begin of this step, and what its thread had used of processors
        self._busy: float | None = None
        self._optimizer_begin = 0
        self._optimizers = 0  # nanoseconds that they have taken since forward began
        self._update: int | None = None  # the least of a step

    def forward_begins(self) -> None:
        """Of a step that is recorded."""
        self._forwards += 1
        self._listen_no_more()
        if self._forwards == _LOOKED_AT and not _has_compiled():
            for module in self._root.modules():
                self._handles.append(module.register_forward_pre_hook(self._saw))
            self._begin = time.monotonic_ns()
        self._end_step()
        self._optimizer_begin = 0  # one that calls a closure is no part of a step by itself
        self._step = time.monotonic_ns(), time.thread_time_ns()

    def forward_ends(self) -> None:
        if self._handles:
            self._end = time.monotonic_ns()
            self._listen_no_more()

    def backward_ends(self) -> None:
        """Before its thread waits for buckets. Another program makes a step longer and not more
        busy, so the largest share counts."""
        begin, used = self._step
        share = (time.thread_time_ns() - used) / max(1, time.monotonic_ns() - begin)
        self._busy = max(self._busy or 0.0, min(1.0, share))

    def optimizer_begins(self) -> None:
        """Of a program that steps by itself."""
        self._optimizer_begin = time.monotonic_ns()

    def optimizer_ends(self) -> None:
        if self._optimizer_begin:
            self._optimizers += time.monotonic_ns() - self._optimizer_begin
            self._optimizer_begin = 0

    def _end_step(self) -> None:
        """The first step of an optimizer makes its state, so the least one counts."""
        if self._optimizers:
            self._update = min(self._update or self._optimizers, self._optimizers)
            self._optimizers = 0

    def facts(self) -> dict[str, Any]:
        """``modules`` in the order of forward: the gradients of each, and the share of forward that
        is over when it begins; empty where nothing was seen. A module that is not called, since
        another one reads its parameters, begins with the one that holds it. ``busy``: the share of
        forward and backward in which their thread used a core. ``update_ms``: of a step's
        optimizers, where the program steps them."""
        found: list[tuple[int, list[int]]] = []
        if self._end > self._begin:
            numbers = {id(module): list(own) for module, own in self._modules}
            self._add(self._root, self._begin, numbers, found)
            found.sort(key=lambda pair: pair[0])
        seconds = self._end - self._begin
        modules = [
            {"gradients": gradients, "begin": round((begin - self._begin) / seconds, 4)}
            for begin, gradients in found
        ]
        self._end_step()
        busy = {} if self._busy is None else {"busy": round(self._busy, 3)}
        update = {} if self._update is None else {"update_ms": round(self._update * 1e-6, 3)}
        return {"modules": modules, **busy, **update}

    def _saw(self, module: Any, _: Any) -> None:
        self._begins.setdefault(id(module), time.monotonic_ns())

    def _listen_no_more(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

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
