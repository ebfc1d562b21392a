"""Checks that all ranks have the same model, and broadcasts rank 0's values."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dpcore.comm.communicators.protocol import GradientGroup
from dpcore.comm.communicators.read_back import numbers_in
from dpcore.errors import Mismatch

_CHUNK_BYTES = 4 << 20  # tensors of at least this size are sent without a copy
_SAME_MODEL = (
    "Wrap the same model, with the same parameters to train, the same options and the same "
    "environment variables, on all ranks"
)


def check_same_model(
    group: GradientGroup,
    parameters: Sequence[tuple[str, torch.Tensor]],
    buffers: Mapping[str, torch.Tensor],
    options: Mapping[str, Any],
    number: int,
    subject: str = "models",
    advice: str = _SAME_MODEL,
) -> int:
    """Raises ``Mismatch`` on every rank, naming the first parameter, buffer or option that differs
    from rank 0's. Returns the largest of the ranks' ``number``."""
    lines = [f"{name}={value}" for name, value in options.items()]
    lines += [
        f"{name}: {list(tensor.shape)} {tensor.dtype}, strides {tensor.stride()}"
        for name, tensor in parameters
    ]
    lines += lines_of_buffers(buffers)
    return max(compare(group, lines, parameters[0][1].device, subject, advice, number))


def lines_of_buffers(buffers: Mapping[str, torch.Tensor]) -> list[str]:
    """The lines about buffers that ranks compare. Empty buffers are not sent."""
    return [
        f"buffer {name}: {list(buffer.shape)} {buffer.dtype}"
        for name, buffer in buffers.items()
        if buffer.numel() > 0
    ]


def compare(
    group: GradientGroup,
    lines: Sequence[str],
    device: torch.device,
    subject: str,
    advice: str,
    number: int = 0,
) -> list[int]:
    """All ranks call it. Raises ``Mismatch`` on every rank, naming the first line that differs from
    rank 0's. Returns the ranks' numbers."""
    text, facts = gather_facts(group, lines, device, number)
    odd = [rank for rank, fact in enumerate(facts) if fact[:2] != facts[0][:2]]
    if not odd:
        return [fact[2] for fact in facts]
    of_0, of_odd = (
        text_of(group, text, rank, facts[rank][1], device).splitlines() for rank in (0, odd[0])
    )
    raise Mismatch(
        f"rank {group.rank}: the {subject} of ranks 0 and {', '.join(map(str, odd))} differ. "
        f"{_first_difference(of_0, of_odd, odd[0])}. {advice}"
    )


def gather_facts(
    group: GradientGroup, lines: Sequence[str], device: torch.device, *numbers: int
) -> tuple[bytes, list[list[int]]]:
    """All ranks call it. Returns the lines as text, and of each rank the digest of its lines, the
    length of their text, and its numbers."""
    text = "\n".join(lines).encode()
    mine = torch.tensor([digest_of(lines), len(text), *numbers], device=device)
    gathered = torch.empty(len(mine) * group.world_size, dtype=torch.int64, device=device)
    group.all_gather(gathered, mine)
    rows = numbers_in(gathered.view(group.world_size, -1), group)
    return text, rows


def digest_of(lines: Sequence[str]) -> int:
    """A hash of 56 bits."""
    return int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:7], "big")


def text_of(group: GradientGroup, mine: bytes, rank: int, length: int, device: torch.device) -> str:
    """All ranks call it. Returns the text of ``rank``, which has ``length`` bytes."""
    if length == 0:
        return ""
    text = torch.zeros(length, dtype=torch.uint8, device=device)
    if group.rank == rank:
        text.copy_(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
    group.broadcast(text, rank)
    return bytes(numbers_in(text, group)).decode()


def _first_difference(of_0: Sequence[str], of_odd: Sequence[str], odd: int) -> str:
    for here, there in zip(of_0, of_odd, strict=False):
        if here != there:
            return f"Rank 0 has '{here}' where rank {odd} has '{there}'"
    common = min(len(of_0), len(of_odd))
    rank, longer = (0, of_0) if len(of_0) > common else (odd, of_odd)
    kind = "buffer" if longer[common].startswith("buffer ") else "parameter"
    return f"The first {kind} that only rank {rank} has is '{longer[common]}'"


@torch.no_grad()
def broadcast_values(group: GradientGroup, tensors: Sequence[torch.Tensor], root: int = 0) -> None:
    """Broadcasts the values of ``root``. Meant for once per model: it allocates memory to put
    small tensors into one message, and for tensors that are not contiguous."""
    for chunk in _chunks(tensors):
        pieces = [tensor.detach().reshape(-1) for tensor in chunk]
        flat = pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces)
        group.broadcast(flat, root)
        if group.rank != root:
            for tensor, value in zip(
                chunk, torch.split(flat, [t.numel() for t in chunk]), strict=True
            ):
                if value.data_ptr() != tensor.data_ptr():
                    tensor.copy_(value.view(tensor.shape))


def _chunks(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Groups tensors of one kind, as many as fit into a message."""
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
