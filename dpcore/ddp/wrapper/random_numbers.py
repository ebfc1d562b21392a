"""The generators of random numbers that a program on the CPU uses: torch's, Python's, numpy's."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch


def states() -> tuple[Any, ...]:
    """Of all generators."""
    numpy: Any = sys.modules.get("numpy")
    of_numpy = numpy.random.get_state() if numpy is not None else None
    return torch.get_rng_state(), random.getstate(), of_numpy


def restore(states: tuple[Any, ...]) -> None:
    """Goes back to what ``states`` has returned."""
    of_torch, of_python, of_numpy = states
    torch.set_rng_state(of_torch)
    random.setstate(of_python)
    if of_numpy is not None:
        sys.modules["numpy"].random.set_state(of_numpy)


def seed_all(seed: int) -> None:
    """``seed`` has 64 bits."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


@contextlib.contextmanager
def without_random_numbers() -> Iterator[None]:
    """What happens in this block takes none from the program's generators."""
    before = states()
    try:
        yield
    finally:
        restore(before)
