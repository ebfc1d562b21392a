"""ZeRO in three stages, in numpy: what each rank keeps of a model's memory.

Data parallel ranks all hold the same parameters and step the same optimizer. ZeRO lets each keep
1/N instead, of more and more:

    stage   parameters   gradients   optimizer   sent for each parameter
    0       whole        whole       whole       gradient: all-reduce, which is two halves
    1       whole        whole       1/N         the halves: reduce-scatter of gradients, all-gather
                                                 of parameters
    2       whole        1/N         1/N         the same, and a gradient goes once it was sent
    3       1/N          1/N         1/N         half as much again: parameters are gathered for
                                                 forward and once more for backward

``formula`` is the paper's, with one layer more where a layer has to be whole for a moment.
across_steps.py has stage 1 as a schedule: *when* its halves travel. Here nothing overlaps.

**When it loses.** Stage 1 sends what data parallel training sends anyway. Stage 3 waits for every
layer twice unless the next one is gathered while this one computes, and small layers pay a latency
each. Optimizers that look at a whole matrix can't be cut (element_wise.py).

A model is a list of layers: ``forward(weights, x)`` gives y, and ``backward(weights, x, dy)`` gives
dx and the gradient of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class Zero:
    """``update`` is one of element_wise.py. ``peak`` has the most bytes that this rank has held of
    parameters, gradients and the optimizer's state, at any moment since it was made."""

    def __init__(
        self, stage: int, layers: Sequence[Any], weights: Sequence[Array], comm: Any,
        update: Callable[..., None], **settings: Any,
    ) -> None:  # fmt: skip
        if stage not in (0, 1, 2, 3):
            raise ValueError(f"ZeRO has the stages 0 (none of it) to 3, and not {stage!r}")
        self.stage, self.layers, self.comm = stage, layers, comm
        self.update, self.settings = update, settings
        self.shapes = [weight.shape for weight in weights]
        rows = [self.rows(weight) for weight in weights]
        self.parameters = [self.mine(row).copy() if stage == 3 else row for row in rows]
        self.gradients: list[Array | None] = [None for _ in weights]
        self.states: list[dict[str, Any]] = [{} for _ in weights]
        self.visiting: Array | None = None  # under stage 3: the layer that is whole now
        self.peak = {"parameters": 0, "gradients": 0, "optimizer": 0}

    def step(self, x: Array, loss_gradient: Callable[[Array], Array]) -> Array:
        """One step on this rank's part of the batch. Returns what the model says."""
        inputs = []
        for number, layer in enumerate(self.layers):
            inputs.append(x)
            x = layer.forward(self.whole(number), x)
            self.look()
        output, gradient = x, loss_gradient(x)
        for number in reversed(range(len(self.layers))):
            weights = self.whole(number)
            gradient, of_weights = self.layers[number].backward(weights, inputs[number], gradient)
            self.gradients[number] = self.rows(of_weights)
            self.look()
            if self.stage >= 2:
                self.gradients[number] = self.reduced(number)  # the whole one is gone
        for number in range(len(self.layers)):
            if self.stage < 2:
                self.gradients[number] = self.reduced(number)
            self.optimizer_step(number)
            self.look()
        self.gradients = [None for _ in self.layers]
        self.visiting = None
        return output

    def optimizer_step(self, number: int) -> None:
        parameters = self.parameters[number]
        own = self.mine(parameters) if self.stage in (1, 2) else parameters
        self.update(own, self.gradients[number], self.states[number], **self.settings)
        if self.stage in (1, 2):
            self.comm.all_gather(parameters, own.copy())

    def whole(self, number: int) -> Array:
        """The weights of a layer, which stage 3 gathers, in the place of the last one's."""
        rows = self.parameters[number]
        if self.stage == 3:
            self.visiting = rows = np.empty((self.comm.world_size, rows.size), rows.dtype)
            self.comm.all_gather(rows, self.parameters[number])
        shape = self.shapes[number]
        flat: Array = rows.reshape(-1)[: int(np.prod(shape))]
        return flat.reshape(shape)

    def reduced(self, number: int) -> Array:
        """The mean gradient: all of it, or this rank's row."""
        gradient = self.gradients[number]
        assert gradient is not None
        if self.stage == 0:
            self.comm.all_reduce(gradient, "mean")
            return gradient
        part = np.empty_like(self.mine(gradient))
        self.comm.reduce_scatter(part, gradient, "mean")
        return part

    def rows(self, tensor: Array) -> Array:
        """A row for each rank, the last one filled up with zeros."""
        rows = np.zeros((self.comm.world_size, -(-tensor.size // self.comm.world_size)))
        rows = rows.astype(tensor.dtype)
        rows.reshape(-1)[: tensor.size] = tensor.reshape(-1)
        return rows

    def mine(self, rows: Array) -> Array:
        row: Array = rows[self.comm.rank]
        return row

    def look(self) -> None:
        """What is held now."""
        visiting = 0 if self.visiting is None else self.visiting.nbytes
        state = [v for one in self.states for v in one.values() if isinstance(v, np.ndarray)]
        held = {
            "parameters": sum(p.nbytes for p in self.parameters) + visiting,
            "gradients": sum(g.nbytes for g in self.gradients if g is not None),
            "optimizer": sum(v.nbytes for v in state),
        }
        self.peak = {name: max(self.peak[name], held[name]) for name in held}


def formula(stage: int, world: int, sizes: Sequence[int], state: int = 2) -> dict[str, float]:
    """Elements that a rank holds at most, of layers of these sizes; ``state``: numbers that the
    optimizer keeps for each parameter, 2 for Adam.

    >>> formula(1, 4, [80, 20]), formula(3, 4, [80, 20])["parameters"]
    ({'parameters': 100, 'gradients': 100, 'optimizer': 50.0}, 105.0)
    """
    total, largest = sum(sizes), max(sizes)
    # While the last layer's gradient is whole, the others are not there yet or are cut.
    arriving = max(size + sum(sizes[n + 1 :]) / world for n, size in enumerate(sizes))
    return {
        "parameters": total / world + largest if stage == 3 else total,
        "gradients": arriving if stage >= 2 else total,
        "optimizer": state * total / (world if stage else 1),
    }
