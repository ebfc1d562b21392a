"""What NCCL's numbers mean, for CuPy, which takes them as they are; and how ranks meet there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpcore.errors import Unsupported

# The library's own numbers. CuPy has no name for bfloat16 and for the mean.
_TYPES = {
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
_OPS = {"sum": 0, "mean": 4, "prod": 1, "max": 2, "min": 3}
_OPS_OF_BOOL = {"sum": 2, "max": 2, "bor": 2, "prod": 3, "min": 3, "band": 3}
BYTES = _TYPES["int8"]


def numbers_of(op: str, dtype: Any) -> tuple[int, int]:
    """NCCL's numbers for the type and the operator of a reduction."""
    name = str(dtype).removeprefix("torch.")
    operator = (_OPS_OF_BOOL if name == "bool" else _OPS).get(op)
    if name not in _TYPES or operator is None:
        raise Unsupported(
            f"{op} of {name} is not possible with NCCL through CuPy; use backend='nccl'"
        )
    return _TYPES[name], operator


def size_of(tensor: Any) -> int:
    """Bytes."""
    return int(tensor.numel() * tensor.element_size())


def packed(identity: Sequence[int]) -> bytes:
    """Before 14.0 CuPy had the 128 bytes as a tuple of signed numbers."""
    return bytes(number % 256 for number in identity)


def meet(nccl: Any, world_size: int, identity: bytes, rank: int) -> Any:
    """NCCL's communicator as CuPy holds it. Since 14.0 it takes the bytes as they are."""
    try:
        return nccl.NcclCommunicator(world_size, identity, rank)
    except TypeError:
        signed = tuple(number - 256 if number > 127 else number for number in identity)
        return nccl.NcclCommunicator(world_size, signed, rank)
