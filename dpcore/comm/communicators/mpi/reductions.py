"""Reductions as requests of MPI: on the memory of the tensors, or in blocks of a wider type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dpcore.comm.communicators.mpi import numbers
from dpcore.comm.communicators.mpi.numbers import Reduction
from dpcore.comm.communicators.mpi.operation import Stage

_BLOCK = 1 << 20  # elements that are converted at a time


def all_reduced(mpi: Any, comm: Any, own: torch.Tensor, how: Reduction) -> list[Stage]:
    """In place on all ranks."""

    def post(values: torch.Tensor) -> Any:
        given = numbers.calculated(mpi, values)
        return comm.Iallreduce(mpi.IN_PLACE, given, op=how.operator)

    def stage(place: torch.Tensor) -> Stage:
        return _through(lambda: _given(place, how, place), post, lambda got: _keep(got, place, how))

    return [stage(place) for place in _cut(own, how)]


def reduced(mpi: Any, comm: Any, own: torch.Tensor, how: Reduction, root: int) -> list[Stage]:
    """In place on the root; the others' memory is only read."""
    is_root = comm.Get_rank() == root

    def post(values: torch.Tensor) -> Any:
        given = numbers.calculated(mpi, values)
        if is_root:
            return comm.Ireduce(mpi.IN_PLACE, given, how.operator, root)
        return comm.Ireduce(given, None, how.operator, root)

    def stage(place: torch.Tensor) -> Stage:
        def keep(got: torch.Tensor) -> None:
            if is_root:
                _keep(got, place, how)

        return _through(lambda: _given(place, how, place if is_root else None), post, keep)

    return [stage(place) for place in _cut(own, how)]


def scattered(
    mpi: Any,
    comm: Any,
    target: torch.Tensor,
    own: torch.Tensor,
    lengths: Sequence[int],
    how: Reduction,
) -> list[Stage]:
    """Each rank's part of the result to its ``target``."""
    rank = comm.Get_rank()
    begin = numbers.begins(lengths)[rank]
    most = max(1, own.numel()) if how.dtype == own.dtype else _BLOCK

    def stage(cuts: Sequence[tuple[int, int]]) -> Stage:
        place = target[cuts[rank][0] - begin : cuts[rank][1] - begin]
        counts = [last - first for first, last in cuts]
        got = place

        def given() -> torch.Tensor:
            nonlocal got
            if how.dtype == own.dtype:  # all of it at once
                return _given(numbers.beside(target, own), how, None)
            got = torch.empty(counts[rank], dtype=how.dtype)
            return _given(torch.cat([own[first:last] for first, last in cuts]), how, None)

        def post(values: torch.Tensor) -> Any:
            taken = numbers.calculated(mpi, got)
            return comm.Ireduce_scatter(
                numbers.calculated(mpi, values), taken, counts, how.operator
            )

        return _through(given, post, lambda _: _keep(got, place, how))

    return [stage(cuts) for cuts in numbers.blocks(lengths, most)]


def _cut(own: torch.Tensor, how: Reduction) -> list[torch.Tensor]:
    if how.dtype == own.dtype:
        return [own]
    return [own[begin:end] for [(begin, end)] in numbers.blocks([own.numel()], _BLOCK)]


def _given(own: torch.Tensor, how: Reduction, target: torch.Tensor | None) -> torch.Tensor:
    """What this rank adds: its own memory as it is, or a copy. ``target``: may be written."""
    given = own.to(how.dtype)
    if how.factor is None:
        return given
    may_write = given is not own or target is own
    return given.mul_(how.factor) if may_write else given * how.factor


def _keep(got: torch.Tensor, place: torch.Tensor, how: Reduction) -> None:
    how.finish(got)
    if got.data_ptr() != place.data_ptr():
        place.copy_(got)


def _through(
    given: Callable[[], torch.Tensor],
    post: Callable[[torch.Tensor], Any],
    keep: Callable[[torch.Tensor], None],
) -> Stage:
    """Memory besides is there from when the request is posted until it is complete."""
    between: list[torch.Tensor] = []

    def begin() -> Any:
        between.append(given())
        return post(between[0])

    return Stage(begin, lambda: keep(between.pop()))
