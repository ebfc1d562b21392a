"""Blocks of int8: how far off, how long, and what becomes of numbers that are none."""

import pytest
import torch

from dpcore.ddp.local_updates import int8_blocks
from dpcore.ddp.local_updates.int8_blocks import BLOCK, decode, encode, mean_of, message_bytes


@pytest.mark.parametrize("elements", (1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 7))
@pytest.mark.parametrize("scale", (1e-30, 1.0, 1e30))
def test_a_number_is_off_by_half_a_step_of_its_block(elements, scale):
    numbers = torch.randn(elements, generator=torch.Generator().manual_seed(1)) * scale
    message = encode(numbers)
    assert message.numel() == message_bytes(elements) and message.dtype == torch.uint8
    found = decode(message, elements)
    for block, numbers_of_block in zip(found.split(BLOCK), numbers.split(BLOCK), strict=True):
        largest = numbers_of_block.abs().max()
        assert (block - numbers_of_block).abs().max() <= largest / 254 * (1 + 1e-5)
        at = numbers_of_block.abs().argmax()
        assert block[at] == pytest.approx(numbers_of_block[at].item(), rel=1e-6)


def test_a_block_has_a_scale_of_its_own():
    numbers = torch.cat([torch.full((BLOCK,), 1e-6), torch.full((BLOCK,), 1e6)])
    torch.testing.assert_close(decode(encode(numbers), 2 * BLOCK), numbers)


def test_zeros_and_numbers_next_to_zero():
    numbers = torch.zeros(BLOCK)
    assert decode(encode(numbers), BLOCK).tolist() == [0.0] * BLOCK
    numbers[3] = 1e-45  # its scale would be zero
    assert decode(encode(numbers), BLOCK).tolist() == [0.0] * BLOCK


@pytest.mark.parametrize("bad", (float("nan"), float("inf"), -float("inf")))
def test_a_block_that_is_no_number_any_more_shows_it(bad):
    numbers = torch.ones(2 * BLOCK)
    numbers[5] = bad
    found = decode(encode(numbers), 2 * BLOCK)
    assert found[:BLOCK].isnan().all()
    assert found[BLOCK:].tolist() == [1.0] * BLOCK


def test_the_mean_of_messages():
    numbers = [torch.full((300,), value) for value in (1.0, 2.0, 6.0)]
    out = torch.empty(300, dtype=torch.float64)
    mean_of(torch.cat([encode(each) for each in numbers]), out)
    assert out.tolist() == pytest.approx([3.0] * 300)
    assert int8_blocks.message_bytes(300) == 2 * (BLOCK + 4)
