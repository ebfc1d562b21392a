"""The reduction kernels: values, order of operands, factors and edges.

The reference does the same steps in the accumulation type, one operand after the other, so
that results must agree to the last bit (a NaN with any NaN).
"""

import pytest
import torch

import dpcore
from dpcore import _C

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
    "complex64": torch.complex64,
    "complex128": torch.complex128,
}
FLOATS = ["float64", "float32", "float16", "bfloat16"]
COMPLEX = ["complex64", "complex128"]
INTEGERS = ["int64", "int32", "int16", "int8", "uint8"]
OPS = ["sum", "mean", "prod", "min", "max", "band", "bor", "bxor", "premul_sum"]
COUNTS = [0, 1, 2, 3, 7, 31, 33, 1000, 4099]
MARGIN = 64  # elements before and after an output that nobody may touch

# (outputs, element offset, in place)
LAYOUTS = [
    (1, 0, False),
    (2, 1, False),
    (3, 0, True),
    (2, 1, True),
    (1, 3, True),
    (2, 0, False),
    (3, 5, False),
]


def is_valid(op, dtype):
    if dtype in FLOATS:
        return op not in ("band", "bor", "bxor")
    if dtype in COMPLEX:
        return op in ("sum", "mean", "prod", "premul_sum")
    return op != "premul_sum" and (dtype, op) != ("bool", "mean")


VALID = [(dtype, op) for dtype in DTYPES for op in OPS if is_valid(op, dtype)]
INVALID = [(dtype, op) for dtype in DTYPES for op in OPS if not is_valid(op, dtype)]


