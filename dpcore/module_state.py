"""Makes the ranks' models equal: a check that they are the same model, and rank 0's values."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dpcore.communicator import Communicator
from dpcore.errors import Mismatch
from dpcore.gradient_group import GradientGroup, urgent

_keeping_versions: Any = vars(torch.autograd)["_unsafe_preserve_version_counter"]
_CHUNK_BYTES = 4 << 20  # tensors of at least so many bytes are sent from where they are


def check_same_model(
    group: GradientGroup,
    parameters: Sequence[tuple[str, torch.Tensor]],
    options: Mapping[str, Any],
) -> None:
    """Raises ``Mismatch`` on every rank, naming the first parameter or option that differs from
    rank 0's."""
    lines = [f"{name}={value}" for name, value in options.items()]
    lines += [
        f"{name}: {list(tensor.shape)} {tensor.dtype}, strides {tensor.stride()}"
        for name, tensor in parameters
    ]
    device = parameters[0][1].device
    text = "\n".join(lines).encode()
    digest = int.from_bytes(hashlib.sha256(text).digest()[:7], "big")
    mine = torch.tensor([digest, len(text)], device=device)
    everybody = torch.empty(2 * group.world_size, dtype=torch.int64, device=device)
    group.all_gather(everybody, mine)
    facts = everybody.view(-1, 2).tolist()
    odd = [rank for rank, fact in enumerate(facts) if fact != facts[0]]
    if not odd:
        return
    of_0, of_odd = (
        _text_of(group, text, rank, facts[rank][1], device).split("\n") for rank in (0, odd[0])
    )
    raise Mismatch(
        f"rank {group.rank}: the models of ranks 0 and {', '.join(map(str, odd))} differ. "
        f"{_first_difference(of_0, of_odd, odd[0])}. Wrap the same model, with the same "
        "parameters to train and the same options, on all ranks"
    )


def _text_of(
    group: GradientGroup, mine: bytes, rank: int, length: int, device: torch.device
) -> str:
    text = torch.zeros(length, dtype=torch.uint8, device=device)
    if group.rank == rank:
        text.copy_(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
    group.broadcast(text, rank)
    return bytes(text.tolist()).decode()


def _first_difference(of_0: Sequence[str], of_odd: Sequence[str], odd: int) -> str:
    for here, there in zip(of_0, of_odd, strict=False):
        if here != there:
            return f"Rank 0 has '{here}' where rank {odd} has '{there}'"
    common = min(len(of_0), len(of_odd))
    who, longer = (0, of_0) if len(of_0) > common else (odd, of_odd)
    return f"The first parameter that only rank {who} has is '{longer[common]}'"


@torch.no_grad()
def broadcast_values(group: GradientGroup, tensors: Sequence[torch.Tensor], root: int = 0) -> None:
    """The values of ``root`` everywhere. Once per model: it allocates, where small tensors share
    a message, and for what is not contiguous."""
    for chunk in _chunks(tensors):
        pieces = [tensor.detach().reshape(-1) for tensor in chunk]
        flat = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        group.broadcast(flat, root)
        if group.rank != root:
            for tensor, value in zip(
                chunk, torch.split(flat, [t.numel() for t in chunk]), strict=True
            ):
                if value.data_ptr() != tensor.data_ptr():
                    tensor.copy_(value.view(tensor.shape))


def _chunks(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Tensors of one kind together, as many as fit."""
    chunks: list[list[torch.Tensor]] = []
    filling: dict[Any, int] = {}  # kind -> index of the chunk that takes more
    size: dict[Any, int] = {}
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        kind = (tensor.dtype, tensor.device)
        bytes_ = tensor.numel() * tensor.element_size()
        if bytes_ >= _CHUNK_BYTES:
            chunks.append([tensor])
            continue
        if kind not in filling or size[kind] + bytes_ > _CHUNK_BYTES:
            filling[kind], size[kind] = len(chunks), 0
            chunks.append([])
        chunks[filling[kind]].append(tensor)
        size[kind] += bytes_
    return chunks


class BufferSync:
    """Rank 0's buffers (running means, counters) everywhere, before each forward.

    One message per dtype, through flat tensors that are allocated once, and again when a module
    has put another tensor in a buffer's place.
    """

    def __init__(self, group: GradientGroup, module: nn.Module, ignored: Container[str]) -> None:
        self._group, self._module, self._ignored = group, module, ignored
        self.find_again()

    @property
    def has_any(self) -> bool:
        return bool(self._places)

    def find_again(self) -> None:
        """After modules were added."""
        # Where each buffer is looked up, so that one that was replaced is noticed cheaply.
        self._places: list[tuple[dict[str, Any], str]] = []
        found: set[int] = set()
        for prefix, part in self._module.named_modules():
            for name, buffer in part._buffers.items():
                full = f"{prefix}.{name}" if prefix else name
                if buffer is None or buffer.numel() == 0 or full in self._ignored:
                    continue
                if id(buffer) not in found:
                    found.add(id(buffer))
                    self._places.append((part._buffers, name))
        self._lay_out([holder[name] for holder, name in self._places])

    def _lay_out(self, buffers: Sequence[torch.Tensor]) -> None:
        self._current = list(buffers)
        self._batches: list[tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]] = []
        for dtype, device in dict.fromkeys((buffer.dtype, buffer.device) for buffer in buffers):
            own = [b for b in buffers if (b.dtype, b.device) == (dtype, device)]
            count = sum(buffer.numel() for buffer in own)
            if isinstance(self._group, Communicator):
                flat = self._group.empty(count, dtype=dtype)
            else:
                flat = torch.empty(count, dtype=dtype, device=device)
            pieces = torch.split(flat, [buffer.numel() for buffer in own])
            parts = [part.view(b.shape) for part, b in zip(pieces, own, strict=True)]
            self._batches.append((flat, parts, own))

    @torch.no_grad()
    def __call__(self, root: int = 0) -> None:
        now = [holder[name] for holder, name in self._places]
        if any(a is not b for a, b in zip(now, self._current, strict=True)):
            self._lay_out(now)
        for flat, parts, buffers in self._batches:
            if self._group.rank == root:
                torch._foreach_copy_(parts, buffers)
            self._group.broadcast(flat, root, **urgent(self._group))
            if self._group.rank != root:
                # A graph of an earlier forward may still hold them: writing equal values into
                # them must not make its backward fail.
                with _keeping_versions(tuple(buffers)):
                    torch._foreach_copy_(buffers, parts)
