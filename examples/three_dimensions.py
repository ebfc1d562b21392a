"""A small GPT in three dimensions, data x pipeline x tensor, and the same in one process.

    python examples/three_dimensions.py [steps [run.json]]

Eight ranks, which are threads here: two copies of the model (data), each cut into two stages
(pipeline), each of whose matrices two ranks share (tensor). Both runs begin with the same numbers
and must stay equal, up to rounding in float64. `dpcore show run.json` shows the last step: F3 is
the forward of micro-batch 3, B3 its backward, arrows are messages, and a table says how long each
layer waited for its all-reduces.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, scaled_dot_product_attention

import dpcore as dp
from dpcore.parallel.functional import copy_to, reduce_from
from dpcore.reference.pipeline import Pipeline

WORDS, WIDTH, HEADS, LAYERS, LENGTH, BATCH = 32, 16, 4, 4, 8, 16


class Weights:
    """Every rank draws all weights, in the same order, and keeps its part."""

    def __init__(self, comm: Any) -> None:
        self.numbers = torch.Generator().manual_seed(1)
        self.comm = comm

    def draw(self, *shape: int, cut: int | None = None) -> nn.Parameter:
        whole = torch.randn(*shape, generator=self.numbers, dtype=torch.float64) * 0.1
        place = [slice(None)] * len(shape)
        if cut is not None:
            size = shape[cut] // self.comm.world_size
            place[cut] = slice(self.comm.rank * size, (self.comm.rank + 1) * size)
        made = nn.Parameter(whole[tuple(place)].clone())
        made.place = tuple(place)  # type: ignore[attr-defined]
        return made


class Embedding(nn.Module):
    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.words, self.places = weights.draw(WORDS, WIDTH), weights.draw(LENGTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.words[tokens] + self.places


class Block(nn.Module):
    """Attention, then two matrices: in each, one cut by outputs, one by inputs, and one sum."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.comm = weights.comm
        self.norms = weights.draw(2, WIDTH)
        self.heads = weights.draw(3, HEADS, WIDTH, WIDTH // HEADS, cut=1)
        self.out = weights.draw(HEADS, WIDTH // HEADS, WIDTH, cut=0)
        self.up = weights.draw(WIDTH, 4 * WIDTH, cut=1)
        self.down = weights.draw(4 * WIDTH, WIDTH, cut=0)

    def forward(self, x: Tensor) -> Tensor:
        seen = copy_to(layer_norm(x, (WIDTH,), 1 + self.norms[0]), self.comm)
        q, k, v = torch.einsum("btw,nhwd->nbhtd", seen, self.heads)
        seen = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + reduce_from(torch.einsum("bhtd,hdw->btw", seen, self.out), self.comm)
        seen = copy_to(layer_norm(x, (WIDTH,), 1 + self.norms[1]), self.comm)
        return x + reduce_from(gelu(seen @ self.up) @ self.down, self.comm)


class Head(nn.Module):
    """The logits of this rank's words."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.comm = weights.comm
        self.words = weights.draw(WIDTH, WORDS, cut=1)

    def forward(self, x: Tensor) -> Tensor:
        return copy_to(layer_norm(x, (WIDTH,)), self.comm) @ self.words

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy, without a row of all logits on any rank."""
        most = logits.detach().amax(-1)
        self.comm.all_reduce(most, "max")
        logits = logits - most[..., None]
        total = reduce_from(logits.exp().sum(-1), self.comm)
        first = self.comm.rank * logits.shape[-1]
        here = (targets >= first) & (targets < first + logits.shape[-1])
        of_target = logits.gather(-1, torch.where(here, targets - first, 0)[..., None])[..., 0]
        return (total.log() - reduce_from(of_target * here, self.comm)).mean()


def train(
    comm: dp.Communicator, sizes: dict[str, int], plan: Any, steps: int, path: str | None = None
) -> tuple[list[float], dict[str, tuple[Any, Tensor]]]:
    """The losses of all steps, and this rank's parameters with their places."""
    torch.set_num_threads(1)
    mesh = dp.mesh(comm, **sizes)
    weights = Weights(mesh.tensor)
    layers = [Embedding(weights), *(Block(weights) for _ in range(LAYERS)), Head(weights)]
    each = -(-len(layers) // plan.stages)
    first = mesh.pipeline.rank * each
    model = nn.ModuleDict({str(n): layers[n] for n in range(first, first + each)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rows = BATCH // mesh.data.world_size
    micro = rows // plan.microbatches
    pipe = Pipeline(
        plan,
        {mesh.pipeline.rank: nn.Sequential(*model.values())},
        mesh.pipeline,
        lambda m: torch.empty(micro, LENGTH, WIDTH, dtype=torch.float64),
        layers[-1].loss,
    )
    chance, losses = torch.Generator().manual_seed(2), []
    for step in range(steps):
        first_word, stride = torch.randint(1, 4, (2, BATCH, 1), generator=chance)
        text = first_word + stride * torch.arange(LENGTH)  # which can be learnt
        mine = text[mesh.data.rank * rows :][:rows]
        inputs, targets = mine.split(micro), mine.roll(-1, 1).split(micro)
        last = path is not None and step == steps - 1
        with dp.trace(path, comm=comm) if last else nullcontext() as trace:
            if trace is not None:
                pipe.span = trace.span
                trace.layers(model)
            loss = pipe.step(inputs, targets)
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            mesh.data.all_reduce(flat, "mean")
        means = flat.split([gradient.numel() for gradient in gradients])
        for gradient, mean in zip(gradients, means, strict=True):
            gradient.copy_(mean.view(gradient.shape))
        optimizer.step()
        optimizer.zero_grad()
        if loss is not None:
            mesh.data.all_reduce(loss, "mean")
            losses.append(loss.item())
    known: Any = model.named_parameters()
    return losses, {name: (p.place, p.detach()) for name, p in known}


def main(steps: int = 20, path: str | None = None) -> None:
    sizes = {"data": 2, "pipeline": 2, "tensor": 2}
    plan = dp.pipeline_plan("1F1B", stages=2, microbatches=4)
    print(plan)
    alone = dp.pipeline_plan("GPipe", stages=1, microbatches=1)
    single = dict.fromkeys(sizes, 1)
    ((wanted, whole),) = dp.spawn(train, 1, single, alone, steps, mode="threads")
    found = dp.spawn(train, 8, sizes, plan, steps, path, mode="threads")
    losses = next(losses for losses, _ in found if losses)
    for step in range(0, steps, 5):
        print(f"step {step:2}  one process {wanted[step]:.12f}  8 ranks {losses[step]:.12f}")
    off = max(abs(ours - theirs) for ours, theirs in zip(losses, wanted, strict=False))
    of_weights = max(
        (mine - whole[name][1][place]).abs().max().item()
        for _, parameters in found
        for name, (place, mine) in parameters.items()
    )
    print(
        f"largest difference after {steps} steps: {off:.1e} in losses, {of_weights:.1e} in weights"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20, *sys.argv[2:3])
