"""The text that the demo learns, and batches of it.

`alice.txt` holds the first five chapters of "Alice's Adventures in Wonderland" by Lewis Carroll
(Charles Dodgson, 1832-1898), first printed in 1865 and in the public domain; typed in by volunteers
of Project Gutenberg as their book 11. Marks for italics are left out, dashes are two hyphens.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from dpcore.tools.compare.training.models import Language

LENGTH = 64
_FILE = Path(__file__).with_name("alice.txt")


class Text:
    """Letters as numbers. The same batch for the same step, whatever the number of ranks."""

    def __init__(self) -> None:
        letters = _FILE.read_text(encoding="ascii")
        self.alphabet = sorted(set(letters))
        number_of = {letter: number for number, letter in enumerate(self.alphabet)}
        self.numbers = torch.tensor([number_of[letter] for letter in letters])

    def batch(self, step: int, rank: int, world: int, sequences: int) -> torch.Tensor:
        """This rank's share of a step's sequences, one letter longer than the model reads."""
        chance = torch.Generator().manual_seed(step)
        starts = torch.randint(len(self.numbers) - LENGTH - 1, (sequences,), generator=chance)
        mine = starts[rank * sequences // world : (rank + 1) * sequences // world]
        return torch.stack([self.numbers[start : start + LENGTH + 1] for start in mine.tolist()])


def language_model(text: Text) -> nn.Module:
    """A transformer of 3.2 M parameters that predicts the next letter."""
    torch.manual_seed(0)
    model = Language(len(text.alphabet), 256, layers=4, heads=4, length=LENGTH)
    # The output layer is the embedding, too: larger numbers would be a bad guess, said loudly.
    nn.init.normal_(model.embedding.weight, std=0.02)
    return model


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    logits = model(batch[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
