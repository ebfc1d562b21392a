"""Attention over a sequence that ranks share, exactly as one process computes it.

Tensors are [batch, heads, tokens, dim]. Keys and values may have fewer heads than queries; a group
of query heads then shares one. docs/parallel.md gives the bytes that ring and Ulysses attention
send, and when each is slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from dpcore.comm.communicators.checks import check_integer, check_rank
from dpcore.errors import Unsupported
from dpcore.parallel import tags
from dpcore.parallel.functional import all_to_all, cut, empty_like, start_shift

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
Span = Callable[[str], AbstractContextManager[Any]]


def zigzag(length: int, world: int, rank: int) -> Tensor:
    """The indices of the tokens that ``rank`` holds, in order: ``x[:, zigzag(...)]``.

    >>> [zigzag(8, 2, rank).tolist() for rank in range(2)]
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    length = check_integer(length, "zigzag: length", 0)
    world = check_integer(world, "zigzag: world", 1)
    if length % (2 * world):
        wanted = -(-length // (2 * world)) * 2 * world
        raise Unsupported(
            f"zigzag: {length} tokens can't be cut into two equal chunks for each of {world} "
            f"ranks; pad them to {wanted}"
        )
    check_rank(rank, world, "zigzag: rank")
    chunks = torch.arange(length).chunk(2 * world)
    return torch.cat((chunks[rank], chunks[2 * world - 1 - rank]))


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    comm: Any,
    causal: bool = False,
    scale: float | None = None,
    span: Span = nullcontext,
) -> Tensor:
    """Attention of this rank's tokens to all ranks' tokens. With ``causal`` each rank holds the
    tokens of ``zigzag``, otherwise any equal number. ``span``: the method of a ``dp.trace()``,
    which then shows each block beside the shifts: "block 2" is attention to rank 2's keys."""
    _check(q, k, v)
    if q.device.type != "cpu":
        raise Unsupported(f"ring_attention: tensors on {q.device}; it computes on the CPU")
    if q.shape[2] != k.shape[2] or (causal and q.shape[2] % 2):
        raise Unsupported(
            f"ring_attention: this rank has {q.shape[2]} queries and {k.shape[2]} keys; it needs "
            "equally many, and with causal=True an even number, as zigzag() cuts them"
        )
    scale = q.shape[3] ** -0.5 if scale is None else scale
    made: Tensor = _Ring.apply(q, k, v, comm, causal, scale, span)  # type: ignore[no-untyped-call]
    return made


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    comm: Any,
    causal: bool = False,
    scale: float | None = None,
    lengths: list[int] | None = None,
) -> Tensor:
    """Attention of this rank's tokens to all ranks' tokens. Rank r holds the r-th part of the
    sequence. ``lengths``: tokens on each rank, when they differ."""
    _check(q, k, v)
    world, heads, shared = comm.world_size, q.shape[1], k.shape[1]
    if shared < world or (heads != shared and shared % world):
        why = "there is none for some" if shared < world else "groups of heads can't be cut"
        have = f"ulysses_attention: {shared} heads of keys for {world} ranks"
        raise Unsupported(f"{have}; {why}, so use ring_attention or fewer ranks")
    q_seen, k_seen, v_seen = (all_to_all(x, comm, 1, 2, join_sizes=lengths) for x in (q, k, v))
    out = scaled_dot_product_attention(
        q_seen, k_seen, v_seen, is_causal=causal, scale=scale, enable_gqa=heads != shared
    )
    lengths = lengths or [q.shape[2]] * world
    return all_to_all(out, comm, split=2, join=1, split_sizes=lengths, join_sizes=cut(heads, world))


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    shapes = [tuple(x.shape) for x in (q, k, v)]
    if q.dim() != 4 or k.shape != v.shape or q.shape[::3] != k.shape[::3] or not k.shape[1]:
        raise Unsupported(f"attention needs [batch, heads, tokens, dim], and not {shapes}")
    if q.shape[1] % k.shape[1]:
        raise Unsupported(
            f"attention: {q.shape[1]} heads of queries can't share {k.shape[1]} heads of keys "
            f"equally; give a multiple of {k.shape[1]}"
        )


