"""Which rank reads which samples of an epoch, also after ranks have died in the middle of it.

The samples of an epoch have one order, that of a ``DistributedSampler`` with one rank. A step takes
the next ``batch size x ranks`` of them, and rank r of n every n-th from the r-th on, as torch's
sampler deals them. So what finished steps have used is always the beginning of the order, and when
ranks have died the rest is dealt out anew among those that live.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from dpcore.errors import Unsupported


def share_of(
    order: Sequence[int], used: int, rank: int, world: int, drop_last: bool
) -> Sequence[int]:
    """The samples of a rank among those that are left. All ranks get equally many: the order begins
    again for the last ones, or with ``drop_last`` some are left out.

    >>> share_of(range(10), 4, 0, 2, False), share_of(range(10), 4, 1, 2, False)
    ([4, 6, 8], [5, 7, 9])
    >>> share_of(range(10), 6, 2, 3, False), share_of(range(10), 6, 2, 3, True)
    ([8, 1], [8])
    """
    rest = list(order[used:])
    if drop_last:
        del rest[len(rest) // world * world :]
    else:
        rest += itertools.islice(itertools.cycle(order), -len(rest) % world)
    return rest[rank::world]


class Shares(torch.utils.data.Sampler[int]):
    """Takes the place of the sampler in a loader: this rank's samples that no step has used."""

    def __init__(self, sampler: Any) -> None:
        if not isinstance(sampler, DistributedSampler):
            raise Unsupported(
                "dp.elastic takes the torch.utils.data.DistributedSampler of the loader, whose "
                f"order of samples it deals out, and not {type(sampler).__name__}"
            )
        self.sampler = sampler
        self._order: list[int] = []
        self._used = self._of_a_step = 0
        self._place = (0, 1)

    def begin_epoch(self, loader: DataLoader[Any]) -> None:
        """All samples of the sampler's epoch are there to be dealt out."""
        batches: Any = loader.batch_sampler
        if type(batches) is not BatchSampler or batches.sampler not in (self.sampler, self):
            raise Unsupported(
                "run.batches() takes a DataLoader that was made with batch_size= and the sampler "
                "that dp.elastic got"
            )
        alone = copy.copy(self.sampler)
        alone.rank, alone.num_replicas = 0, 1
        alone.num_samples = alone.total_size = len(alone.dataset)  # type: ignore[arg-type]
        self._order, self._used = list(alone), 0
        self._of_a_step = batches.batch_size
        batches.sampler = self

    def end_epoch(self, loader: DataLoader[Any]) -> None:
        """Gives the loader its own sampler back."""
        batches: Any = loader.batch_sampler
        batches.sampler = self.sampler

    def deal(self, rank: int, world: int) -> None:
        """From now on the samples that are left belong to these ranks."""
        self._place = rank, world

    @property
    def used(self) -> int:
        """How many samples of the epoch's order finished steps have used."""
        return self._used

    def go_on_after(self, used: int) -> None:
        """In an epoch that other ranks have begun."""
        self._used = used

    def use(self) -> None:
        """All ranks among whom the samples were dealt have finished a step."""
        self._used += self._of_a_step * self._place[1]

    def __iter__(self) -> Iterator[int]:
        return iter(self._mine())

    def __len__(self) -> int:
        return len(self._mine())

    def _mine(self) -> Sequence[int]:
        return share_of(self._order, self._used, *self._place, self.sampler.drop_last)
