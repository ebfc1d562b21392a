"""The most memory that the ranks of a training run ever hold, by contender.

Each contender has processes of its own: what one gave back would serve the next. A thread of each
rank looks at its *proportional* set size, in which a page that several processes map counts once
in all, as fast as the kernel answers; the peaks of the ranks are added up. What an arena holds in
reserve counts as well.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import torch

from dpcore.tools.compare.training.held import give_back_at_once, proportional_bytes
from dpcore.tools.compare.training.ranks import WARM_STEPS, beside_gloo, step_of, wrapped

_STEPS = WARM_STEPS + 5
_PAUSE = 0.002  # seconds between two looks


class Watcher:
    """Looks at this process while its block runs; `most` is in bytes, of what was added in it."""

    def __enter__(self) -> Watcher:
        self._before = proportional_bytes() + _unmapped_arena_bytes()
        self.most = 0
        self._over = threading.Event()
        self._looking = threading.Thread(target=self._look)
        self._looking.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._looking.join()
        self.most += _unmapped_arena_bytes() - self._before

    def _look(self) -> None:
        while not self._over.wait(_PAUSE):
            self.most = max(self.most, proportional_bytes())


def _unmapped_arena_bytes() -> int:
    """Memory of this process's arenas that are mapped nowhere so far, less what it maps of others':
    over all ranks, what the kernel holds and no proportional size tells."""
    own = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists
            if descriptor.readlink().name.startswith("memfd:dpcore-arena"):
                own += descriptor.stat().st_blocks * 512
    mapped, in_arena = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line[0] in "0123456789abcdef":
            in_arena = "/memfd:dpcore-arena" in line
        elif in_arena and line.startswith("Pss:"):
            mapped += int(line.split()[1]) * 1024
    return own - mapped


@beside_gloo
def peak(comm: Any, model: str, contender: str, folder: str) -> int:
    """On a rank: bytes that building and training the model added at most."""
    first = wrapped(contender, torch.nn.Linear(2, 2), comm)  # modules load what they need
    first(torch.ones(1, 2)).sum().backward()
    give_back_at_once()
    comm.barrier()
    with Watcher() as seen:
        step = step_of(contender, model, comm)
        for _ in range(_STEPS):
            step()
        comm.barrier()
    return seen.most
