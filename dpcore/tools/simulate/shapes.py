"""In which algorithms ranks do the same, each with its own neighbours.

Then one rank stands for all, and what it does are rounds of messages (``Shape``). Where hosts have
several ranks, those of one host stand for those of all (``Fold``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import accumulate

from dpcore.tools.simulate.links import Links


@dataclass(frozen=True)
class Rounds:
    """``times`` rounds of ``messages``. ``opens``: how many messages of the next round may leave
    for each that arrives; 0 if all have to arrive first. ``ends``: how many chunks are complete
    with each message, so that the window lets others in; the rest is with the last one.
    ``collects``: what comes is all for one chunk, the last that the rank takes up; else each is for
    the chunk that it takes up after those that it has sent. ``adds``: it is added to what the rank
    has."""

    times: int
    messages: int
    opens: int = 0
    ends: int = 0
    collects: bool = False
    adds: bool = False


@dataclass(frozen=True)
class Shape:
    """What an algorithm does: into how many chunks it cuts, and the rounds of each segment."""

    chunks: int
    rounds: tuple[Rounds, ...]

    @property
    def ends_at_last(self) -> int:
        return self.chunks - sum(each.times * each.messages * each.ends for each in self.rounds)

    @cached_property
    def before(self) -> list[int]:
        """Messages of the rounds before."""
        counts = (each.times * each.messages for each in self.rounds)
        return list(accumulate(counts, initial=0))


def _ring(world: int) -> Shape:
    return Shape(world, (Rounds(world - 1, 1, adds=True), Rounds(world - 1, 1, ends=1)))


def _ring_half(world: int, adds: bool) -> Shape:
    return Shape(world, (Rounds(world - 1, 1, ends=1, adds=adds),))


def _two_shot(world: int) -> Shape:
    return Shape(
        world, (Rounds(1, world - 1, collects=True, adds=True), Rounds(1, world - 1, ends=1))
    )


def _direct(world: int, adds: bool) -> Shape:
    return Shape(world, (Rounds(1, world - 1, ends=1, collects=adds, adds=adds),))


def _one_shot(world: int) -> Shape:
    return Shape(1, (Rounds(1, world - 1, collects=True, adds=True),))


def _recursive_doubling(world: int) -> Shape:
    return Shape(1, (Rounds(world.bit_length() - 1, 1, adds=True),))


def _halving_doubling(world: int) -> Shape:
    """A chunk goes on as soon as it has come: while it halves, the first ones do; while it doubles,
    with each that comes one goes that the rank had before. The last round ends two with each
    message, one that is sent and one that comes."""
    sizes = [1 << step for step in range(world.bit_length() - 1)]
    halving = [Rounds(1, size, opens=1, adds=True) for size in reversed(sizes)]
    doubling = [Rounds(1, size, opens=2) for size in sizes[:-1]]
    return Shape(world, (*halving, *doubling, Rounds(1, sizes[-1], ends=2)))


SHAPES: dict[tuple[str, str], Callable[[int], Shape]] = {
    ("all_reduce", "one_shot"): _one_shot,
    ("all_reduce", "two_shot"): _two_shot,
    ("all_reduce", "ring"): _ring,
    ("all_reduce", "recursive_doubling"): _recursive_doubling,
    ("all_reduce", "halving_doubling"): _halving_doubling,
    ("reduce_scatter", "direct"): partial(_direct, adds=True),
    ("reduce_scatter", "ring"): partial(_ring_half, adds=True),
    ("all_gather", "direct"): partial(_direct, adds=False),
    ("all_gather", "ring"): partial(_ring_half, adds=False),
}
POWERS_OF_TWO = ("recursive_doubling", "halving_doubling")  # other worlds have ranks that stand in
TRAINS = 16  # at least, of the segments of an operation


@cache
def shape_of(collective: str, algorithm: str, world: int) -> Shape | None:
    """None where ranks do different things."""
    if algorithm in POWERS_OF_TWO and world & (world - 1):
        return None
    make = SHAPES.get((collective, algorithm))
    return make(world) if make else None


def in_trains(shape: Shape, parts: list[float]) -> tuple[Shape, list[float]]:
    """Many segments that send one message at a time, as trains of several: behind each other they
    take the card as long, and while one is on its way the others keep the card busy.

    >>> shape, parts = in_trains(_recursive_doubling(1024), [8.0] * 40)
    >>> shape.rounds, len(parts)
    ((Rounds(times=10, messages=2, opens=0, ends=0, collects=False, adds=True),), 20)
    """
    (first, *others) = shape.rounds
    length = len(parts) // TRAINS
    if others or shape.chunks > 1 or first.messages > 1 or length < 2:
        return shape, parts
    trains = -(-len(parts) // length)
    longer = replace(first, messages=length)
    return Shape(1, (longer,)), [sum(parts) / (trains * length)] * trains


# Source, target and chunk of a message that leaves the first host, to those of the one that comes
# to it at the same time, since another host has sent it just so.
Fold = Callable[[int, int, int], tuple[int, int, int]]


def fold_of(collective: str, algorithm: str, world: int, links: Links) -> Fold | None:
    """None where hosts do different things.

    >>> from dpcore.base.link import Speed
    >>> links = Links.levels(Speed(6e9), Speed(1.25e8), ranks_per_host=2)
    >>> fold = fold_of("all_reduce", "ring", 8, links)
    >>> fold(1, 2, 3)  # from the last rank of the first host to the next host
    (7, 0, 1)
    """
    own = links.ranks_per_host
    if world % own or (collective, algorithm) not in FOLDED:
        return None
    if algorithm in POWERS_OF_TWO:
        # Over TCP its ranks take turns in the order of their numbers.
        takes_turns = links.is_tcp and algorithm == "halving_doubling"
        if takes_turns or world & (world - 1) or own & (own - 1):
            return None
        is_whole = (collective, algorithm) == ("all_reduce", "recursive_doubling")
        return partial(_mirrored, own, is_whole)
    if algorithm == "one_shot":
        return partial(_moved, own, world, 1, 0)
    if (collective, algorithm) == ("all_reduce", "hierarchical"):
        return partial(_moved, own, world, world // own, 1)  # its chunks are those of hosts
    return partial(_moved, own, world, world, own)


FOLDED = (
    *SHAPES,
    ("all_reduce", "hierarchical"),
    ("reduce_scatter", "hierarchical"),
    ("reduce_scatter", "halving_doubling"),
    ("all_gather", "hierarchical"),
    ("all_gather", "recursive_doubling"),
    ("all_gather", "bruck"),
)


def _mirrored(
    own: int, is_whole: bool, source: int, target: int, chunk: int
) -> tuple[int, int, int]:
    away = target - target % own
    return source ^ away, target ^ away, chunk if is_whole else chunk ^ away


def _moved(
    own: int, world: int, period: int, chunks: int, source: int, target: int, chunk: int
) -> tuple[int, int, int]:
    """``chunks`` of each host lie behind each other, and again after a ``period``."""
    away = target // own
    back = chunk - chunk % period + (chunk - away * chunks) % period
    return (source - away * own) % world, target % own, back
