"""Data parallel training whose communication continues under the next forward, in numpy.

Gradients are sent during backward, but the last ones, of the layers that forward needs first, are
ready only at its end. A step that waits for them is idle meanwhile. But the next forward needs one
layer at a time, so each layer can wait for its own gradient.

A *bucket*, here the weights of one layer, goes through *phases*: collectives and ``update``, which
is the optimizer's part. Schedules differ only in where ``update`` stands
and where the program waits:

             phases                                       what waits
``Plain``    all_reduce, update                           the end of backward, for all
``Priority`` all_reduce, update                           forward, for the layer it needs
``Dear``     reduce_scatter, all_gather, update           the same
``Zero1``    reduce_scatter, update of 1/N, all_gather    step() for the first, forward for the last
``Zero2``    the same                                     the same, and backward for memory

All send as many bytes, since a ring or a two-shot all-reduce *is* a reduce-scatter and an
all-gather. And all give the same weights: a layer never computes with weights that lack their
update.

Ranks are simulated, one after the other. ``gradient(weights, batch)`` is forward and backward of
one rank: it reads ``weights[layer]`` when it needs a layer, and returns a gradient for each, or
None.

>>> from dpcore.reference.element_wise import sgd
>>> def gradient(weights, x):  # of the product of x and two numbers
...     first, second = weights[0], weights[1]
...     return [x * second, x * first]
>>> def trained(schedule):
...     ones = [np.ones(1), np.ones(1)]
...     training = schedule(ones, gradient, sgd, world=2, settings=[{"lr": 0.1}] * 2)
...     for _ in range(2):
...         training.backward([np.array([1.0]), np.array([3.0])])
...         training.step()
...     return training
>>> for name, schedule in SCHEDULES.items():
...     print(name, trained(schedule).result())
plain [array([0.64]), array([0.64])]
priority [array([0.64]), array([0.64])]
dear [array([0.64]), array([0.64])]
zero1 [array([0.64]), array([0.64])]
zero2 [array([0.64]), array([0.64])]
>>> print(*trained(Priority).log[5:11], sep=", ")
wait for 0, update 0, forward 0, wait for 1, update 1, forward 1
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Update = Callable[..., None]  # one of element_wise.py
Gradient = Callable[[Any, Any], Sequence[np.ndarray | None]]
Bucket = Any  # a row for each rank: an array, or a dict of those rows that this rank keeps


def all_reduce(buckets: Sequence[np.ndarray]) -> None:
    """Gives every rank the mean."""
    mean = sum(buckets) / len(buckets)
    for bucket in buckets:
        bucket[:] = mean


def reduce_scatter(buckets: Sequence[np.ndarray]) -> None:
    """Gives rank r the mean of row r. A bucket has a row for each rank; a rank's other rows are
    then useless."""
    for rank, bucket in enumerate(buckets):
        bucket[rank] = sum(other[rank] for other in buckets) / len(buckets)


def all_gather(buckets: Sequence[np.ndarray]) -> None:
    """Gives every rank row r of each rank r."""
    for rank, owner in enumerate(buckets):
        for bucket in buckets:
            bucket[rank] = owner[rank]


class Plain:
    """Sends during backward, waits at its end, updates in ``step()``: forward waits for nothing.

    ``settings`` are the optimizer's, a dict per layer; a learning rate scheduler changes them
    between steps. ``log`` lists the actions of rank 0.
    """

    def __init__(
        self, weights: Sequence[np.ndarray], gradient: Gradient, update: Update, world: int,
        settings: Sequence[dict[str, Any]],
    ) -> None:  # fmt: skip
        self.world, self.gradient, self.update_weights = world, gradient, update
        self.settings, self.shapes = settings, [layer.shape for layer in weights]
        self.layers, self.ranks = range(len(weights)), range(world)
        self.weights = [[rows_of(layer, world) for layer in weights] for _ in self.ranks]
        self.gradients: list[list[Bucket]] = [
            [np.zeros_like(layer) for layer in mine] for mine in self.weights
        ]
        self.states: list[list[dict[str, Any]]] = [[{} for _ in weights] for _ in self.ranks]
        self.phases: list[list[tuple[Any, list[np.ndarray]]]] = [[] for _ in weights]  # in flight
        self.recorded: list[dict[int, dict[str, Any]]] = [{} for _ in self.ranks]  # updates to make
        self.order_of_need: list[int] = []
        self.has_gradient: set[int] = set()
        self.log: list[str] = []

    # ---- what differs: where phases begin, where a rank waits, where update stands -------------

    def gradient_ready(self, layer: int) -> None:
        self.launch(all_reduce, layer, self.gradients)

    def backward_end(self) -> None:
        for layer in self.layers:
            self.wait(layer)

    def optimizer_step(self) -> None:
        for layer in sorted(self.has_gradient):
            for rank in self.ranks:
                self.update(rank, layer, self.settings[layer])

    def forward_needs(self, rank: int, layer: int) -> None:
        """Waits for nothing: the layer is up to date."""

    def own(self, rank: int, bucket: Bucket) -> np.ndarray:
        """The part of a bucket that this rank updates."""
        whole: np.ndarray = bucket
        return whole

    def squares(self) -> float:
        """The squared norm of all gradients. Each rank has them, so it needs no communication."""
        return sum(float((gradient**2).sum()) for gradient in self.gradients[0])

    # ---- what a program does in a step -------------------------------------------------------

    def backward(self, batches: Sequence[Any]) -> None:
        """Forward and backward. The layer that forward needs first gets its gradient last."""
        self.accumulate(batches)
        for layer in reversed(self.order_of_need):
            self.gradient_ready(layer)
        self.backward_end()

    def accumulate(self, batches: Sequence[Any]) -> None:
        """Forward and backward that only sum gradients, as within ``no_sync()``."""
        found = [self.forward(rank, batch) for rank, batch in enumerate(batches)]
        for mine, gradients in zip(self.gradients, found, strict=True):
            for layer, gradient in enumerate(gradients):
                if gradient is not None:
                    view_of(mine[layer], self.shapes[layer])[...] += gradient
                    self.has_gradient.add(layer)

    def step(self) -> None:
        self.log.append("step()")
        self.optimizer_step()
        self.has_gradient.clear()

    def clip(self, norm: float) -> None:
        """Scales all gradients so that their common norm is at most ``norm``. Call it between
        ``backward()`` and ``step()``."""
        for layer in self.layers:
            self.wait(layer)
        scale = min(1.0, norm / (self.squares() ** 0.5 + 1e-6))
        for rank, mine in enumerate(self.gradients):
            for gradient in mine:
                self.own(rank, gradient)[...] *= scale

    def forward(self, rank: int, batch: Any) -> Sequence[np.ndarray | None]:
        gradients = self.gradient(Weights(self, rank), batch)
        self.order_of_need += [layer for layer in self.layers if layer not in self.order_of_need]
        self.finish(rank)  # also layers that it did not use: after forward nothing is in flight
        return gradients

    def finish(self, rank: int) -> None:
        """Waits for all layers. Also before weights are saved or evaluated, and after training."""
        for layer in self.layers:
            self.forward_needs(rank, layer)

    def result(self, rank: int = 0) -> list[np.ndarray]:
        self.finish(rank)
        return [
            view_of(layer, shape).copy()
            for layer, shape in zip(self.weights[rank], self.shapes, strict=True)
        ]

    # ---- the operations that all schedules use -----------------------------------------------

    def launch(self, phase: Any, layer: int, memory: Sequence[Sequence[np.ndarray]]) -> None:
        """Sends a bucket on all ranks. Nothing moves before a wait, the latest that a network can
        be."""
        self.log.append(f"send {phase.__name__} {layer}")
        self.phases[layer].append((phase, [mine[layer] for mine in memory]))

    def wait(self, layer: int) -> None:
        """Waits for all phases of the bucket that have been launched."""
        if self.phases[layer]:
            self.log.append(f"wait for {layer}")
        for phase, buckets in self.phases[layer]:
            phase(buckets)
        self.phases[layer].clear()

    def update(self, rank: int, layer: int, settings: dict[str, Any]) -> None:
        """Updates this rank's part of a layer."""
        if rank == 0:
            self.log.append(f"update {layer}")
        weights = self.own(rank, self.weights[rank][layer])
        gradient = self.own(rank, self.gradients[rank][layer])
        self.update_weights(weights, gradient, self.states[rank][layer], **settings)
        self.gradients[rank][layer] = np.zeros_like(self.weights[rank][layer])


