"""Models as people train them, from timm, transformers and torch, for `benchmarks.ddp_step`:

    python -m benchmarks.ddp_step --world 2 --contenders "alone,alone warm,torch,dpcore" \
        --models "$(python -m benchmarks.training.real_models)"

Batches are small, so that communication is a large part of a step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from dpcore.tools.compare.training.models import Step

FILE = Path(__file__).relative_to(Path(__file__).parents[2])


def resnet50() -> tuple[nn.Module, Step]:
    """25.6 M parameters; four images of 96 x 96."""
    import timm

    images = torch.randn(4, 3, 96, 96)
    return timm.create_model("resnet50"), lambda model: model(images).square().mean()


def gpt2() -> tuple[nn.Module, Any]:
    """124 M parameters; one sequence of 64."""
    from transformers import GPT2Config, GPT2LMHeadModel

    tokens = torch.randint(0, 50257, (1, 64))
    quiet = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return GPT2LMHeadModel(quiet), lambda model: model(input_ids=tokens, labels=tokens)


class Recurrent(nn.Module):
    """30 M parameters: words, two layers of LSTM, words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10_000, 512)
        self.lstm = nn.LSTM(512, 1024, 2, batch_first=True)
        self.out = nn.Linear(1024, 10_000)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(self.words(tokens))
        logits: torch.Tensor = self.out(states)
        return logits


def lstm() -> tuple[nn.Module, Step]:
    """Eight sequences of 16."""
    tokens = torch.randint(0, 10_000, (8, 17))

    def step(model: nn.Module) -> torch.Tensor:
        logits = model(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return Recurrent(), step


if __name__ == "__main__":
    print(",".join(f"{FILE}:{made.__name__}" for made in (resnet50, gpt2, lstm)))
