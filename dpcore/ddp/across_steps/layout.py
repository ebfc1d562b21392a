"""Where each parameter of a bucket lies in flat memory, and which range is this rank's part.

A bucket has a flat tensor of gradients and, under "zero1", one of parameters with the same layout.
It is divided into ``world_size`` equal parts; rank r steps the r-th.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from dpcore import _C


class Place(NamedTuple):
    """The place of one parameter. ``stride`` is dense, so it fills ``begin`` to ``end``."""

    begin: int
    end: int
    size: torch.Size
    stride: tuple[int, ...]

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The parameter's view of flat memory."""
        return flat.as_strided(self.size, self.stride, flat.storage_offset() + self.begin)


class BucketLayout:
    """The layout of one bucket, once buckets have their final form."""

    def __init__(self, reducer: _C.Reducer, bucket: int) -> None:
        flat, numbers, parts = reducer.bucket(bucket)
        self.numbers: list[int] = list(numbers)
        self.elements = flat.numel()
        self.places: list[Place] = []
        for part in parts:
            offset = (part.data_ptr() - flat.data_ptr()) // flat.element_size()
            begin = offset if part.numel() else 0
            self.places.append(Place(begin, begin + part.numel(), part.size(), part.stride()))
        self._views: tuple[int, list[torch.Tensor]] = (0, [])

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter's view of the flat tensor. Cached, since the memory seldom moves."""
        address = flat.data_ptr()
        if self._views[0] != address:
            self._views = (address, [place.of(flat) for place in self.places])
        return self._views[1]

    def part_of(self, rank: int, world_size: int) -> tuple[int, int]:
        """Where the part of a rank begins and ends."""
        length = self.elements // world_size
        return rank * length, (rank + 1) * length


def layouts_of(reducer: _C.Reducer) -> list[BucketLayout]:
    """The layouts of all buckets."""
    return [BucketLayout(reducer, bucket) for bucket in range(reducer.buckets)]