class Priority(Plain):
    """Backward waits for nothing. ``step()`` only records the update, with the learning rate of
    this step; a layer is updated when the next forward needs it.

    The layer that is needed first is sent last, so it must overtake those that still wait for the
    network: the sooner forward needs a bucket, the more urgent it is.
    """

    def backward_end(self) -> None:
        """Does not wait."""

    def optimizer_step(self) -> None:
        for recorded in self.recorded:
            recorded.update({layer: dict(self.settings[layer]) for layer in self.has_gradient})

    def forward_needs(self, rank: int, layer: int) -> None:
        self.wait(layer)
        if (settings := self.recorded[rank].pop(layer, None)) is not None:
            self.update(rank, layer, settings)


class Dear(Priority):
    """Cuts the all-reduce in two. The first half runs under backward, in the order of arrival, and
    the second half under forward, in the order of need: nothing has to overtake.

    A reduce-scatter alone leaves each rank with 1/N of the mean. The rest of the bucket is useless
    until the all-gather is complete.
    """

    def gradient_ready(self, layer: int) -> None:
        self.launch(reduce_scatter, layer, self.gradients)

    def backward_end(self) -> None:
        for layer in self.order_of_need:
            self.launch(all_gather, layer, self.gradients)


class Zero1(Dear):
    """Updates each part where its gradient is, and gathers weights instead of gradients: each rank
    has 1/N of the optimizer's work and of its state.

    ``step()`` waits for gradients, so only the second half runs under forward. A rank never has a
    whole gradient, so clipping sums one number over the ranks.
    """

    def backward_end(self) -> None:
        """Does nothing: weights are gathered after their update."""

    def optimizer_step(self) -> None:
        for layer in reversed(self.order_of_need):  # the order in which they were sent
            self.wait(layer)
            if layer in self.has_gradient:
                for rank in self.ranks:
                    self.update(rank, layer, self.settings[layer])
                self.launch(all_gather, layer, self.weights)

    def forward_needs(self, rank: int, layer: int) -> None:
        self.wait(layer)

    def own(self, rank: int, bucket: Bucket) -> np.ndarray:
        row: np.ndarray = bucket[rank]
        return row

    def squares(self) -> float:
        return sum(
            float((gradient[rank] ** 2).sum())
            for rank in self.ranks
            for gradient in self.gradients[rank]
        )


