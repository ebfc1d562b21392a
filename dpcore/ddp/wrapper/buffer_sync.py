"""Broadcasts rank 0's buffers (running means, counters) before each forward.

Buffers are tracked by name and module, not as tensors: one that was None or empty when the model
was wrapped, is registered by the first forward, or is replaced or resized later, is sent from the
next forward on. A hook reports newly registered buffers (dpcore/ddp/wrapper/parameters.py); a plain
step only checks that the known ones are still the same tensors.

The ranks must agree on the buffers. They compare names and shapes before the first two forwards,
since many programs make buffers in the first, and whenever their own have changed. In addition,
dpcore's communicators compare a hash of the list with every message. So ranks that differ get a
``Mismatch`` that names the buffer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container
from typing import Any, NamedTuple

import torch
from torch import nn

from dpcore import _C
from dpcore.ddp.mistakes.not_finite import FiniteBuffers
from dpcore.ddp.wrapper.model_group import ModelGroup
from dpcore.ddp.wrapper.module_state import compare, digest_of, lines_of_buffers
from dpcore.errors import Mismatch

_keeping_versions: Any = vars(torch.autograd)["_unsafe_preserve_version_counter"]
_COMPARED_FORWARDS = 2
_CHANGES_IN_MESSAGES = 4
_ABOUT_BUFFERS = ("the buffers of ranks", "the lists of sizes")  # and not about other calls
_ADVICE = "Make every rank register, replace and resize the same buffers before the same forward"


class _Batch(NamedTuple):
    """Buffers of one type on one device, which share a message."""

    flat: torch.Tensor
    parts: list[torch.Tensor]
    buffers: list[torch.Tensor]


def _getter_of(part: nn.Module) -> Callable[[str], Any]:
    """A function that returns a buffer of the module by its name, None if it is gone."""
    buffers: Any = part._buffers
    if isinstance(buffers, dict):
        return buffers.get
    return lambda name: getattr(part, name, None)  # a module of TorchScript


class BufferSync:
    """Sends the buffers of one wrapped module: one message per type, through flat tensors that
    persist between steps."""

    def __init__(
        self,
        group: ModelGroup,
        module: nn.Module,
        ignored: Container[str],
        device: torch.device,
        finite: FiniteBuffers | None = None,
    ) -> None:
        self._group, self._module, self._ignored = group, module, ignored
        self._device = device  # of the tensors that ranks compare
        self._finite = finite
        self._forwards = 0  # those that sent buffers
        self._lines: list[str] = []
        self._digest = 0
        self._changes: list[str] = []  # since the ranks compared
        self._names: list[str] = []
        self._sent: list[torch.Tensor] = []
        self._batches: list[_Batch] = []  # of these, once the ranks have compared them
        self._is_laid_out = False
        self.find_again()
        self._changes = []

    def find_again(self) -> None:
        """Lists the buffers again after modules or buffers were registered."""
        # How to look up each buffer, so that a replaced one is detected cheaply.
        self._lookups: list[tuple[Callable[[str], Any], str, str]] = [
            (_getter_of(part), name, full)
            for prefix, part in self._module.named_modules()
            for name in part._buffers.keys()  # noqa: SIM118  (TorchScript's has no iterator)
            if (full := f"{prefix}.{name}" if prefix else name) not in self._ignored
        ]
        self._tensors: list[Any] = []
        self._sizes = 0
        self._look()

    @property
    def has_any(self) -> bool:
        """Whether there is a buffer to send, or was at the last look."""
        if not self._sent and self._lookups:
            self._look()
        return bool(self._sent or self._changes)

    def _look(self) -> None:
        now = [get(name) for get, name, _ in self._lookups]
        sizes = _C.hash_of_sizes(now)
        if (
            sizes == self._sizes
            and len(now) == len(self._tensors)
            and all(map(operator.is_, now, self._tensors))
        ):
            return
        self._tensors, self._sizes = now, sizes
        sent: dict[str, torch.Tensor] = {}
        seen: set[int] = set()
        for tensor, (_, _, name) in zip(now, self._lookups, strict=True):
            if tensor is not None and tensor.numel() > 0 and id(tensor) not in seen:
                seen.add(id(tensor))
                sent[name] = tensor
        lines = lines_of_buffers(sent)
        self._changes += sorted({*lines} ^ {*self._lines})
        self._lines, self._digest = lines, digest_of(lines)
        self._names = list(sent)
        self._sent, self._is_laid_out = list(sent.values()), False

    @torch.inference_mode(False)  # the memory persists, and training may use it later
    def _lay_out(self) -> None:
        buffers, self._is_laid_out = self._sent, True
        before = {(batch.flat.dtype, batch.flat.device): batch for batch in self._batches}
        self._batches = []
        for dtype, device in dict.fromkeys((buffer.dtype, buffer.device) for buffer in buffers):
            own = [b for b in buffers if (b.dtype, b.device) == (dtype, device)]
            kept = before.get((dtype, device))
            if kept is not None and [p.shape for p in kept.parts] == [b.shape for b in own]:
                self._batches.append(kept._replace(buffers=own))
                continue
            flat = self._group.flat(sum(buffer.numel() for buffer in own), dtype, device)
            pieces = torch.split(flat, [buffer.numel() for buffer in own])
            parts = [part.view(b.shape) for part, b in zip(pieces, own, strict=True)]
            self._batches.append(_Batch(flat, parts, own))
        if self._finite is not None:
            names = {id(buffer): name for name, buffer in zip(self._names, buffers, strict=True)}
            self._finite.watch(
                {
                    names[id(buffer)]: part
                    for batch in self._batches
                    for buffer, part in zip(batch.buffers, batch.parts, strict=True)
                }
            )

    @torch.no_grad()
    def __call__(self, root: int = 0) -> None:
        self._look()
        changes, self._changes = self._changes[:_CHANGES_IN_MESSAGES], []
        try:
            self._forwards += 1
            if changes or self._forwards <= _COMPARED_FORWARDS:
                compare(self._group, self._lines, self._device, "buffers", _ADVICE)
            if not self._is_laid_out:
                self._lay_out()  # on GPUs all ranks allocate this memory together
            for batch in self._batches:
                self._send(batch, root)
            if self._finite is not None:
                self._finite.check(self._forwards, root)
        except Mismatch as problem:
            if not changes and not any(words in str(problem) for words in _ABOUT_BUFFERS):
                raise
            what = "changed here: " + ", ".join(changes) if changes else "did not change here"
            raise Mismatch(
                f"{problem}. Since the forward before, buffers {what}. {_ADVICE}"
            ) from None

    def _send(self, batch: _Batch, root: int) -> None:
        if self._group.rank == root:
            torch._foreach_copy_(batch.parts, batch.buffers)
        self._group.broadcast(batch.flat, root, content=self._digest)
        if self._group.rank != root:
            # The graph of an earlier forward may have saved the buffers. Its backward must not
            # fail because equal values were written into them.
            with _keeping_versions(tuple(batch.buffers)):
                torch._foreach_copy_(batch.buffers, batch.parts)
