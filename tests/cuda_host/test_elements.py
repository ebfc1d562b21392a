"""The arithmetic of the GPU's kernels, compiled for the host: the same bits as the CPU's kernels.

On a GPU only the conversions of 16-bit floats are other code; tests/cuda runs these cases there.
"""

import pytest
import torch

import dpcore
from dpcore import _C

DTYPES = (
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8",
    "bool", "complex64", "complex128",
)  # fmt: skip
FLOATS = DTYPES[:4]
COMPLEX = DTYPES[-2:]
OPS = ("sum", "mean", "prod", "min", "max", "band", "bor", "bxor", "premul_sum")
COUNTS = (0, 1, 2, 7, 8, 17, 33, 260)
WORKERS = (1, 5)
MARGIN = 32  # elements around an array that nobody may touch


def is_valid(op, dtype):
    if dtype in FLOATS:
        return op not in ("band", "bor", "bxor")
    if dtype in COMPLEX:
        return op in ("sum", "mean", "prod", "premul_sum")
    return op != "premul_sum" and (dtype, op) != ("bool", "mean")


VALID = [(dtype, op) for dtype in DTYPES for op in OPS if is_valid(op, dtype)]


def random_bits(dtype, count, generator):
    """Any pattern: denormals, infinities and NaNs of every payload too."""
    size = torch.empty((), dtype=getattr(torch, dtype)).element_size()
    noise = torch.randint(0, 256, (count * size,), generator=generator, dtype=torch.uint8)
    if dtype == "bool":
        noise = noise % 3  # anything but zero is true
    return noise.view(getattr(torch, dtype)) if count else torch.empty(0, dtype=noise.dtype)


def ordinary(dtype, count, generator):
    """Numbers near each other, whose sums have to be rounded."""
    if dtype in FLOATS or dtype in COMPLEX:
        return torch.randn(count, generator=generator, dtype=torch.float64).to(
            getattr(torch, dtype)
        )
    return random_bits(dtype, count, generator)


def placed(values, size, offset):
    """The bytes of `values` at an element offset, between margins."""
    whole = torch.full((2 * MARGIN * size + offset * size + values.numel() * size,), 7).to(
        torch.uint8
    )
    begin = (MARGIN + offset) * size
    if values.numel():
        whole[begin : begin + values.numel() * size] = values.view(torch.uint8)
    return whole, whole.data_ptr() + begin


def reduced(dtype, op, inputs, count, offsets, n_out, in_place, workers, post, pre, divisor=1):
    size = torch.empty((), dtype=getattr(torch, dtype)).element_size()
    arrays = [placed(x, size, offsets[i % len(offsets)]) for i, x in enumerate(inputs)]
    blank = torch.zeros(count * size, dtype=torch.uint8).view(getattr(torch, dtype))
    outputs = arrays[:n_out] if in_place else []
    outputs = outputs + [
        placed(blank, size, offsets[i % len(offsets)]) for i in range(n_out - len(outputs))
    ]
    addresses = [address for _, address in arrays], [address for _, address in outputs]
    _C._reduce(dtype, op, *addresses, count, post, pre, workers=workers, divisor=divisor)
    return torch.cat([whole for whole, _ in arrays] + [whole for whole, _ in outputs])


def third(dtype, op):
    """The factor and the divisor that make a sum of three a mean."""
    if op != "mean":
        return 1.0, 1
    return (1.0 / 3, 1) if dtype in FLOATS or dtype in COMPLEX else (1.0, 3)


@pytest.mark.parametrize("values", [ordinary, random_bits])
@pytest.mark.parametrize(("dtype", "op"), VALID)
def test_bits_are_those_of_the_processor(dtype, op, values):
    generator = torch.Generator().manual_seed(len(dtype) + len(op))
    for round_, count in enumerate(COUNTS):
        n_in = (1, 2, 3, 5, 9)[round_ % 5]
        post, divisor = third(dtype, op)
        pre = [0.7 - 0.3 * i for i in range(n_in)] if op == "premul_sum" else None
        inputs = [values(dtype, count, generator) for _ in range(n_in)]
        for offsets in ((0,), (3,), (0, 1)):
            for n_out, in_place in ((1, False), (n_in, True)):
                call = (dtype, op, inputs, count, offsets, n_out, in_place)
                expected = reduced(*call, 0, post, pre, divisor)
                for workers in WORKERS:
                    actual = reduced(*call, workers, post, pre, divisor)
                    assert torch.equal(actual, expected), (count, n_in, offsets, workers)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_16_bit_pattern(dtype):
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16).view(getattr(torch, dtype))
    inputs = [patterns, patterns.flip(0), patterns.roll(12345)]
    for post in (1.0, 0.5, 1 / 3, 1e-4, 3e-8, 1e4):
        call = (dtype, "sum", inputs, 2**16, (0,), 1, False)
        assert torch.equal(reduced(*call, 5, post, None), reduced(*call, 0, post, None))


