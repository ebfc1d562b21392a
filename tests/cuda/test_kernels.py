"""The kernels on the GPU: the bits of the CPU's, in every type, and copies of many tensors."""

import pytest
import torch

from dpcore import _C
from tests.cuda_host.test_elements import (
    COUNTS,
    FLOATS,
    VALID,
    gradients,
    offsets_of,
    ordinary,
    parts_of,
    random_bits,
    third,
)

PLACE = "cuda:0"
LARGE = 1 << 20


def on_gpu_and_host(dtype, op, inputs, offset, post, pre, divisor=1):
    """The output's bytes from both, inputs and output at an element offset."""
    count = inputs[0].numel()
    size = inputs[0].element_size()
    results = []
    for place in ("cpu", PLACE):
        arrays = [torch.zeros((count + offset) * size, dtype=torch.uint8) for _ in range(4)]
        for array, values in zip(arrays, inputs, strict=False):
            array[offset * size :] = values.view(torch.uint8)
        arrays = [array.to(place) for array in arrays]
        at = [array.data_ptr() + offset * size for array in arrays]
        where = "" if place == "cpu" else place
        _C._reduce(
            dtype, op, at[: len(inputs)], [at[3]], count, post, pre, device=where, divisor=divisor
        )
        results.append(arrays[3].cpu())
    return results


@pytest.mark.parametrize("values", [ordinary, random_bits])
@pytest.mark.parametrize(("dtype", "op"), VALID)
def test_bits_are_those_of_the_processor(dtype, op, values):
    generator = torch.Generator().manual_seed(len(dtype) + len(op))
    for count in (*COUNTS[1:], LARGE + 3):
        for n_in, offset in ((1, 0), (2, 0), (3, 1), (3, 0)):
            post, divisor = third(dtype, op)
            pre = [0.7 - 0.3 * i for i in range(n_in)] if op == "premul_sum" else None
            inputs = [values(dtype, count, generator) for _ in range(n_in)]
            host, gpu = on_gpu_and_host(dtype, op, inputs, offset, post, pre, divisor)
            assert torch.equal(host, gpu), (count, n_in, offset)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_16_bit_pattern(dtype):
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16).view(getattr(torch, dtype))
    inputs = [patterns, patterns.flip(0), patterns.roll(12345)]
    for post in (1.0, 0.5, 1 / 3, 1e-4, 3e-8, 1e4):
        host, gpu = on_gpu_and_host(dtype, "sum", inputs, 0, post, None)
        assert torch.equal(host, gpu), post


@pytest.mark.parametrize("misalign", [False, True])
@pytest.mark.parametrize(("part", "flat"), [(a, b) for a in FLOATS[1:] for b in FLOATS[1:]])
def test_flatten_and_unflatten(part, flat, misalign):
    generator = torch.Generator().manual_seed(3)
    part_type, flat_type = getattr(torch, part), getattr(torch, flat)
    shapes = [1, 0, 5, 8192, 8193, 200_000, 64, 3] + [7] * 1000
    tensors = [t.cuda() for t in gradients(shapes, part_type, generator, misalign)]
    size = flat_type.itemsize
    offsets, total = offsets_of(tensors, size, 2 * size if misalign else 64)
    buffer = torch.zeros(total // size, dtype=flat_type, device=PLACE)
    parts = parts_of(tensors, offsets)
    assert _C._copy_parts(parts, part, buffer.data_ptr(), flat, True, 0.3, device=PLACE) == 1, (
        "one launch"
    )
    back = [torch.zeros_like(t) for t in tensors]
    _C._copy_parts(parts_of(back, offsets), part, buffer.data_ptr(), flat, False, device=PLACE)
    for tensor, offset, returned in zip(tensors, offsets, back, strict=True):
        expected = (tensor.float() * torch.tensor(0.3)).to(flat_type)
        begin = offset // size
        assert torch.equal(buffer[begin : begin + tensor.numel()], expected)
        assert torch.equal(returned, expected.to(part_type))
