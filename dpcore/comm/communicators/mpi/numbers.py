"""Tensors and operators as MPI takes them.

MPI reads and writes the tensor's own memory. It counts elements, so types that it does not know
(bfloat16 first of all) travel as integers of the same size. Sums of 16-bit floats are added in
float32: MPI has no such types, and what libraries do with them beyond the standard differs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from dpcore.comm.communicators.torch_buffers import divide_in_place, tensor_of
from dpcore.errors import Unsupported

WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}

_KINDS = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.uint8: "UINT8_T",
    torch.uint16: "UINT16_T",
    torch.uint32: "UINT32_T",
    torch.uint64: "UINT64_T",
    torch.bool: "UINT8_T",
}
_BY_SIZE = {1: "UINT8_T", 2: "INT16_T", 4: "INT32_T", 8: "INT64_T", 16: "C_DOUBLE_COMPLEX"}
_OPERATORS = {
    "sum": "SUM",
    "mean": "SUM",  # divided afterwards
    "premul_sum": "SUM",  # multiplied beforehand
    "prod": "PROD",
    "min": "MIN",
    "max": "MAX",
    "band": "BAND",
    "bor": "BOR",
    "bxor": "BXOR",
}
_OF_BOOLEANS = {"sum": "BOR", "max": "BOR", "prod": "BAND", "min": "BAND"}
_MOST = (1 << 31) - 1  # calls of MPI count elements in a C int


class Reduction(NamedTuple):
    """How to combine elements of one type."""

    operator: Any  # of MPI
    dtype: torch.dtype  # in which elements are combined
    factor: float | None  # of what this rank gives
    divisor: int  # of the result

    def finish(self, total: torch.Tensor) -> None:
        """A mean of a sum."""
        if self.divisor > 1:
            divide_in_place(total, self.divisor)


def reduction_of(
    mpi: Any, op: str, dtype: torch.dtype, factor: float, world_size: int
) -> Reduction:
    is_float = dtype in WIDE or dtype.is_floating_point
    if dtype not in _KINDS and dtype not in WIDE:
        raise Unsupported(f"{op} of {dtype}: MPI has no such type; convert with .float()")
    if (
        (op == "premul_sum" and not is_float and not dtype.is_complex)
        or (op == "mean" and dtype == torch.bool)
        or (op in ("min", "max") and dtype.is_complex)
        or (op in ("band", "bor", "bxor") and (is_float or dtype.is_complex))
    ):
        raise Unsupported(f"{op} has no meaning for {dtype}")
    name = _OPERATORS[op]
    if dtype == torch.bool:
        name = _OF_BOOLEANS.get(op, name)
    return Reduction(
        getattr(mpi, name),
        WIDE.get(dtype, dtype),
        factor if op == "premul_sum" else None,
        world_size if op == "mean" else 1,
    )


def flat_of(buffer: Any) -> torch.Tensor:
    """The memory of a tensor or an array as a flat tensor that autograd does not know."""
    tensor = tensor_of(buffer)
    if tensor.device.type != "cpu":
        raise Unsupported(
            f"the tensor is on {tensor.device}, backend='mpi' is for tensors on the CPU: pass "
            ".cpu(), or use backend='nccl'"
        )
    count = tensor.numel()
    if count > _MOST:
        raise Unsupported(f"{count} elements: a call of MPI takes up to {_MOST}; pass slices")
    if count == 0:
        return torch.empty(0, dtype=tensor.dtype)
    memory = _bytes_at(tensor.data_ptr(), count * tensor.element_size())
    return torch.frombuffer(memory, dtype=tensor.dtype)


def beside(target: torch.Tensor | None, own: torch.Tensor) -> torch.Tensor:
    """``own``, or a copy of it where MPI would write into it while it reads it."""
    return own.clone() if target is not None and overlap(target, own) else own


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    first, second = one.data_ptr(), other.data_ptr()
    return first < second + other.nbytes and second < first + one.nbytes


def message(mpi: Any, flat: torch.Tensor) -> list[Any]:
    """What MPI reads or writes without looking into it."""
    return [memory_of(flat), flat.numel(), getattr(mpi, _BY_SIZE[flat.element_size()])]


def parts(mpi: Any, flat: torch.Tensor, lengths: Sequence[int]) -> list[Any]:
    """The same in a part per rank, one after the other."""
    kind = getattr(mpi, _BY_SIZE[flat.element_size()])
    return [memory_of(flat), (list(lengths), begins(lengths)), kind]


def calculated(mpi: Any, flat: torch.Tensor) -> list[Any]:
    """What MPI calculates with."""
    return [memory_of(flat), flat.numel(), getattr(mpi, _KINDS[flat.dtype])]


def begins(lengths: Sequence[int]) -> list[int]:
    """
    >>> begins([2, 0, 3])
    [0, 2, 2]
    """
    found, begin = [], 0
    for length in lengths:
        found.append(begin)
        begin += length
    return found


def blocks(lengths: Sequence[int], most: int) -> Iterator[list[tuple[int, int]]]:
    """Cuts parts that lie one after the other into blocks of about ``most`` elements: of each part
    the same share, as (begin, end).

    >>> list(blocks([4, 2], 3))
    [[(0, 2), (4, 5)], [(2, 4), (5, 6)]]
    """
    count = max(1, -(-sum(lengths) // most))
    for number in range(count):
        yield [
            (begin + length * number // count, begin + length * (number + 1) // count)
            for begin, length in zip(begins(lengths), lengths, strict=True)
        ]


def memory_of(flat: torch.Tensor) -> Any:
    """Its bytes as an object that has the buffer protocol, which MPI's request keeps alive."""
    memory = _bytes_at(flat.data_ptr(), flat.nbytes)
    memory.of = flat
    return memory


def _bytes_at(address: int, nbytes: int) -> Any:
    return (ctypes.c_char * nbytes).from_address(address)