# ---- the ring ------------------------------------------------------------------------------------


def block_of(rank: int, source: int, causal: bool, tokens: int) -> tuple[slice, slice, bool]:
    """This rank's queries that attend to ``source``'s keys, those keys, and whether with a mask.

    A rank's own tokens are in order, so their mask is the usual one. An earlier rank's first chunk
    comes before both of ours and its second after them; a later rank's chunks both come between
    our first and our second.
    """
    everything, low, high = slice(None), slice(0, tokens // 2), slice(tokens // 2, None)
    if not causal or source == rank:
        return everything, everything, causal
    return (everything, low, False) if source < rank else (high, everything, False)


def block(q: Tensor, k: Tensor, v: Tensor, masked: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attention within one block, and the logarithm of the sum of its exponentials."""
    out, lse = _flash(q, _serving(k, q), _serving(v, q), 0.0, masked, scale=scale)
    return out, lse


def block_backward(
    gradient: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, masked: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The block's part of the gradients. ``out`` and ``lse`` are of all blocks together, so the
    block's probabilities are those of the whole softmax."""
    wide = _serving(k, q), _serving(v, q)
    dq, dk, dv = _flash_backward(gradient, q, *wide, out, lse, 0.0, masked, scale=scale)
    groups = (k.shape[1], q.shape[1] // k.shape[1])
    return dq, dk.unflatten(1, groups).sum(2), dv.unflatten(1, groups).sum(2)


def _serving(k: Tensor, q: Tensor) -> Tensor:
    """Repeats each head of keys for all query heads that share it."""
    return k if k.shape[1] == q.shape[1] else k.repeat_interleave(q.shape[1] // k.shape[1], 1)


class _Ring(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, comm: Any, causal: bool, scale: float, span: Span
    ) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros(q.shape, dtype=wide)
        lse = torch.full(q.shape[:3], -torch.inf, dtype=wide)
        for name, rows, _, masked, k_now, v_now in _round(q, k, v, comm, causal):
            with span(name):
                more, its_lse = block(q[:, :, rows], k_now, v_now, masked, scale)
                before = lse[:, :, rows]
                both = torch.logaddexp(before, its_lse)
                out[:, :, rows] *= (before - both).exp().unsqueeze(3)
                out[:, :, rows] += more * (its_lse - both).exp().unsqueeze(3)
                lse[:, :, rows] = both
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rest = comm, causal, scale, span
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        comm, causal, scale, span = ctx.rest
        dq = torch.zeros(q.shape, dtype=lse.dtype)
        # The partial gradients of a rank's keys follow these around the ring, one turn behind.
        known = torch.zeros(2, *k.shape, dtype=lse.dtype)
        moving: list[Any] = []
        for name, rows, columns, masked, k_now, v_now in _round(q, k, v, comm, causal):
            with span(f"{name} back"):
                of_rows = gradient[:, :, rows], q[:, :, rows], out[:, :, rows], lse[:, :, rows]
                more, *of_pair = block_backward(*of_rows, k_now, v_now, masked, scale)
                dq[:, :, rows] += more
            _wait(moving)
            for gradients, of_block in zip(known, of_pair, strict=True):
                gradients[:, :, columns] += of_block
            sent, known = known, empty_like(known, comm)
            moving = start_shift(sent, known, comm, tag=tags.GRADIENTS)
        _wait(moving)
        dk, dv = known.to(k.dtype)
        return dq.to(q.dtype), dk, dv, None, None, None, None


def _round(q: Tensor, k: Tensor, v: Tensor, comm: Any, causal: bool) -> Iterator[Any]:
    """For each turn: the block's name, its ``block_of``, and its keys and values. The next keys and
    values are received meanwhile."""
    kv = torch.stack((k, v))
    for turn in range(comm.world_size):
        source, coming = (comm.rank - turn) % comm.world_size, empty_like(kv, comm)
        moving = start_shift(kv, coming, comm) if turn < comm.world_size - 1 else []
        rows, columns, masked = block_of(comm.rank, source, causal, q.shape[2])
        yield f"block {source}", rows, columns, masked, *kv[:, :, :, columns]
        _wait(moving)
        kv = coming


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()
