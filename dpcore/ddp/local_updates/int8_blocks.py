"""Blocks of int8: the encoding that ``dp.DiLoCo(..., bits=8)`` sends instead of float32.

A block has 256 neighbouring numbers. They are divided by the block's scale, which brings the
largest to 127, and rounded. A message has all int8 of a tensor, then the float32 scales of its
blocks: 1.016 bytes per number. The error is at most half a scale, 1/254 of the block's largest
number.

A block with an infinity or a NaN is decoded as NaN throughout, so that divergence stays visible.
"""

from __future__ import annotations

import torch

BLOCK = 256


def message_bytes(elements: int) -> int:
    """The length in bytes of a message with ``elements`` numbers."""
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
    """Writes the mean of concatenated messages to ``out``. They are added in order, so ranks with
    the same messages get the same bits."""
    count = messages.numel() // message_bytes(out.numel())
    out.zero_()
    for message in messages.chunk(count):
        out.add_(decode(message, out.numel()))
    out.div_(count)
