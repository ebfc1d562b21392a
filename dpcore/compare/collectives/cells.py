"""What is measured: a collective, a size, a world. Sizes and factors follow nccl-tests.

The size of a cell is the larger side of the operation: what all_reduce works on, what all_gather
writes, what reduce_scatter reads. algbw = size / time. busbw = algbw * factor, where the factor is
the share of the size that has to cross a rank's link in any algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dpcore.commands import bench

ELEMENT_BYTES = 4
TYPE = "float"


@dataclass(frozen=True)
class Collective:
    name: str
    bus_factor: Callable[[int], float]
    chunked: bool  # the size must divide into one chunk per rank
    redop: str = "none"
    time_share: float = 1.0  # of one iteration of the timed loop


def _once(world: int) -> float:
    return 1.0


def _all_but_own(world: int) -> float:
    return (world - 1) / world


COLLECTIVES: dict[str, Collective] = {
    c.name: c
    for c in (
        Collective("all_reduce", lambda n: 2 * (n - 1) / n, chunked=False, redop="sum"),
        Collective("reduce_scatter", _all_but_own, chunked=True, redop="sum"),
        Collective("all_gather", _all_but_own, chunked=True),
        Collective("broadcast", _once, chunked=False),
        Collective("reduce", _once, chunked=False, redop="sum"),
        Collective("gather", _all_but_own, chunked=True),
        Collective("scatter", _all_but_own, chunked=True),
        Collective("all_to_all", _all_but_own, chunked=True),
        # One iteration is a round trip of two messages.
        Collective("send_recv", _once, chunked=False, time_share=0.5),
        Collective("barrier", lambda n: 0.0, chunked=False),
    )
}


@dataclass(frozen=True)
class Cell:
    collective: str
    bytes: int
    world: int

    @property
    def kind(self) -> Collective:
        return COLLECTIVES[self.collective]

    @property
    def elements(self) -> int:
        return self.bytes // ELEMENT_BYTES


def cells_of(collectives: Iterable[str], sizes: Sequence[int], world: int) -> list[Cell]:
    """Sizes that a collective cannot have are rounded to one that it can; none comes twice."""
    cells: dict[Cell, None] = {}
    for name in collectives:
        if name == "barrier":
            cells[Cell(name, 0, world)] = None
            continue
        unit = ELEMENT_BYTES * (world if COLLECTIVES[name].chunked else 1)
        for size in sizes:
            cells[Cell(name, max(unit, size - size % unit), world)] = None
    return list(cells)


def parse_size(text: str) -> int:
    """`4096`, `4K`, `4KiB`, `256M`: powers of 1024, whole elements of 4 bytes at the least."""
    size = bench.parse_size(text)
    if size < ELEMENT_BYTES:
        raise ValueError(f"{text!r} is less than one element of {ELEMENT_BYTES} bytes")
    return size


def parse_sizes(text: str) -> list[int]:
    """`8:256M:4x` multiplies, `1M:8M:1M` adds, `8,1K,1M` lists."""
    if ":" not in text:
        return sorted({parse_size(part) for part in text.split(",")})
    parts = text.split(":")
    if len(parts) != 3:
        raise ValueError(f"{text!r}: write BEGIN:END:FACTORx or BEGIN:END:STEP")
    begin, end, step = parse_size(parts[0]), parse_size(parts[1]), parts[2].strip().lower()
    if step.endswith("x"):
        factor = int(step.removesuffix("x"))
        if factor < 2:
            raise ValueError(f"{text!r}: a factor must be at least 2")
    else:
        factor, stride = 1, parse_size(step)
    sizes = []
    while begin <= end:
        sizes.append(begin)
        begin = begin * factor if factor > 1 else begin + stride
    if not sizes:
        raise ValueError(f"{text!r} holds no size")
    return sizes


def size_text(size: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor and size % factor == 0:
            return f"{size // factor} {unit}"
    return f"{size} B"
