"""Divides the parameters into fragments, each of which is copied to a flat tensor and back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import nn


class Fragment:
    """Neighbouring parameters, one behind the other in a flat tensor."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.sizes = [parameter.numel() for parameter in parameters]
        self.elements = sum(self.sizes)

    def parts_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The views of ``flat`` for each parameter, in its shape."""
        parts = torch.split(flat[: self.elements], self.sizes)
        return [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]

    def read(self, flat: torch.Tensor) -> torch.Tensor:
        torch._foreach_copy_(self.parts_of(flat), [p.detach() for p in self.parameters])
        return flat

    def write(self, flat: torch.Tensor, weight: float = 1.0) -> None:
        """Sets the parameters to these values, or moves them that share of the way."""
        parts = [
            part.to(p.dtype) for part, p in zip(self.parts_of(flat), self.parameters, strict=True)
        ]
        own = [p.detach() for p in self.parameters]
        if weight == 1.0:
            torch._foreach_copy_(own, parts)
        else:
            torch._foreach_lerp_(own, parts, weight)


def cut(parameters: Sequence[nn.Parameter], count: int) -> list[Fragment]:
    """Divides the parameters, in order, into nonempty fragments of about the same size."""
    sizes = list(accumulate(parameter.numel() for parameter in parameters))
    ends = [0]
    for number in range(1, count):
        wanted = sizes[-1] * number / count
        first, last = ends[-1] + 1, len(parameters) - (count - number)
        ends.append(min(range(first, last + 1), key=lambda end: abs(sizes[end - 1] - wanted)))
    ends.append(len(parameters))
    return [Fragment(parameters[begin:end]) for begin, end in pairwise(ends)]
