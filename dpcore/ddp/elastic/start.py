"""What a step begins with, kept until it is finished, so that it can be repeated.

Parameters and the optimizer's state are not kept: only a finished step changes them.
"""

from __future__ import annotations

import copy
import hashlib
import io
import os
import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dpcore.ddp.wrapper import random_numbers


class Start:
    """Buffers, random numbers, hyperparameters, and the states of schedulers and the like."""

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, more: Sequence[Any]
    ) -> None:
        self._parts = list(module.modules())
        self._optimizer, self._more = optimizer, more
        self._buffers: dict[tuple[int, str], torch.Tensor] = {}
        self._randoms: tuple[Any, ...] = ()
        self._hyperparameters: list[dict[str, Any]] = []
        self._states: list[Any] = []

    @torch.no_grad()
    def take(self) -> None:
        """Keeps what there is now."""
        before, self._buffers = self._buffers, {}
        for number, part in enumerate(self._parts):
            for name, buffer in part.named_buffers(recurse=False):
                kept = before.get((number, name))
                if kept is None or not _fits(kept, buffer):
                    kept = torch.empty_like(buffer)
                self._buffers[number, name] = kept.copy_(buffer)
        self._randoms = random_numbers.states()
        self._hyperparameters = [
            {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
            for group in self._optimizer.param_groups
        ]
        self._states = [copy.deepcopy(one.state_dict()) for one in self._more]

    @torch.no_grad()
    def restore(self) -> None:
        """Goes back to it. It stays kept."""
        for (number, name), kept in self._buffers.items():
            now = getattr(self._parts[number], name, None)
            if now is not None and _fits(kept, now):
                now.copy_(kept)
            else:
                setattr(self._parts[number], name, kept.clone())
        random_numbers.restore(self._randoms)
        for group, kept_values in zip(
            self._optimizer.param_groups, self._hyperparameters, strict=True
        ):
            group.update(copy.deepcopy(kept_values))
        for one, state in zip(self._more, self._states, strict=True):
            one.load_state_dict(copy.deepcopy(state))


def _fits(kept: torch.Tensor, buffer: torch.Tensor) -> bool:
    return kept.shape == buffer.shape and kept.dtype == buffer.dtype


# ---- what a finished step has changed --------------------------------------------------------


def packed(
    parameters: Sequence[torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
    more: Sequence[Any],
    caps: list[int],
) -> torch.Tensor:
    """Bytes for a rank that has not finished the step, or that joins. ``caps``: of its buckets,
    which the first steps of the job may have chosen."""
    state = {
        "parameters": [parameter.detach().clone() for parameter in parameters],
        "buffers": {name: buffer.detach().clone() for name, buffer in buffers.items()},
        "random": torch.get_rng_state(),
        "threads": torch.get_num_threads(),
        "caps": caps,
        "optimizer": optimizer.state_dict(),
        "more": [one.state_dict() for one in more],
    }
    file = io.BytesIO()
    torch.save(state, file)
    return torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)


@torch.no_grad()
def unpack(
    sent: torch.Tensor,
    parameters: Sequence[torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
    more: Sequence[Any],
    joins_as: int | None,
) -> list[int]:
    """Takes over what ``packed`` has made on another rank, and returns the caps. ``buffers``: those
    that are not this rank's own. A rank that joins, as the one with this number, has no random
    numbers of its own that would count either."""
    state = torch.load(io.BytesIO(sent.numpy().tobytes()), weights_only=True)
    for parameter, value in zip(parameters, state["parameters"], strict=True):
        parameter.copy_(value)
    optimizer.load_state_dict(state["optimizer"])
    for one, its in zip(more, state["more"], strict=True):
        one.load_state_dict(its)
    for name, buffer in buffers.items():
        buffer.copy_(state["buffers"][name])
    if joins_as is not None:
        seed_from(state["random"], joins_as)
        if "OMP_NUM_THREADS" not in os.environ:  # the same kernels, which give the same bits
            torch.set_num_threads(state["threads"])
    caps: list[int] = state["caps"]
    return caps


def seed_from(giver: torch.Tensor, number: int) -> None:
    """The random numbers of a rank that joins follow from those of the rank that gives it the
    state, and from its own number, so that two ranks do not draw the same ones."""
    digest = hashlib.sha256(giver.numpy().tobytes() + number.to_bytes(8, "little")).digest()
    seed = int.from_bytes(digest[:8], "little") >> 1
    torch.manual_seed(seed)
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
