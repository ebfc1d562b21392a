"""What NCCL's numbers mean, for CuPy, which takes them as they are."""

from __future__ import annotations

from collections.abc import Sequence

# The library's own numbers. CuPy has no name for bfloat16 and for the mean.
TYPES = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "int64": 4,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
    "bool": 1,
}
OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "mean": 4, "avg": 4}
OPS_OF_BOOL = {"sum": 2, "max": 2, "bor": 2, "prod": 3, "min": 3, "band": 3}
BYTES = TYPES["int8"]


def packed(identity: Sequence[int]) -> bytes:
    """CuPy has the 128 bytes as a tuple of signed numbers."""
    return bytes(number % 256 for number in identity)


def unpacked(identity: bytes | bytearray) -> tuple[int, ...]:
    return tuple(number - 256 if number > 127 else number for number in identity)
