"""The models whose steps are measured: few large gradients, a usual mixture, many small ones."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import nn

Step = Callable[[nn.Module], torch.Tensor]  # forward and loss on a batch of its own


class ManyTensors(nn.Module):
    """400 parameters of 256 B to 16 KiB and next to no computation: what a gradient costs."""

    def __init__(self) -> None:
        super().__init__()
        lengths = torch.logspace(6, 12, 400, base=2).int().tolist()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(n)) for n in lengths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dots = [torch.dot(weight, x[: weight.numel()]) for weight in self.weights]
        return torch.stack(dots).sum()


class Language(nn.Module):
    """A transformer with a vocabulary, which sees no word before it has predicted it; the output
    layer shares the embedding's weights."""

    def __init__(self, words: int, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.places = nn.Parameter(torch.randn(length, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        later = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        x = self.layers(self.embedding(tokens) + self.places[:length], later, is_causal=True)
        logits: torch.Tensor = x @ self.embedding.weight.T
        return logits


def mlp() -> tuple[nn.Module, Step]:
    """42 M parameters, of which two matrices have 16.8 M each; batch of 16."""
    sizes = (1024, 4096, 4096, 4096, 1024)
    layers: list[nn.Module] = []
    for i, o in pairwise(sizes):
        layers += [nn.Linear(i, o), nn.ReLU()]
    x = torch.randn(16, sizes[0])
    return nn.Sequential(*layers[:-1]), lambda model: model(x).square().mean()


def ten() -> tuple[nn.Module, Step]:
    """Ten matrices of 2048 x 2048, 16 MiB each; batch of 16."""
    x = torch.randn(16, 2048)
    layers = [nn.Linear(2048, 2048) for _ in range(10)]
    return nn.Sequential(*layers), lambda model: model(x).square().mean()


def transformer() -> tuple[nn.Module, Step]:
    """4.7 M parameters in 6 layers; batch of 4 sequences of 64."""
    layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True)
    x = torch.randn(4, 64, 256)
    model = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    return model, lambda model: model(x).square().mean()


def many() -> tuple[nn.Module, Step]:
    """400 tensors of 256 B to 16 KiB."""
    x = torch.randn(4096)
    return ManyTensors(), lambda model: model(x)


def gpt2() -> tuple[nn.Module, Step]:
    """The shape of GPT-2 with 124 M parameters; one sequence of 64."""
    tokens = torch.randint(0, 50257, (1, 65))

    def step(model: nn.Module) -> torch.Tensor:
        logits = model(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return Language(50257, 768, 12, 12, 1024), step


MODELS: dict[str, Callable[[], tuple[nn.Module, Step]]] = {
    "mlp": mlp,
    "transformer": transformer,
    "many": many,
    "ten": ten,
    "gpt2": gpt2,
}