def bits_of(tensor):
    """A view as bytes, one row per element."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def random_tensor(dtype, count, generator):
    if dtype == "bool":
        return torch.randint(0, 2, (count,), generator=generator).bool()
    if dtype in INTEGERS:
        info = torch.iinfo(DTYPES[dtype])
        wide = torch.randint(-(2**62), 2**62, (count,), generator=generator)
        return (wide * 2 if info.bits == 64 else wide >> 17).to(DTYPES[dtype])
    if dtype in COMPLEX:
        return torch.randn(count, dtype=DTYPES[dtype], generator=generator)
    return torch.randn(count, dtype=torch.float64, generator=generator).to(DTYPES[dtype])


def accumulation_type(dtype):
    return torch.float64 if dtype in ("float64", "complex128") else torch.float32


def combine_real(op, acc, x):
    if op in ("sum", "mean", "premul_sum"):
        return acc + x
    if op == "prod":
        return acc * x
    return torch.minimum(acc, x) if op == "min" else torch.maximum(acc, x)


def combine_complex(op, acc, x):
    if op != "prod":
        return acc + x
    (a, b), (c, d) = acc.unbind(-1), x.unbind(-1)
    return torch.stack([a * c - b * d, a * d + b * c], -1)


def combine_integer(op, acc, x):
    functions = {
        "sum": torch.add,
        "mean": torch.add,  # divided afterwards
        "prod": torch.mul,
        "min": torch.minimum,
        "max": torch.maximum,
        "band": torch.bitwise_and,
        "bor": torch.bitwise_or,
        "bxor": torch.bitwise_xor,
    }
    return functions[op](acc, x)


def combine_boolean(op, acc, x):
    if op in ("sum", "max", "bor"):
        return acc | x
    return acc ^ x if op == "bxor" else acc & x


def reference(dtype, op, inputs, post, pre, divisor=1):
    """in_0, in_1, ... in this order, in the accumulation type, rounded once."""
    if dtype == "bool" or dtype in INTEGERS:
        combine = combine_boolean if dtype == "bool" else combine_integer
        acc = inputs[0].clone()
        for x in inputs[1:]:
            acc = combine(op, acc, x)
        if divisor > 1:  # of Python's own integers
            quotients = [abs(n) // divisor * (1 if n >= 0 else -1) for n in acc.tolist()]
            acc = torch.tensor(quotients, dtype=acc.dtype)
        return acc
    wide_type = accumulation_type(dtype)
    is_complex = dtype in COMPLEX
    wide = [(torch.view_as_real(x) if is_complex else x).to(wide_type) for x in inputs]
    if pre is not None:
        wide = [
            x * torch.tensor(factor, dtype=wide_type) for x, factor in zip(wide, pre, strict=True)
        ]
    acc = wide[0]
    for x in wide[1:]:
        acc = (combine_complex if is_complex else combine_real)(op, acc, x)
    acc = acc * torch.tensor(post, dtype=wide_type)
    return torch.view_as_complex(acc.contiguous()) if is_complex else acc.to(inputs[0].dtype)


def same(actual, expected):
    if actual.is_complex():
        actual, expected = torch.view_as_real(actual), torch.view_as_real(expected)
    if not actual.is_floating_point():
        return torch.equal(actual, expected)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
    equal = actual.contiguous().view(bits) == expected.contiguous().view(bits)
    return bool((equal | (actual.isnan() & expected.isnan())).all())


class Arrays:
    """Inputs and outputs at a given element offset, outputs between margins."""

    def __init__(self, inputs, n_out, offset, in_place):
        self.count = inputs[0].numel()
        self.buffers = [self._place(x, offset) for x in inputs]
        blank = torch.zeros_like(inputs[0])
        fresh = n_out - min(n_out, len(inputs)) if in_place else n_out
        self.outputs = self.buffers[: n_out - fresh]
        self.outputs = self.outputs + [self._place(blank, offset) for _ in range(fresh)]
        self.before = [x.clone() for x in self.outputs]
        self.start = MARGIN + offset

    @staticmethod
    def _place(values, offset):
        buffer = torch.ones(values.numel() + 2 * MARGIN + offset, dtype=values.dtype)
        buffer[MARGIN + offset : MARGIN + offset + values.numel()] = values
        return buffer

    def _address(self, buffer):
        return buffer.data_ptr() + self.start * buffer.element_size()

    def reduce(self, dtype, op, post=1.0, pre=None, takes_over=False, divisor=1):
        _C._reduce(
            dtype,
            op,
            [self._address(x) for x in self.buffers],
            [self._address(x) for x in self.outputs],
            self.count,
            post,
            pre,
            takes_over,
            divisor=divisor,
        )

    def check(self, expected):
        inside = slice(self.start, self.start + self.count)
        for before, after in zip(self.before, self.outputs, strict=True):
            assert same(after[inside], expected)
            before[inside] = after[inside]
            assert torch.equal(bits_of(before), bits_of(after)), "wrote outside of the output"


def run(dtype, op, inputs, post=1.0, pre=None, n_out=1, offset=0, in_place=False):
    arrays = Arrays(inputs, n_out, offset, in_place)
    arrays.reduce(dtype, op, post, pre)
    arrays.check(reference(dtype, op, inputs, post, pre))


@pytest.mark.parametrize("dtype,op", VALID)
def test_values(dtype, op):
    generator = torch.Generator().manual_seed(1)
    for n_in in range(1, 10):
        averages_integers = op == "mean" and dtype in INTEGERS
        post = 1.0 / n_in if op == "mean" and not averages_integers else 1.0
        divisor = n_in if averages_integers else 1
        pre = [0.5 + 0.3 * i for i in range(n_in)] if op == "premul_sum" else None
        for count in COUNTS:
            inputs = [random_tensor(dtype, count, generator) for _ in range(n_in)]
            expected = reference(dtype, op, inputs, post, pre, divisor)
            for n_out, offset, in_place in LAYOUTS:
                arrays = Arrays(inputs, n_out, offset, in_place)
                arrays.reduce(dtype, op, post, pre, divisor=divisor)
                arrays.check(expected)


@pytest.mark.parametrize("dtype", FLOATS + COMPLEX)
def test_sum_is_close_to_wide_arithmetic(dtype):
    """The reference above shares our order and types; this one shares neither."""
    generator = torch.Generator().manual_seed(2)
    inputs = [random_tensor(dtype, 1000, generator) for _ in range(7)]
    wide = torch.complex128 if dtype in COMPLEX else torch.float64
    expected = torch.stack([x.to(wide) for x in inputs]).mean(0)
    out = torch.empty_like(inputs[0])
    _C._reduce(dtype, "mean", [x.data_ptr() for x in inputs], [out.data_ptr()], 1000, 1 / 7)
    epsilon = torch.finfo(DTYPES[dtype]).eps
    assert ((out.to(wide) - expected).abs() <= epsilon * (expected.abs() + 4)).all()


def test_a_divisor_larger_than_the_type_holds():
    """200 ranks may average int8: the sum wraps, the divisor does not."""
    for dtype, values, expected in (
        (torch.int8, [100, 127, -128, 0], [0, 0, 0, 0]),
        (torch.uint8, [100, 199, 200, 255], [0, 0, 1, 1]),
    ):
        x, zeros = torch.tensor(values, dtype=dtype), torch.zeros(4, dtype=dtype)
        name = str(dtype).removeprefix("torch.")
        for workers in (0, 1):
            out = torch.empty(4, dtype=dtype)
            _C._reduce(name, "sum", [x.data_ptr(), zeros.data_ptr()], [out.data_ptr()], 4,
                       workers=workers, divisor=200)  # fmt: skip
            assert out.tolist() == expected


@pytest.mark.parametrize("op", ["sum", "prod", "min", "max"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_factors_with_every_operator(dtype, op):
    generator = torch.Generator().manual_seed(3)
    for n_in in (1, 2, 3, 5):
        inputs = [random_tensor(dtype, 333, generator) for _ in range(n_in)]
        pre = [1.1 - 0.7 * i for i in range(n_in)]
        run(dtype, op, inputs, post=1 / 3, pre=pre)
        run(dtype, op, inputs, post=1 / 3, n_out=2, in_place=True)


@pytest.mark.parametrize("op", ["sum", "prod", "min", "max"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_special_values_in_every_position(dtype, op):
    info = torch.finfo(DTYPES[dtype])
    special = [
        0.0,
        1.0,
        -1.0,
        float("nan"),
        float("inf"),
        -float("inf"),
        info.max,
        info.min,
        info.tiny,
        -info.tiny,
        info.smallest_normal / 4,
        info.eps,
        3.0,
    ]
    values = torch.tensor(special, dtype=DTYPES[dtype])
    left = values.repeat_interleave(len(special)).repeat(3)
    right = values.repeat(len(special)).repeat(3)
    run(dtype, op, [left, right])
    run(dtype, op, [left, right, left.flip(0)], post=0.5)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", ["min", "max"])
def test_nan_wins_and_first_zero_stays(dtype, op):
    nan, zero = float("nan"), 0.0
    first = torch.tensor([nan, 1.0, nan, zero, -zero] * 30, dtype=DTYPES[dtype])
    second = torch.tensor([1.0, nan, nan, -zero, zero] * 30, dtype=DTYPES[dtype])
    out = torch.empty_like(first)
    _C._reduce(dtype, op, [first.data_ptr(), second.data_ptr()], [out.data_ptr()], first.numel())
    rows = out.view(30, 5)
    assert rows[:, :3].isnan().all()
    assert not torch.signbit(rows[:, 3]).any()
    assert torch.signbit(rows[:, 4]).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_16_bit_pattern_survives_and_rounds_once(dtype):
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16).view(DTYPES[dtype])
    zeros = torch.zeros_like(patterns)
    run(dtype, "sum", [patterns, zeros])
    for post in (0.5, 1 / 3, 1e-4, 1e4, 3e-8):
        run(dtype, "sum", [patterns, zeros], post=post)
    # Ties: one plus half a unit in the last place, and once more.
    run(dtype, "sum", [patterns, patterns.flip(0), patterns.roll(12345)], post=1 / 3)


def test_one_operand_without_factor_keeps_its_bits():
    source = torch.randint(-(2**31), 2**31, (1000,)).to(torch.int32).view(torch.float32)
    for n_out in (1, 2):
        outs = [torch.empty_like(source) for _ in range(n_out)]
        _C._reduce("float32", "sum", [source.data_ptr()], [x.data_ptr() for x in outs], 1000)
        for out in outs:
            assert torch.equal(bits_of(out), bits_of(source))


@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "uint8", "complex64"])
def test_large_arrays(dtype, offset):
    """They are aligned first, and their lines are asked for ahead."""
    generator = torch.Generator().manual_seed(6)
    count = (9 << 20) // torch.empty((), dtype=DTYPES[dtype]).element_size() + 5
    inputs = [random_tensor(dtype, count, generator) for _ in range(2)]
    run(dtype, "sum", inputs, n_out=1, offset=offset)
    run(dtype, "sum", inputs, n_out=2, offset=offset)
    run(dtype, "prod", inputs, n_out=2, offset=offset, in_place=True)


@pytest.mark.parametrize("n_in", [2, 3, 5])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int64", "uint8", "complex64"])
def test_taking_over_what_others_wrote(dtype, n_in):
    """Asking for lines ahead, with the right to write them, touches nothing outside."""
    generator = torch.Generator().manual_seed(7)
    for count in (1000, 4099, 70_001):
        inputs = [random_tensor(dtype, count, generator) for _ in range(n_in)]
        for offset in (0, 3):
            arrays = Arrays(inputs, n_in, offset, in_place=True)
            arrays.reduce(dtype, "sum", takes_over=True)
            arrays.check(reference(dtype, "sum", inputs, 1.0, None))


def test_booleans_are_written_as_one():
    raw = torch.tensor([0, 1, 2, 255] * 40, dtype=torch.uint8)
    zeros = torch.zeros_like(raw)
    out = torch.empty_like(raw)
    _C._reduce("bool", "sum", [raw.data_ptr(), zeros.data_ptr()], [out.data_ptr()], raw.numel())
    assert torch.equal(out, (raw != 0).to(torch.uint8))
    ones = torch.ones_like(raw)
    _C._reduce("bool", "prod", [raw.data_ptr(), ones.data_ptr()], [out.data_ptr()], raw.numel())
    assert torch.equal(out, (raw != 0).to(torch.uint8))


@pytest.mark.parametrize("dtype,op", INVALID)
def test_invalid_combination_lists_what_is_valid(dtype, op):
    with pytest.raises(dpcore.Unsupported, match="sum"):
        _C._reduce(dtype, op, [0], [0], 0)


def test_unknown_names_list_the_known_ones():
    with pytest.raises(dpcore.Unsupported, match="premul_sum"):
        _C._reduce("float32", "average", [0], [0], 0)
    with pytest.raises(dpcore.Unsupported, match="bfloat16"):
        _C._reduce("float8", "sum", [0], [0], 0)


def test_short_names():
    x = torch.ones(5)
    out = torch.empty(5)
    _C._reduce("f32", "avg", [x.data_ptr()] * 2, [out.data_ptr()], 5, 0.5)
    assert torch.equal(out, x)


def test_factors_of_integers_and_empty_lists_raise():
    with pytest.raises(dpcore.Unsupported, match="floating"):
        _C._reduce("int32", "sum", [0], [0], 0, 0.5)
    with pytest.raises(dpcore.Unsupported, match="floating"):
        _C._reduce("bool", "sum", [0], [0], 0, 1.0, [1.0])
    for dtype in ("bool", "float32", "complex64"):
        for workers in (0, 1):
            with pytest.raises(dpcore.Unsupported, match="divisor needs a type of integers"):
                _C._reduce(dtype, "sum", [0], [0], 0, workers=workers, divisor=2)
    with pytest.raises(dpcore.Unsupported, match="at least one"):
        _C._reduce("float32", "sum", [], [0], 0)
    with pytest.raises(dpcore.Unsupported, match="at least one"):
        _C._reduce("float32", "sum", [0], [], 0)


@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 4096, 700_003, 9_000_001])
@pytest.mark.parametrize("way", ["", "to peers", "from a peer", "taking over"])
def test_copy_bytes(way, n):
    generator = torch.Generator().manual_seed(4)
    source = torch.randint(0, 256, (n + 100,), generator=generator).to(torch.uint8)
    for to, start in ((0, 0), (1, 0), (0, 3), (17, 5)):
        target = torch.zeros(n + 100, dtype=torch.uint8)
        _C._copy_bytes(target.data_ptr() + to, source.data_ptr() + start, n, way)
        assert torch.equal(target[to : to + n], source[start : start + n])
        assert not target[:to].any() and not target[to + n :].any()