class Zero2(Zero1):
    """Keeps only its row of each gradient: the bucket is freed after its reduce-scatter.

    There is memory for ``at_a_time`` whole buckets in flight. A launch waits for the bucket that
    last used its memory, so backward stalls if gradients arrive faster than the network sends them.
    """

    at_a_time = 4

    def gradient_ready(self, layer: int) -> None:
        travelling = [sent for sent in reversed(self.order_of_need) if self.phases[sent]]
        if len(travelling) == self.at_a_time:
            self.wait(travelling[0])
        super().gradient_ready(layer)

    def wait(self, layer: int) -> None:
        is_gradient = any(phase is reduce_scatter for phase, _ in self.phases[layer])
        super().wait(layer)
        if is_gradient and layer in self.has_gradient:  # else it was not used, and all is zero
            for rank, mine in enumerate(self.gradients):
                mine[layer] = {rank: mine[layer][rank].copy()}


SCHEDULES = {"plain": Plain, "priority": Priority, "dear": Dear, "zero1": Zero1, "zero2": Zero2}


class Weights:
    """A rank's weights as its forward sees them: reading a layer first waits for it."""

    def __init__(self, training: Plain, rank: int) -> None:
        self.training, self.rank = training, rank

    def __len__(self) -> int:
        return len(self.training.shapes)

    def __getitem__(self, layer: int) -> np.ndarray:
        training = self.training
        shape = training.shapes[layer]
        if layer not in training.order_of_need:  # learned from rank 0, which runs first
            training.order_of_need.append(layer)
        training.forward_needs(self.rank, layer)
        if self.rank == 0:
            training.log.append(f"forward {layer}")
        return view_of(training.weights[self.rank][layer], shape)


def rows_of(layer: np.ndarray, world: int) -> np.ndarray:
    """A copy of a layer as a bucket: a row for each rank, the last one padded with zeros."""
    rows = np.zeros((world, -(-layer.size // world)), layer.dtype)
    rows.reshape(-1)[: layer.size] = layer.reshape(-1)
    return rows


def view_of(bucket: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The layer in a bucket."""
    flat: np.ndarray = bucket.reshape(-1)[: math.prod(shape)]
    return flat.reshape(shape)
