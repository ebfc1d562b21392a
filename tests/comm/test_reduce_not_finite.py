"""The look at NaN and Inf while inputs are added: whose it is, at which element, and that looking
changes no bit. ``test_reduce_levels.py`` compares the instruction sets."""

import math

import pytest
import torch

from dpcore import _C

TYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "complex64": torch.complex64,
    "complex128": torch.complex128,
}
COUNTS = (1, 33, 4099, 70_001)  # less than a vector, some vectors, and with a head of its own
INPUTS = 3


def inputs_of(dtype, count):
    generator = torch.Generator().manual_seed(count)
    kind = TYPES[dtype]
    wide = torch.complex64 if kind.is_complex else torch.float32
    return [
        torch.randn(count + 1, dtype=wide, generator=generator).to(kind)[1:] for _ in range(INPUTS)
    ]


def reduced(dtype, inputs, looks, in_place=False, post=1 / INPUTS):
    """The result, and what was found."""
    given = [tensor.clone() for tensor in inputs]
    out = given[1] if in_place else torch.empty_like(inputs[0])
    found = _C._reduce(
        dtype,
        "sum",
        [tensor.data_ptr() for tensor in given],
        [out.data_ptr()],
        out.numel(),
        post,
        looks=looks,
        takes_over=in_place,
    )
    return out, found


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("in_place", (False, True))
@pytest.mark.parametrize("dtype", TYPES)
def test_the_first_one_is_found_with_its_rank(dtype, in_place):
    for count in COUNTS:
        clean = inputs_of(dtype, count)
        assert reduced(dtype, clean, True, in_place)[1] is None
        for at in {0, count // 3, count // 2, count - 1}:
            for rank, value in enumerate((math.nan, math.inf, -math.inf)):
                inputs = [tensor.clone() for tensor in clean]
                inputs[rank][at] = value
                looked, found = reduced(dtype, inputs, True, in_place)
                assert found == (rank, at, 1 << rank), (count, at, value)
                plain, nothing = reduced(dtype, inputs, False, in_place)
                assert nothing is None
                assert torch.equal(bits(looked), bits(plain))


def test_an_imaginary_part_counts():
    inputs = inputs_of("complex64", 1000)
    inputs[2][700] = complex(1, math.nan)
    assert reduced("complex64", inputs, True)[1] == (2, 700, 4)


def test_the_earliest_element_decides_and_neighbours_are_named():
    inputs = inputs_of("float32", 70_000)
    inputs[2][40_000] = math.nan
    inputs[0][40_001] = math.inf
    inputs[1][60_000] = math.nan  # far away: another block
    assert reduced("float32", inputs, True)[1] == (2, 40_000, 0b101)
    everywhere = [torch.full_like(tensor, math.nan) for tensor in inputs]
    assert reduced("float32", everywhere, True)[1] == (0, 0, 0b111)


@pytest.mark.parametrize(
    "dtype,large",
    (("float16", 40_000.0), ("bfloat16", 3e38), ("float32", 3e38), ("float64", 1e308)),
)
def test_a_sum_that_overflows_is_no_ranks(dtype, large):
    inputs = inputs_of(dtype, 5000)
    for tensor in inputs:
        tensor[123] = large
    out, found = reduced(dtype, inputs, True, post=1.0)
    assert out[123].isinf()
    assert found == (-1, 123, 0)
    inputs[1][4000] = math.nan  # which says more
    assert reduced(dtype, inputs, True, post=1.0)[1] == (1, 4000, 2)


@pytest.mark.parametrize("dtype", ("float16", "bfloat16", "float32", "float64"))
def test_the_largest_numbers_are_finite(dtype):
    """The sum of a block of them is not, which is no reason for an alarm."""
    largest = torch.finfo(TYPES[dtype]).max
    inputs = [torch.full((4099,), largest, dtype=TYPES[dtype])] + [
        torch.zeros(4099, dtype=TYPES[dtype]) for _ in range(2)
    ]
    out, found = reduced(dtype, inputs, True, post=1.0)
    assert found is None
    assert torch.equal(out, inputs[0])


def test_rounding_to_infinity_is_an_overflow():
    """65,504 is the largest float16, and from 65,520 on the nearest is infinity."""
    for second, found in ((15.0, None), (16.0, (-1, 0, 0))):
        inputs = [torch.tensor([first], dtype=torch.float16) for first in (65_504.0, second, 0.0)]
        assert reduced("float16", inputs, True, post=1.0)[1] == found
    for dtype in ("int32", "bool"):  # have none
        number = torch.ones(5, dtype=torch.int32 if dtype == "int32" else torch.bool)
        assert reduced(dtype, [number] * INPUTS, True, post=1.0)[1] is None
