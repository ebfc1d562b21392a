"""A small GPT of which a rank can have a part: of its matrices, its layers, or its tokens.

``layers()`` are an embedding, blocks and a head, for torch's Sequential. With no rank to share with
this is an ordinary model. ``tensor`` is a communicator of ranks that share heads and the columns
and rows of matrices; ``tokens`` is one of ranks that share each sequence, whose attention is a ring
or, with ``by_heads``, Ulysses. A rank with some of the
layers is a stage of a pipeline. Every rank draws all weights in the same order and keeps its part,
so the model is the same one, however it is shared.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from dpcore.parallel.attention import ring_attention, ulysses_attention, zigzag
from dpcore.parallel.functional import copy_to, reduce_from
from dpcore.tools.compare.training.text import LENGTH

WIDTH, HEADS, BLOCKS = 256, 4, 4


class Weights:
    """Draws, and cuts by the ranks of ``tensor``."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self.numbers = torch.Generator().manual_seed(0)

    def draw(self, *shape: int, cut: int | None = None) -> nn.Parameter:
        whole = torch.randn(*shape, generator=self.numbers) * 0.02
        if cut is not None and self.tensor is not None:
            whole = whole.chunk(self.tensor.world_size, cut)[self.tensor.rank].clone()
        return nn.Parameter(whole)


class Embedding(nn.Module):
    def __init__(self, weights: Weights, letters: int, places: Tensor) -> None:
        super().__init__()
        self.letters, self.places = weights.draw(letters, WIDTH), weights.draw(LENGTH, WIDTH)
        self.mine = places

    def forward(self, letters: Tensor) -> Tensor:
        return self.letters[letters] + self.places[self.mine]


class Block(nn.Module):
    """Attention, then two matrices. Ranks of ``tensor`` add up what their halves give, twice; those
    of ``tokens`` see each other's in attention only."""

    def __init__(self, weights: Weights, tokens: Any, by_heads: bool) -> None:
        super().__init__()
        self.tensor, self.tokens, self.by_heads = weights.tensor, tokens, by_heads
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.heads = weights.draw(WIDTH, 3, HEADS, WIDTH // HEADS, cut=2)
        self.out = weights.draw(HEADS, WIDTH // HEADS, WIDTH, cut=0)
        self.up = weights.draw(WIDTH, 4 * WIDTH, cut=1)
        self.down = weights.draw(4 * WIDTH, WIDTH, cut=0)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.total(self.attention(self.alike(self.norms[0](x))))
        seen = self.alike(self.norms[1](x))
        return x + self.total(gelu(seen @ self.up) @ self.down)

    def attention(self, x: Tensor) -> Tensor:
        of_heads = (x @ self.heads.flatten(1)).unflatten(-1, self.heads.shape[1:])
        q, k, v = of_heads.permute(2, 0, 3, 1, 4)
        if self.tokens is None:
            seen = scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            shared = ulysses_attention if self.by_heads else ring_attention
            seen = shared(q, k, v, comm=self.tokens, causal=True)
        return seen.transpose(1, 2).flatten(2) @ self.out.flatten(0, 1)

    def alike(self, x: Tensor) -> Tensor:
        return x if self.tensor is None else copy_to(x, self.tensor)

    def total(self, x: Tensor) -> Tensor:
        return x if self.tensor is None else reduce_from(x, self.tensor)


class Head(nn.Module):
    def __init__(self, weights: Weights, letters: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.letters = weights.draw(WIDTH, letters)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) @ self.letters


def places_of(tokens: Any, by_heads: bool) -> Tensor:
    """Which tokens of a sequence this rank has: in a ring by zigzag, for Ulysses in turn."""
    if by_heads:
        return torch.arange(LENGTH).chunk(tokens.world_size)[tokens.rank]
    return zigzag(LENGTH, tokens.world_size, tokens.rank)


def layers(
    letters: int, blocks: int, tensor: Any = None, tokens: Any = None, by_heads: bool = False
) -> list[nn.Module]:
    weights = Weights(tensor)
    places = torch.arange(LENGTH) if tokens is None else places_of(tokens, by_heads)
    middle = [Block(weights, tokens, by_heads) for _ in range(blocks)]
    return [Embedding(weights, letters, places), *middle, Head(weights, letters)]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """A mean over all letters."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten())
