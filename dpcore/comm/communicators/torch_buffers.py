"""Tensors and operators as process groups of torch take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from dpcore.errors import Unsupported

_OPERATORS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,  # divided afterwards: not every group can
    "premul_sum": dist.ReduceOp.SUM,  # multiplied beforehand
    "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}


def new_tensor(shape: Sequence[Any], **options: Any) -> torch.Tensor:
    """Ordinary memory. torch takes numbers and one sequence of them alike, but not nothing."""
    return torch.empty(*(shape or ((),)), **options)


def operator_of(op: str) -> Any:
    return _OPERATORS[op]


def divide_in_place(total: torch.Tensor, divisor: int) -> None:
    """What makes a sum a mean. Integers are rounded toward zero, as dpcore's own core does it."""
    if total.is_floating_point() or total.is_complex():
        total.div_(divisor)
    else:  # the divisor may be too large for the type
        total.copy_(torch.div(total.long(), divisor, rounding_mode="trunc"))


def tensor_of(buffer: Any) -> torch.Tensor:
    """The tensor, or one over the memory of a numpy array. Groups of torch take memory as it lies,
    so one in another order would meet the elements of other indices on other ranks."""
    try:
        tensor = buffer if isinstance(buffer, torch.Tensor) else torch.from_numpy(buffer)
    except TypeError as problem:
        raise TypeError(
            f"expected a torch tensor or a numpy array, not {type(buffer).__name__} ({problem})"
        ) from None
    if not tensor.is_contiguous():
        raise Unsupported(
            f"the {type(buffer).__name__} of shape {list(tensor.shape)} is not contiguous; pass "
            ".contiguous(), or numpy.ascontiguousarray(...), and copy the result back"
        )
    return tensor


def padded(own: torch.Tensor, lengths: Sequence[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Groups exchange parts of one size: all as long as the longest."""
    longest = own.new_zeros(max(lengths))
    longest[: own.numel()] = own
    return longest, [torch.zeros_like(longest) for _ in lengths]


def join(target: torch.Tensor, parts: Sequence[torch.Tensor], lengths: Sequence[int]) -> None:
    pieces = [part[:n] for part, n in zip(parts, lengths, strict=True)]
    target.copy_(torch.cat(pieces))
