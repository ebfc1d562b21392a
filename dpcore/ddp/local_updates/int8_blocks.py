"""Numbers in blocks of int8: what ``dp.DiLoCo(..., bits=8)`` sends instead of float32.

A block is 256 neighbouring numbers, divided by a scale of their own that brings the largest of them
to 127, and rounded. A message is all int8 of a tensor, then the float32 scales of its blocks: 1.016
bytes for a number. What is decoded is off by at most half a scale, 1/254 of the largest number of
the block.

A block with an infinity or a NaN is decoded as NaN throughout, so that a training that diverges
shows it.
"""

from __future__ import annotations

import torch

BLOCK = 256


def message_bytes(elements: int) -> int:
    """How long the message of so many numbers is."""
    blocks = -(-elements // BLOCK)
    return blocks * (BLOCK + 4)


def encode(numbers: torch.Tensor) -> torch.Tensor:
    """The message of a flat tensor, as uint8."""
    blocks = -(-numbers.numel() // BLOCK)
    padded = torch.zeros(blocks * BLOCK, dtype=torch.float32, device=numbers.device)
    padded[: numbers.numel()] = numbers
    rows = padded.view(blocks, BLOCK)
    scales = rows.abs().amax(dim=1) / 127
    # A block of zeros, or of numbers so small that the scale vanishes, is all zeros.
    steps = rows / torch.where(scales > 0, scales, 1.0).unsqueeze(1)
    rounded = steps.nan_to_num_(0.0, 0.0, 0.0).round_().clamp_(-127, 127).to(torch.int8)
    # Infinity times the zeros of an infinite block is NaN, as is NaN.
    return torch.cat([rounded.view(-1).view(torch.uint8), scales.view(torch.uint8)])


def decode(message: torch.Tensor, elements: int) -> torch.Tensor:
    """The numbers, in float32."""
    blocks = message.numel() // (BLOCK + 4)
    rounded = message[: blocks * BLOCK].view(torch.int8).view(blocks, BLOCK)
    scales = message[blocks * BLOCK :].clone().view(torch.float32)  # the clone is aligned
    return (rounded * scales.unsqueeze(1)).view(-1)[:elements]


def mean_of(messages: torch.Tensor, out: torch.Tensor) -> None:
    """The mean of what several messages of one length say, one behind the other, into ``out``.
    They are added in their order: whoever has the same messages has the same bits."""
    count = messages.numel() // message_bytes(out.numel())
    out.zero_()
    for message in messages.chunk(count):
        out.add_(decode(message, out.numel()))
    out.div_(count)
