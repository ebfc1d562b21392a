"""Differentiable collectives: the backward of each is its transpose.

A step over several ranks is one program with one loss, and backward sends in the other direction.
After ``reduce_from`` all ranks must compute the same, as if each were the single process with the
loss. Backward is differentiable, too. docs/parallel.md has a table of all collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from dpcore.errors import Unsupported
from dpcore.parallel import tags

Sizes = Sequence[int] | None


def cut(length: int, parts: int) -> list[int]:
    """Sizes of nearly equal parts, the larger ones first.

    >>> cut(7, 3)
    [3, 2, 2]
    """
    size, larger = divmod(length, parts)
    return [size + (part < larger) for part in range(parts)]


def copy_to(x: Tensor, comm: Any) -> Tensor:
    """``x`` itself, which is equal on all ranks and from here on used differently."""
    return _through(x, lambda x: x.view_as(x), lambda gradient: reduce_from(gradient, comm))


def reduce_from(x: Tensor, comm: Any) -> Tensor:
    """The sum of all ranks' ``x``, with which all ranks then compute the same."""

    def run(x: Tensor) -> Tensor:
        total = empty_like(x, comm).copy_(x)
        comm.all_reduce(total)
        return total

    return _through(x, run, lambda gradient: copy_to(gradient, comm))


def gather(x: Tensor, comm: Any, dim: int = 0, sizes: Sizes = None) -> Tensor:
    """Every rank's ``x``, joined along ``dim``. ``sizes``: the length of ``dim`` on each rank, if
    ranks differ."""
    length = _length(x, dim, "gather")
    lengths = sizes or [length] * comm.world_size

    def run(x: Tensor) -> Tensor:
        mine = x.movedim(dim, 0).contiguous()
        whole: Tensor = comm.empty(sum(lengths), *mine.shape[1:], dtype=x.dtype)
        comm.all_gather(whole, mine, sizes=_elements(sizes, mine))
        return whole.movedim(0, dim)

    return _through(x, run, lambda gradient: reduce_scatter(gradient, comm, dim, lengths))


def reduce_scatter(x: Tensor, comm: Any, dim: int = 0, sizes: Sizes = None) -> Tensor:
    """This rank's part along ``dim`` of the sum of all ranks' ``x``. ``sizes``: the lengths of the
    parts, by default those of ``cut``."""
    lengths = sizes or cut(_length(x, dim, "reduce_scatter"), comm.world_size)
    uneven = lengths if len(set(lengths)) > 1 else None

    def run(x: Tensor) -> Tensor:
        whole = x.movedim(dim, 0).contiguous()
        part: Tensor = comm.empty(lengths[comm.rank], *whole.shape[1:], dtype=x.dtype)
        comm.reduce_scatter(part, whole, sizes=_elements(uneven, whole))
        return part.movedim(0, dim)

    return _through(x, run, lambda gradient: gather(gradient, comm, dim, uneven))


def all_to_all(
    x: Tensor, comm: Any, split: int, join: int, split_sizes: Sizes = None, join_sizes: Sizes = None
) -> Tensor:
    """Cuts ``x`` along ``split``, sends part d to rank d, joins received parts along ``join``.
    ``split_sizes``: the lengths of the parts, by default those of ``cut``. ``join_sizes``: the
    length of ``join`` on each rank, if ranks differ."""
    long, wide = _length(x, split, "all_to_all"), _length(x, join, "all_to_all")
    if split % x.dim() == join % x.dim():
        raise Unsupported(f"all_to_all: split and join are both dimension {split % x.dim()}")
    parts = list(split_sizes or cut(long, comm.world_size))
    lengths = list(join_sizes or [wide] * comm.world_size)

    def run(x: Tensor) -> Tensor:
        leaving = x.movedim((split, join), (0, 1)).contiguous()
        rest = leaving.shape[2:]
        came = [parts[comm.rank] * length * rest.numel() for length in lengths]
        output: Tensor = comm.empty(sum(came), dtype=x.dtype)
        sent = _elements(parts, leaving)
        comm.all_to_all(output, leaving.view(-1), input_sizes=sent, output_sizes=came)
        pieces = zip(torch.split(output, came), lengths, strict=True)
        joined = [piece.view(parts[comm.rank], length, *rest) for piece, length in pieces]
        return torch.cat(joined, 1).movedim((0, 1), (split, join))

    return _through(x, run, lambda g: all_to_all(g, comm, join, split, lengths, parts))


def shift(x: Tensor, comm: Any, by: int = 1) -> Tensor:
    """The ``x`` of the rank ``by`` places before this one in the ring."""

    def run(x: Tensor) -> Tensor:
        moved = empty_like(x, comm)
        for work in start_shift(x.contiguous(), moved, comm, by):
            work.wait()
        return moved

    return _through(x, run, lambda gradient: shift(gradient, comm, -by))


def start_shift(
    x: Tensor, output: Tensor, comm: Any, by: int = 1, tag: int = tags.SHIFT
) -> list[Any]:
    """Starts a ``shift`` without autograd. Returns the handles to wait for."""
    there, here = (comm.rank + by) % comm.world_size, (comm.rank - by) % comm.world_size
    if there == comm.rank:
        output.copy_(x)
        return []
    receiving = comm.recv(output, here, tag=tag, async_op=True)
    return [comm.send(x, there, tag=tag, async_op=True), receiving]


def dropout(x: Tensor, p: float, generator: torch.Generator) -> Tensor:
    """Dropout with a generator of the caller (``Mesh.generator``). torch's default generator
    belongs to the process, so ranks that are threads would share it."""
    if not 0 <= p < 1:
        raise Unsupported(f"dropout: {p} must be at least 0 and below 1")
    return x * (torch.rand(x.shape, generator=generator) >= p).to(x.dtype) / (1 - p)


def empty_like(x: Tensor, comm: Any) -> Tensor:
    """Memory for ``x`` that local peers can access without a copy."""
    made: Tensor = comm.empty(*x.shape, dtype=x.dtype)
    return made


def _through(
    x: Tensor, run: Callable[[Tensor], Tensor], transpose: Callable[[Tensor], Tensor]
) -> Tensor:
    _check_tensor(x, "a collective of autograd")
    return _Collective.apply(x, run, transpose)  # type: ignore[no-any-return, no-untyped-call]


class _Collective(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Any, transpose: Any) -> Any:
        ctx.transpose = transpose
        return run(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.transpose(gradients[0]), None, None


def _elements(sizes: Sizes, x: Tensor) -> list[int] | None:
    """The sizes in elements instead of rows."""
    return [size * x.shape[1:].numel() for size in sizes] if sizes else None


def _length(x: Tensor, dim: int, who: str) -> int:
    _check_tensor(x, who)
    if not -x.dim() <= dim < x.dim():
        raise Unsupported(f"{who}: a tensor of shape {list(x.shape)} has no dimension {dim}")
    return x.shape[dim]


def _check_tensor(x: Any, who: str) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{who}: expected a tensor, not a {type(x).__name__}")
