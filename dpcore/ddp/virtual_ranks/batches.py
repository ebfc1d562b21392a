"""Cuts a batch, as loaders make them, into shards."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch


def samples_in(batch: Any) -> int:
    """The length of the first tensor, or else of the first list of plain values.

    >>> samples_in((torch.zeros(6, 2), {"names": list("abcdef")}))
    6
    """
    for kind in (torch.Tensor, list):
        for leaf in _leaves(batch):
            if isinstance(leaf, kind) and not (isinstance(leaf, torch.Tensor) and leaf.dim() == 0):
                return len(leaf)
    raise TypeError(
        f"shards(batch): a {type(batch).__name__} without a tensor of samples; pass tensors whose "
        "first dimension is the sample's, or tuples, lists and mappings of them"
    )


def cut(batch: Any, begin: int, end: int, samples: int) -> Any:
    """The samples from ``begin`` up to ``end``, in memory of their own: how a kernel adds may
    depend on where its operands begin.

    >>> cut({"x": torch.arange(6), "names": list("abcdef")}, 2, 4, 6)
    {'x': tensor([2, 3]), 'names': ['c', 'd']}
    """
    if isinstance(batch, torch.Tensor) or _is_plain_list(batch):
        length = len(batch) if not isinstance(batch, torch.Tensor) or batch.dim() else 0
        if length != samples:
            raise ValueError(
                f"shards(batch): one part of the batch has {samples} samples and another {length}; "
                "each tensor's first dimension must be the sample's"
            )
        part = batch[begin:end]
        return part.clone() if isinstance(part, torch.Tensor) else part
    if isinstance(batch, Mapping):
        parts = {name: cut(value, begin, end, samples) for name, value in batch.items()}
        if type(batch) is dict or not isinstance(batch, MutableMapping):
            return parts
        changed: Any = copy.copy(batch)
        changed.update(parts)
        return changed
    if isinstance(batch, tuple | list):
        values = [cut(value, begin, end, samples) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    raise TypeError(
        f"shards(batch): cannot cut a {type(batch).__name__}; pass tensors, and tuples, lists and "
        "mappings of them"
    )


def _is_plain_list(batch: Any) -> bool:
    """Of one plain value per sample, such as names."""
    return isinstance(batch, list) and all(
        isinstance(value, str | bytes | int | float) for value in batch
    )


def _leaves(batch: Any) -> list[Any]:
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    elif not isinstance(batch, tuple | list) or _is_plain_list(batch):
        return [batch]
    return [leaf for value in batch for leaf in _leaves(value)]
