"""The collectives as ``dpcore bench`` calls them: their buffers, and the result that must come out.

Element i of rank r's input is a small whole number, ``(i + 3 r) % 5`` (1 or 2 for a product), so
sums are exact in every type for any reasonable number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from dpcore.comm.communicators.native import Communicator

BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
}
DTYPES = tuple(BYTES)
OPS = ("sum", "mean", "prod", "min", "max")
_ROOT = 0


def once(world: int) -> float:
    return 1.0


def _all_but_own(world: int) -> float:
    return (world - 1) / world


def _there_and_back(world: int) -> float:
    return 2 * (world - 1) / world


@dataclass(frozen=True)
class Measured:
    """A collective on its buffers: call it as often as you like, then check it."""

    count: int
    call: Callable[[], Any]
    check: Callable[[], int]


@dataclass(frozen=True)
class Case:
    """One collective. ``bus_factor(world)``: the share of the size that has to cross the link of a
    rank in any algorithm, as in nccl-tests."""

    name: str
    bus_factor: Callable[[int], float]
    reduces: bool = False
    rooted: bool = False
    splits: bool = False  # the input has a part per rank
    joins: bool = False  # the output has a part per rank
    time_share: float = 1.0  # of one iteration of a timed loop

    def size_near(self, size: int, dtype: str, world: int) -> int:
        """The largest size up to ``size`` that this collective can have, or its smallest.

        >>> CASES["all_gather"].size_near(1030, "float32", 4)
        1024
        """
        unit = BYTES[dtype] * (world if self.splits or self.joins else 1)
        return max(unit, size - size % unit)

    def prepare(
        self, comm: Communicator, size: int, dtype: str, op: str, algorithm: str, plain: bool
    ) -> Measured:
        """Makes the buffers of a size in bytes."""
        import torch

        world, rank = comm.world_size, comm.rank
        kind: torch.dtype = getattr(torch, dtype)
        elements = size // BYTES[dtype]
        count = elements // world if self.splits or self.joins else elements

        def buffer(parted: bool) -> torch.Tensor:
            length = count * world if parted else count
            return torch.empty(length, dtype=kind) if plain else comm.empty(length, dtype=kind)

        inout = buffer(self.splits)
        in_place = self.name in ("all_reduce", "reduce", "broadcast")
        output = inout if in_place else buffer(self.joins)
        method = getattr(comm, self.name)
        positional: list[Any] = [inout] if in_place else [output, inout]
        if self.rooted:
            if self.name == "gather" and rank != _ROOT:
                positional[0] = None
            if self.name == "scatter" and rank != _ROOT:
                positional[1] = None
            positional.append(_ROOT)
        if self.reduces:
            positional.append(op)
        given = {} if algorithm == "auto" else {"algorithm": algorithm}

        def call() -> None:
            method(*positional, **given)

        def check() -> int:
            _fill(inout, rank, op)
            call()
            wrong = 0
            if rank == _ROOT or self.name not in ("reduce", "gather"):
                expected = self._expected(rank, world, count, kind, op)
                wrong = _differences(
                    output, expected, exact=op != "mean" or not kind.is_floating_point
                )
            total = torch.tensor([wrong])
            comm.all_reduce(total)
            return int(total)

        inout.zero_()
        output.zero_()
        return Measured(count, call, check)

    def _expected(
        self, rank: int, world: int, count: int, dtype: torch.dtype, op: str
    ) -> torch.Tensor:
        """This rank's output. Where the input has a part per rank, this rank's part of it."""
        import torch

        begin = rank * count if self.splits else 0
        inputs = range(_ROOT, _ROOT + 1) if not (self.reduces or self.joins) else range(world)
        parts = (_input(r, begin, count, dtype, op) for r in inputs)
        if self.joins:
            return torch.cat(list(parts))
        result = next(parts)
        for part in parts:
            result = _combine(result, part, op)
        if op != "mean" or not self.reduces:
            return result
        return result / world if dtype.is_floating_point else result // world  # none is negative


def _combine(a: torch.Tensor, b: torch.Tensor, op: str) -> torch.Tensor:
    import torch

    match op:
        case "prod":
            return a * b
        case "min":
            return torch.minimum(a, b)
        case "max":
            return torch.maximum(a, b)
    return a + b


def _period(rank: int, dtype: torch.dtype, op: str) -> torch.Tensor:
    import torch

    numbers = torch.arange(10) + 3 * rank
    return (1 + numbers % 2 if op == "prod" else numbers % 5).to(dtype)


def _input(rank: int, begin: int, count: int, dtype: torch.dtype, op: str) -> torch.Tensor:
    """Elements [begin, begin + count) of a rank's input."""
    period = _period(rank, dtype, op).roll(-(begin % 10))
    return period.repeat(count // 10 + 1)[:count]


def _fill(tensor: torch.Tensor, rank: int, op: str) -> None:
    tensor.copy_(_input(rank, 0, tensor.numel(), tensor.dtype, op))


def _differences(got: torch.Tensor, expected: torch.Tensor, exact: bool) -> int:
    import torch

    if exact:
        return int((got != expected).sum())
    # A mean may be computed as a product with 1/world.
    tolerance = 4 * torch.finfo(got.dtype).eps
    right = (got - expected).abs() <= tolerance * expected.abs().clamp(min=1)  # never of a NaN
    return int((~right).sum())


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("all_reduce", _there_and_back, reduces=True),
        Case("reduce_scatter", _all_but_own, reduces=True, splits=True),
        Case("all_gather", _all_but_own, joins=True),
        Case("broadcast", once, rooted=True),
        Case("reduce", once, reduces=True, rooted=True),
        Case("gather", _all_but_own, rooted=True, joins=True),
        Case("scatter", _all_but_own, rooted=True, splits=True),
        Case("all_to_all", _all_but_own, splits=True, joins=True),
    )
}
