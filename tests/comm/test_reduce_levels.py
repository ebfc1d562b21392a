"""The same bits at every SIMD level.

Run as a program, this file prints the level and a digest of the results for a corpus of random bit
patterns (so with NaN of any payload, infinities and denormals); the test runs it once per level.
"""

import hashlib
import os

import numpy as np

import dpcore
from dpcore import _C
from tests.ranks import python

SIZES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}
OPS = ["sum", "mean", "prod", "min", "max", "band", "bor", "bxor", "premul_sum"]
SHAPES = ((1, 0), (5, 1), (33, 0), (1027, 3), (4099, 0), (20_011, 1))  # elements, offset


def corpus_digest():
    """SHA-256 over the results of every reduction that is valid."""
    digest = hashlib.sha256()
    random = np.random.default_rng(5)
    for dtype, size in SIZES.items():
        takes_factors = dtype.startswith(("float", "bfloat", "complex"))
        for op in OPS:
            try:
                _C._reduce(dtype, op, [0], [0], 0)
            except dpcore.Unsupported:
                continue
            for n_in in (1, 2, 3, 4, 5, 9):
                for count, offset in SHAPES:
                    rows = random.integers(0, 256, (n_in, (count + offset) * size), dtype=np.uint8)
                    out = np.zeros(count * size, dtype=np.uint8)
                    inputs = [row.ctypes.data + offset * size for row in rows]
                    post, pre = 1.0, None
                    if takes_factors:
                        post = 1 / 3
                        pre = [0.7 + i for i in range(n_in)] if n_in % 2 == 1 else None
                    _C._reduce(dtype, op, inputs, [out.ctypes.data], count, post, pre)
                    digest.update(out.tobytes())
                    # Which does not change a bit.
                    seen = _C._reduce(
                        dtype, op, inputs, [out.ctypes.data], count, post, pre, looks=True
                    )
                    digest.update(out.tobytes() + repr(seen and seen[:2]).encode())
    return digest.hexdigest()


def check_copies_past_the_caches():
    """To any place of a line, as much as ends at any place of one."""
    source = np.random.default_rng(6).integers(0, 256, 70_000, dtype=np.uint8)
    target = np.empty(70_000, dtype=np.uint8)
    first = -target.ctypes.data % 64
    for to in range(64):
        for n in (8192 + to, 8255, 8319, 65_536):
            target[:] = 0
            begin = first + to
            _C._copy_bytes(target.ctypes.data + begin, source.ctypes.data + n % 7, n, "to peers")
            assert (target[begin : begin + n] == source[n % 7 : n % 7 + n]).all()
            assert not target[:begin].any() and not target[begin + n :].any()


def run_at(level, bypass="1"):
    environment = {**os.environ, "DPCORE_SIMD": level, "DPCORE_BYPASS_CACHES": bypass}
    return python.run(__file__, env=environment, capture_output=True, text=True)


def test_every_level_gives_the_same_bits():
    digests = {}
    for asked in ("portable", "avx2", "avx512"):
        done = run_at(asked)
        assert done.returncode == 0, done.stderr
        level, digest = done.stdout.split()
        digests[level] = digest
    assert "portable" in digests  # the others exist where the processor has them
    assert len(set(digests.values())) == 1, digests


def test_unknown_level_is_an_error_that_lists_the_known():
    done = run_at("mmx")
    assert done.returncode != 0
    assert "avx512, avx2 or portable" in done.stderr
    done = run_at("avx2", bypass="always")
    assert done.returncode != 0
    assert "DPCORE_BYPASS_CACHES=always: use 0 or 1" in done.stderr


if __name__ == "__main__":
    check_copies_past_the_caches()
    print(_C.simd_level(), corpus_digest())
