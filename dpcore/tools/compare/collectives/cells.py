"""What is measured: a collective, a size, a world. Sizes and factors follow nccl-tests.

The size of a cell is the larger side of the operation: what all_reduce works on, what all_gather
writes, what reduce_scatter reads. algbw = size / time. busbw = algbw * factor, where the factor is
the share of the size that has to cross a rank's link in any algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

ROOT = 0
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
OPS = ("sum", "mean", "prod", "min", "max")


def _once(world: int) -> float:
    return 1.0


def _all_but_own(world: int) -> float:
    return (world - 1) / world


@dataclass(frozen=True)
class Case:
    """One collective. ``bus_factor(world)``: the share of the size that has to cross the link of a
    rank in any algorithm, as in nccl-tests."""

    name: str
    bus_factor: Callable[[int], float]
    reduces: bool = False
    rooted: bool = False
    has_parts: bool = False  # one per rank, in what goes in or in what comes out
    time_share: float = 1.0  # of one iteration of a timed loop

    def size_near(self, size: int, dtype: str, world: int) -> int:
        """The largest size up to ``size`` that this collective can have, or its smallest.

        >>> COLLECTIVES["all_gather"].size_near(1030, "float32", 4)
        1024
        """
        if self.name == "barrier":
            return 0
        unit = BYTES[dtype] * (world if self.has_parts else 1)
        return max(unit, size - size % unit)


COLLECTIVES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("all_reduce", lambda world: 2 * (world - 1) / world, reduces=True),
        Case("reduce_scatter", _all_but_own, reduces=True, has_parts=True),
        Case("all_gather", _all_but_own, has_parts=True),
        Case("broadcast", _once, rooted=True),
        Case("reduce", _once, reduces=True, rooted=True),
        Case("gather", _all_but_own, rooted=True, has_parts=True),
        Case("scatter", _all_but_own, rooted=True, has_parts=True),
        Case("all_to_all", _all_but_own, has_parts=True),
        # One iteration is a round trip of two messages.
        Case("send_recv", _once, time_share=0.5),
        Case("barrier", lambda world: 0.0),
    )
}


def collectives_of(names: Sequence[str]) -> tuple[str, ...]:
    """All of them for "all"."""
    if list(names) == ["all"]:
        return tuple(COLLECTIVES)
    if unknown := [name for name in names if name not in COLLECTIVES]:
        known = ", ".join(COLLECTIVES)
        raise ValueError(f"--collective {unknown[0]!r}: choose from {known}, or all")
    return tuple(names)


@dataclass(frozen=True)
class Cell:
    collective: str
    bytes: int
    world: int
    dtype: str = "float32"
    op: str = "sum"
    algorithm: str = "auto"

    @property
    def kind(self) -> Case:
        return COLLECTIVES[self.collective]

    @property
    def redop(self) -> str:
        return self.op if self.kind.reduces else "none"

    @property
    def elements(self) -> int:
        return self.bytes // BYTES[self.dtype]


def cells_of(
    collectives: Iterable[str],
    sizes: Sequence[int],
    world: int,
    dtype: str = "float32",
    op: str = "sum",
    algorithms: Sequence[str] = ("auto",),
) -> list[Cell]:
    """Sizes that a collective cannot have are rounded to one that it can; none comes twice."""
    cells = (
        Cell(name, COLLECTIVES[name].size_near(size, dtype, world), world, dtype, op, algorithm)
        for name in collectives
        for algorithm in algorithms
        for size in sizes
    )
    return list(dict.fromkeys(cells))
