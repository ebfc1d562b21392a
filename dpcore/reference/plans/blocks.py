"""What a plan of thread blocks is: the form into which every format is read.

MSCCLang's XML and mscclpp's JSON say the same in different words. Each rank has buffers, cut into
slots of the size of a chunk: input, output and scratch. Each rank has thread blocks, and each of
them does its steps one after the other, waiting where a step says so. A step adds slots and writes
the sum to other slots, of its own rank or of another one, and may receive what it adds or send the
sum in a message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dpcore.reference.collectives import ScheduleError

COLLECTIVES = {  # as the formats write them
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
}


MOST_CHUNKS = 1 << 20  # of all ranks together, which is beyond any plan that could be followed


class PlanError(ScheduleError):
    """A file is no plan, or its plan is wrong; it says where."""


class Slot(NamedTuple):
    """Memory for one chunk."""

    rank: int
    buffer: str  # i, o or s: input, output, scratch
    at: int

    def __str__(self) -> str:
        return f"{self.buffer}[{self.at}] of gpu {self.rank}"


class Sum(NamedTuple):
    """Adds slots and writes the result; with one slot, a copy."""

    sources: tuple[Slot, ...]
    targets: tuple[Slot, ...]


Queue = tuple[str | int, ...]  # of messages, or of signals: its name
Block = tuple[int, int]  # rank, number of the thread block


class Step(NamedTuple):
    place: str  # in the file
    sums: tuple[Sum, ...] = ()  # one for each chunk
    receives: Queue | None = None  # a message with an operand of each sum
    sends: Queue | None = None  # a message with the result of each sum
    after: tuple[tuple[Block, int], ...] = ()  # the steps that must be done
    waits: tuple[Queue, ...] = ()  # for a signal of each
    signals: tuple[Queue, ...] = ()
    filled: tuple[Slot, ...] = ()  # slots of packets, which show whether they have come
    meets: tuple[Queue, int] | None = None  # a barrier, and how many thread blocks meet there


@dataclass(frozen=True)
class BlockPlan:
    """Thread blocks of all ranks, and where the collective's data lies before and after them."""

    name: str
    collective: str
    world: int
    chunks: int
    blocks: Mapping[Block, Sequence[Step]]
    begins: Mapping[Slot, int]  # the chunk that a slot holds at the beginning
    ends: Mapping[Slot, int]
    given: Mapping[Queue, int]  # signals that are there at the beginning

    @property
    def pieces(self) -> int:
        """How many chunks there are of what dpcore's moves may have one chunk for."""
        wholes = {"all_reduce": 1, "all_to_all": self.world * self.world}
        return self.chunks // wholes.get(self.collective, self.world)


class Buffers:
    """Where the chunks of a collective lie. In place, input and output are the same memory.
    ``per_gpu``: chunks in the larger of the two."""

    def __init__(
        self, collective: str, world: int, per_gpu: int, in_place: bool, scratch: Sequence[int]
    ) -> None:
        if world < 1 or per_gpu < 1:
            raise PlanError(f"it has {per_gpu} chunks on {world} gpus")
        if per_gpu * world > MOST_CHUNKS:
            raise PlanError(
                f"it has {per_gpu} chunks on each of {world} gpus; {MOST_CHUNKS} in all are read"
            )
        if collective != "all_reduce" and per_gpu % world:
            raise PlanError(f"{collective}: {per_gpu} chunks do not divide among {world} gpus")
        share = per_gpu // world
        self._collective, self._world, self._share = collective, world, share
        self.chunks = per_gpu * (world if collective == "all_to_all" else 1)
        self._in_place = in_place
        self._scratch = scratch
        self._sizes = {
            "i": share if collective == "all_gather" else per_gpu,
            "o": share if collective == "reduce_scatter" else per_gpu,
        }

    def slots(self, rank: int, buffer: str, first: int, count: int = 1) -> tuple[Slot, ...]:
        """Slots side by side, each by its one name."""
        size = self._scratch[rank] if buffer == "s" else self._sizes.get(buffer)
        if size is None:
            raise PlanError(f"there is no buffer {buffer!r}; there are i, o and s")
        if count < 1 or first < 0 or first + count > size:
            asked = f"{buffer}[{first}]" if count == 1 else f"{buffer}[{first}:{first + count}]"
            raise PlanError(f"there is no {asked} on gpu {rank}, whose {buffer} has {size} chunks")
        return tuple(self._named(rank, buffer, first + i) for i in range(count))

    def begins(self) -> dict[Slot, int]:
        return {
            self._named(rank, "i", index): self._chunk_of_input(rank, index)
            for rank in range(self._world)
            for index in range(self._sizes["i"])
        }

    def ends(self) -> dict[Slot, int]:
        return {
            self._named(rank, "o", index): self._chunk_of_output(rank, index)
            for rank in range(self._world)
            for index in range(self._sizes["o"])
        }

    def _named(self, rank: int, buffer: str, index: int) -> Slot:
        if not self._in_place or buffer == "s":
            return Slot(rank, buffer, index)
        if self._collective == "reduce_scatter":
            return Slot(rank, "i", index + (rank * self._share if buffer == "o" else 0))
        offset = rank * self._share if (buffer, self._collective) == ("i", "all_gather") else 0
        return Slot(rank, "o", index + offset)

    def _chunk_of_input(self, rank: int, index: int) -> int:
        if self._collective == "all_gather":
            return rank * self._share + index
        if self._collective == "all_to_all":
            return rank * self._world * self._share + index
        return index

    def _chunk_of_output(self, rank: int, index: int) -> int:
        if self._collective == "reduce_scatter":
            return rank * self._share + index
        if self._collective == "all_to_all":
            source, piece = divmod(index, self._share)
            return (source * self._world + rank) * self._share + piece
        return index


def collective_of(word: str) -> str:
    if word not in COLLECTIVES:
        raise PlanError(f"the collective {word!r} is not one of {', '.join(COLLECTIVES)}")
    return COLLECTIVES[word]
