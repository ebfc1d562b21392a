"""Layers whose weights ranks share, in numpy: Megatron's, with every collective in sight.

Two matrices behind each other need one sum. The first is cut by *columns* (its outputs): each rank
computes some of the features in between, with nothing to send. The second is cut by *rows* (its
inputs): each rank has those features, and its product is one term of the result, which an
all-reduce adds up. Backward goes the other way: the sum then is in front of the first matrix.

    forward     x alike on all ranks -> ColumnParallel -> features of this rank -> RowParallel, sum
    backward    sum, dx alike        <- ColumnParallel <- features of this rank <- RowParallel, dy

**Sequence parallel.** Between such pairs (norms, dropout) all ranks do the same work on the same
tokens. With ``by_tokens=True`` each has its part of the tokens there: the all-reduce becomes a
reduce-scatter of tokens, and an all-gather in front of the next pair brings them back.

**Bytes and steps.** An all-reduce of the activation in forward and one in backward for each pair,
2 (N-1)/N of its bytes. By tokens it is as many bytes in two operations, and 1/N of the activations
are kept between pairs.

**When it loses.** Nothing hides these sums, since the next layer needs them: N ranks want to share
a host. A matrix cut too thin computes slowly, and all ranks compute what is not cut. With tokens
cut, gradients of norms and of a row layer's bias are of a part of the tokens only: they too need a
sum (``of_all_tokens``), which is easily forgotten.

``comm`` is anything with ``rank``, ``world_size`` and ``all_reduce``, ``all_gather``,
``reduce_scatter`` on numpy arrays. Weights are [outputs, inputs]; x is [tokens, features].
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def part_of(length: int, comm: Any) -> slice:
    """This rank's part of so many rows, columns or words."""
    size, rest = divmod(length, comm.world_size)
    if rest:
        raise ValueError(f"{length} can't be cut into {comm.world_size} equal parts")
    return slice(comm.rank * size, (comm.rank + 1) * size)


def summed(x: Array, comm: Any, op: str = "sum") -> Array:
    x = np.array(x, order="C")
    comm.all_reduce(x, op)
    return x


def gathered(x: Array, comm: Any) -> Array:
    """The tokens of all ranks."""
    whole = np.empty((len(x) * comm.world_size, *x.shape[1:]), x.dtype)
    comm.all_gather(whole, np.ascontiguousarray(x))
    return whole


def scattered(x: Array, comm: Any) -> Array:
    """The sum over the ranks, for this rank's tokens."""
    part = np.empty_like(x[part_of(len(x), comm)])
    comm.reduce_scatter(part, np.ascontiguousarray(x))
    return part


class ColumnParallel:
    """Some of the outputs of ``x @ weight.T + bias``."""

    def __init__(self, weight: Array, bias: Array, comm: Any, by_tokens: bool = False) -> None:
        mine = part_of(len(weight), comm)
        self.weight, self.bias = weight[mine].copy(), bias[mine].copy()
        self.comm, self.by_tokens = comm, by_tokens

    def forward(self, x: Array) -> Array:
        self.x = gathered(x, self.comm) if self.by_tokens else x
        y: Array = self.x @ self.weight.T + self.bias
        return y

    def backward(self, dy: Array) -> Array:
        self.weight_gradient, self.bias_gradient = dy.T @ self.x, dy.sum(0)
        dx = dy @ self.weight  # through the outputs of this rank only
        return scattered(dx, self.comm) if self.by_tokens else summed(dx, self.comm)


class RowParallel:
    """All outputs of ``x @ weight.T + bias``, of some of the inputs on each rank."""

    def __init__(self, weight: Array, bias: Array, comm: Any, by_tokens: bool = False) -> None:
        self.weight, self.bias = weight[:, part_of(weight.shape[1], comm)].copy(), bias.copy()
        self.comm, self.by_tokens = comm, by_tokens

    def forward(self, x: Array) -> Array:
        self.x = x
        term = x @ self.weight.T
        whole = scattered(term, self.comm) if self.by_tokens else summed(term, self.comm)
        return whole + self.bias  # after the sum, or it would count N times

    def backward(self, dy: Array) -> Array:
        self.bias_gradient = of_all_tokens(dy.sum(0), self)
        dy = gathered(dy, self.comm) if self.by_tokens else dy
        self.weight_gradient = dy.T @ self.x
        dx: Array = dy @ self.weight
        return dx


def of_all_tokens(gradient: Array, layer: Any) -> Array:
    """The gradient of something that all ranks hold whole, while each has seen its own tokens."""
    return summed(gradient, layer.comm) if layer.by_tokens else gradient


class Norm:
    """Layer norm, of all tokens or of this rank's."""

    def __init__(self, weight: Array, comm: Any, by_tokens: bool = False) -> None:
        self.weight, self.comm, self.by_tokens = weight.copy(), comm, by_tokens

    def forward(self, x: Array) -> Array:
        centred = x - x.mean(1, keepdims=True)
        self.scale = 1 / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-5)
        self.normed = centred * self.scale
        y: Array = self.normed * self.weight
        return y

    def backward(self, dy: Array) -> Array:
        self.weight_gradient = of_all_tokens((dy * self.normed).sum(0), self)
        inner = dy * self.weight
        along = (inner * self.normed).mean(1, keepdims=True)
        dx: Array = self.scale * (inner - inner.mean(1, keepdims=True) - self.normed * along)
        return dx


class VocabularyParallelCrossEntropy:
    """The mean loss of all tokens, from the logits of this rank's words: no rank ever has a row of
    all logits. Three all-reduces of a number for each token take the place of a gather of
    tokens x words."""

    def __init__(self, words: int, comm: Any) -> None:
        self.mine, self.comm = part_of(words, comm), comm

    def forward(self, logits: Array, targets: Array) -> float:
        logits = logits - summed(logits.max(1), self.comm, "max")[:, None]
        exponentials = np.exp(logits)
        total = summed(exponentials.sum(1), self.comm)
        here = (targets >= self.mine.start) & (targets < self.mine.stop)
        rows, words = np.flatnonzero(here), targets[here] - self.mine.start
        of_target = np.zeros(len(targets), logits.dtype)
        of_target[rows] = logits[rows, words]
        self.gradient = exponentials / total[:, None] / len(targets)
        self.gradient[rows, words] -= 1 / len(targets)
        return float((np.log(total) - summed(of_target, self.comm)).mean())

    def backward(self) -> Array:
        """Of this rank's logits."""
        return self.gradient
