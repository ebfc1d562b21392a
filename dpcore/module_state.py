"""Makes the ranks' models equal: a check that they are the same model, and rank 0's values."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from dpcore.communicator import Communicator
from dpcore.errors import Mismatch
from dpcore.gradient_group import GradientGroup

_keeping_versions: Any = vars(torch.autograd)["_unsafe_preserve_version_counter"]
_CHUNK_BYTES = 32 << 20  # of one broadcast: bounds the memory that it takes besides the tensors


def check_same_model(group: GradientGroup, parameters: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Raises ``Mismatch`` on every rank, naming the first parameter that differs from rank 0's."""
    lines = [
        f"{name}: {list(tensor.shape)} {tensor.dtype}, strides {tensor.stride()}"
        for name, tensor in parameters
    ]
    text = "\n".join(lines).encode()
    digest = int.from_bytes(hashlib.sha256(text).digest()[:7], "big")
    mine = torch.tensor([digest, len(text)])
    everybody = torch.empty(2 * group.world_size, dtype=torch.int64)
    group.all_gather(everybody, mine)
    facts = everybody.view(-1, 2).tolist()
    odd = [rank for rank, fact in enumerate(facts) if fact != facts[0]]
    if not odd:
        return
    model_of_0 = torch.zeros(facts[0][1], dtype=torch.uint8)
    if group.rank == 0:
        model_of_0.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    group.broadcast(model_of_0, 0)
    reference = bytes(model_of_0.tolist()).decode().split("\n")
    raise Mismatch(
        f"rank {group.rank}: the models differ between rank 0 and rank(s) {odd}. "
        f"{_first_difference(group.rank, lines, reference)}. Wrap the same model, with the same "
        "parameters to train, on all ranks"
    )


def _first_difference(rank: int, mine: Sequence[str], reference: Sequence[str]) -> str:
    for number, (here, there) in enumerate(zip(mine, reference, strict=False)):
        if here != there:
            return f"Parameter {number} is here '{here}', on rank 0 '{there}'"
    if len(mine) != len(reference):
        longer = mine if len(mine) > len(reference) else reference
        who = f"rank {rank}" if longer is mine else "rank 0"
        return (
            f"Here are {len(mine)} parameters, on rank 0 {len(reference)}; the first that only "
            f"{who} has is '{longer[min(len(mine), len(reference))]}'"
        )
    return "This rank's is as rank 0's"


@torch.no_grad()
def broadcast_values(group: GradientGroup, tensors: Sequence[torch.Tensor]) -> None:
    """Rank 0's values everywhere. Once per model: it allocates."""
    for chunk in _chunks(tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in chunk])
        group.broadcast(flat, 0)
        if group.rank != 0:
            for tensor, value in zip(
                chunk, torch.split(flat, [t.numel() for t in chunk]), strict=True
            ):
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
        if kind not in filling or size[kind] + bytes_ > _CHUNK_BYTES:
            filling[kind], size[kind] = len(chunks), 0
            chunks.append([])
        chunks[filling[kind]].append(tensor)
        size[kind] += bytes_
    return chunks


class BufferSync:
    """Rank 0's buffers (running means, counters) everywhere, before each forward.

    One message per dtype, through flat tensors that are allocated once.
    """

    def __init__(self, group: GradientGroup, buffers: Sequence[torch.Tensor]) -> None:
        self._group = group
        self._batches: list[tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]] = []
        kinds = dict.fromkeys((buffer.dtype, buffer.device) for buffer in buffers)
        for dtype, device in kinds:
            own = [b for b in buffers if (b.dtype, b.device) == (dtype, device) and b.numel() > 0]
            count = sum(buffer.numel() for buffer in own)
            if isinstance(group, Communicator):
                flat = group.empty(count, dtype=dtype)
            else:
                flat = torch.empty(count, dtype=dtype, device=device)
            pieces = torch.split(flat, [buffer.numel() for buffer in own])
            parts = [part.view(b.shape) for part, b in zip(pieces, own, strict=True)]
            self._batches.append((flat, parts, own))

    @torch.no_grad()
    def __call__(self) -> None:
        for flat, parts, buffers in self._batches:
            if self._group.rank == 0:
                torch._foreach_copy_(parts, buffers)
            self._group.broadcast(flat, 0)
            if self._group.rank != 0:
                # A graph of an earlier forward may still hold them: writing equal values into
                # them must not make its backward fail.
                with _keeping_versions(tuple(buffers)):
                    torch._foreach_copy_(buffers, parts)