def test_more_operands_than_a_launch_has_room_for():
    with pytest.raises(dpcore.Unsupported, match=r"1 to 64 inputs and outputs, not 65 and 1: use"):
        _C._reduce("f32", "sum", [0] * 65, [0], 0, workers=1)
    with pytest.raises(dpcore.Unsupported, match="factors need a floating-point type"):
        _C._reduce("i32", "sum", [0], [0], 0, 0.5, workers=1)
    with pytest.raises(dpcore.Unsupported, match="min of complex64 has no meaning"):
        _C._reduce("c64", "min", [0], [0], 0, workers=1)


# ---- many tensors to and from one buffer -----------------------------------------------------


def gradients(shapes, dtype, generator, misalign):
    made = []
    for i, n in enumerate(shapes):
        whole = torch.randn(n + 8, generator=generator).to(dtype)
        made.append(whole[i % 5 if misalign else 0 :][:n])
    return made


def offsets_of(tensors, element, align):
    offsets, at = [], 0
    for tensor in tensors:
        offsets.append(at)
        at += -(-tensor.numel() * element // align) * align
    return offsets, at


def parts_of(tensors, offsets):
    return [(t.data_ptr(), o, t.numel()) for t, o in zip(tensors, offsets, strict=True)]


@pytest.mark.parametrize("misalign", [False, True])
@pytest.mark.parametrize(
    ("part", "flat"),
    [(a, b) for a in FLOATS[1:] for b in FLOATS[1:]] + [("float64", "float64")],
)
def test_flatten_and_unflatten(part, flat, misalign):
    generator = torch.Generator().manual_seed(3)
    part_type, flat_type = getattr(torch, part), getattr(torch, flat)
    tensors = gradients([1, 0, 5, 8192, 8193, 20000, 64, 3], part_type, generator, misalign)
    size = torch.empty((), dtype=flat_type).element_size()
    offsets, total = offsets_of(tensors, size, 2 * size if misalign else 64)
    buffer = torch.full((total // size,), 5.0, dtype=flat_type)
    scales = (1.0, 0.3) if part != "float64" else (1.0,)
    for factor in scales:
        for workers in (1, 7):
            parts = parts_of(tensors, offsets)
            assert _C._copy_parts(parts, part, buffer.data_ptr(), flat, True, factor, workers) == 1
            for tensor, offset in zip(tensors, offsets, strict=True):
                begin = offset // size
                wide = tensor.float() if part != "float64" else tensor
                expected = (wide * torch.tensor(factor, dtype=wide.dtype)).to(flat_type)
                assert torch.equal(buffer[begin : begin + tensor.numel()], expected)
            back = gradients([t.numel() for t in tensors], part_type, generator, misalign)
            _C._copy_parts(
                parts_of(back, offsets), part, buffer.data_ptr(), flat, False, 1.0, workers
            )
            for tensor, offset in zip(back, offsets, strict=True):
                begin = offset // size
                assert torch.equal(tensor, buffer[begin : begin + tensor.numel()].to(part_type))


def test_one_launch_for_a_bucket_of_a_thousand():
    tensors = [torch.full((3,), float(i)) for i in range(1024)]
    buffer = torch.zeros(1025 * 4)
    parts = [(t.data_ptr(), 16 * i, 3) for i, t in enumerate(tensors)]
    assert _C._copy_parts(parts, "f32", buffer.data_ptr(), "f32", True) == 1
    assert torch.equal(buffer.view(-1, 4)[:1024, 0], torch.arange(1024.0))
    assert not buffer.view(-1, 4)[:, 3].any(), "wrote between the parts"
    extra = torch.full((3,), -1.0)
    parts.append((extra.data_ptr(), 16 * 1024, 3))
    assert _C._copy_parts(parts, "f32", buffer.data_ptr(), "f32", True) == 2
    assert buffer[4096] == -1


def test_types_that_are_not_cast():
    with pytest.raises(dpcore.Unsupported, match="float64 in a bucket of float32"):
        _C._copy_parts([], "f64", 0, "f32", True)
    with pytest.raises(dpcore.Unsupported, match=r"times 0\.5"):
        _C._copy_parts([], "i32", 0, "i32", True, 0.5)
