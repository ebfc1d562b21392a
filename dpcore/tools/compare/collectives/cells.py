"""What is measured: a collective, a size, a world. Sizes and factors follow nccl-tests.

The size of a cell is the larger side of the operation: what all_reduce works on, what all_gather
writes, what reduce_scatter reads. algbw = size / time. busbw = algbw * factor, where the factor is
the share of the size that has to cross a rank's link in any algorithm.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dpcore.tools.compare.collectives.bench_cases import BYTES, CASES, Case, once

TYPE = "float"  # as nccl-tests writes it
_DTYPE = "float32"
ELEMENT_BYTES = BYTES[_DTYPE]

COLLECTIVES: dict[str, Case] = {
    **CASES,
    # One iteration is a round trip of two messages.
    "send_recv": Case("send_recv", once, time_share=0.5),
    "barrier": Case("barrier", lambda world: 0.0),
}


@dataclass(frozen=True)
class Cell:
    collective: str
    bytes: int
    world: int

    @property
    def kind(self) -> Case:
        return COLLECTIVES[self.collective]

    @property
    def redop(self) -> str:
        return "sum" if self.kind.reduces else "none"

    @property
    def elements(self) -> int:
        return self.bytes // ELEMENT_BYTES


def cells_of(collectives: Iterable[str], sizes: Sequence[int], world: int) -> list[Cell]:
    """Sizes that a collective cannot have are rounded to one that it can; none comes twice."""
    cells: dict[Cell, None] = {}
    for name in collectives:
        case = COLLECTIVES[name]
        known = [0] if name == "barrier" else [case.size_near(n, _DTYPE, world) for n in sizes]
        cells |= dict.fromkeys(Cell(name, size, world) for size in known)
    return list(cells)
