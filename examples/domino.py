"""Tensor parallel layers with the batch cut in two: one half is sent while the other is computed.

    python examples/domino.py [folder]
    dpcore show whole.json halves.json --open

A tensor parallel layer waits for the sum of all ranks' parts before the next one begins, so nothing
hides its all-reduce. Rows of a batch need nothing from each other: with two halves, the sum of one
travels under the arithmetic of the other, forward and backward (Domino, arXiv 2409.15241).
`whole.json` is a step of the usual layers and `halves.json` one of the same layers in halves, over
an emulated link. Both have the same gradients, up to rounding in float64.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dpcore as dp
from dpcore.parallel.functional import copy_to, reduce_from

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
WIDTH, LAYERS, TOKENS, STEPS = 256, 4, 256, 2
LINK = "2gbit,50us"


class Layer(nn.Module):
    """Two matrices: a rank has some columns of the first and as many rows of the second."""

    def __init__(self, comm: dp.Communicator) -> None:
        super().__init__()
        inner = 4 * WIDTH // comm.world_size
        mine = slice(comm.rank * inner, (comm.rank + 1) * inner)
        up, down = torch.randn(2, WIDTH, 4 * WIDTH, dtype=torch.float64) / WIDTH**0.5
        self.up, self.down = nn.Parameter(up[:, mine].clone()), nn.Parameter(down.T[mine].clone())

    def part(self, x: Tensor) -> Tensor:
        """What this rank adds to x; all ranks' parts together are what the layer adds."""
        return nn.functional.gelu(x @ self.up) @ self.down


class Half:
    """``value``: activations on the way forward, their gradients on the way back. Either way a
    layer adds the sum of all ranks' parts to it, which may still be travelling."""

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self._sum: Tensor | None = None

    def send(self, part: Tensor, comm: dp.Communicator) -> None:
        self._sum = comm.empty(*part.shape, dtype=part.dtype).copy_(part)
        self._work = comm.all_reduce(self._sum, async_op=True)

    def arrived(self) -> Tensor:
        if self._sum is not None:
            self._work.wait()
            self.value, self._sum = self.value + self._sum, None
        return self.value


def whole(model: nn.Sequential, x: Tensor, comm: dp.Communicator, trace: Any) -> float:
    for number, layer in enumerate(model):
        with span(trace, f"layer {number}"):
            x = x + reduce_from(layer.part(copy_to(x, comm)), comm)
    loss = x.square().mean()
    with span(trace, "backward"):
        torch.autograd.backward(loss)
    return loss.item()


def in_halves(model: nn.Sequential, x: Tensor, comm: dp.Communicator, trace: Any) -> float:
    halves = [Half(half) for half in x.detach().chunk(2)]
    kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    for number, layer in enumerate(model):
        for h, half in enumerate(halves):  # half 0 of the next layer computes while 1 is summed
            with span(trace, f"layer {number} half {h}"):
                seen = half.arrived().detach().requires_grad_()
                part = layer.part(seen)
                half.send(part.detach(), comm)
            kept[number, h] = seen, part
    loss = 0.0
    for half in halves:
        y = half.arrived()
        loss += y.square().sum().item() / x.numel()
        half.value = 2 * y / x.numel()  # the gradient of that
    for number, layer in reversed([*enumerate(model)]):
        weights = [*layer.parameters()]
        for h, half in enumerate(halves):
            with span(trace, f"layer {number} half {h} back"):
                seen, part = kept.pop((number, h))
                of_seen, *found = torch.autograd.grad(part, [seen, *weights], half.arrived())
                half.send(of_seen, comm)
                for weight, gradient in zip(weights, found, strict=True):
                    weight.grad = gradient if weight.grad is None else weight.grad + gradient
    for half in halves:
        half.arrived()
    return loss


def span(trace: Any, name: str) -> AbstractContextManager[None]:
    made: AbstractContextManager[None] = trace.span(name)
    return made


def train(comm: dp.Communicator) -> list[tuple[str, float, float, float, list[Tensor]]]:
    """Of each way its name, milliseconds exposed and in flight of a step, loss, and gradients."""
    torch.set_num_threads(1)
    torch.manual_seed(1)  # all ranks draw the same, and keep their parts
    model = nn.Sequential(*(Layer(comm) for _ in range(LAYERS)))
    x = torch.randn(TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    found = []
    for way in (whole, in_halves):
        name = way.__name__.removeprefix("in_")
        for path, steps in ((None, 1), (FOLDER / f"{name}.json", STEPS)):  # one touches memory
            with dp.trace(path, comm=comm) as trace:
                for _ in range(steps):
                    model.zero_grad()
                    loss = way(model, x, comm, trace)
        gradients = [
            weight.grad.clone() for weight in model.parameters() if weight.grad is not None
        ]
        times = trace.exposed_ms / STEPS, trace.communication_ms / STEPS
        found.append((name, *times, loss, gradients))
    return found


if __name__ == "__main__":
    by_rank = dp.spawn(train, 2, link=LINK)
    for name, exposed, sent, loss, _ in by_rank[0]:
        print(f"{name:7}exposed {exposed:5.1f} of {sent:5.1f} ms a step, loss {loss:.9f}")
    most = max(
        (one - other).abs().max().item()
        for (*_, ones), (*_, others) in by_rank
        for one, other in zip(ones, others, strict=True)
    )
    print(f"gradients differ by at most {most:.1e}")
