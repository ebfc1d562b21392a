"""Algorithms whose steps grow with the logarithm of the world: in each step, the data of a rank or
the number of ranks that have the data doubles.

Their costs, and when others are faster, are described in the C++ twins,
``{recursive_doubling,halving_doubling,tree,bruck}.cpp`` in ``csrc/comm/schedule/algorithms``.
"""

from __future__ import annotations

from dpcore.reference.moves import Move, Plan, later

# --- recursive doubling and halving-doubling: partners at distance 1, 2, 4, ... ----------------


class Fold:
    """Makes an algorithm for powers of two work for any world.

    Each of the ``extra`` last ranks hands its data to a stand-in among the first ``core`` ranks
    and takes the result from it at the end.
    """

    def __init__(self, world: int) -> None:
        self.core = 1 << (world.bit_length() - 1)
        self.extra = world - self.core
        self.steps = 1 if self.extra else 0  # added before and after the algorithm

    def stand_in(self, rank: int) -> int:
        return rank if rank < self.core else rank - self.core

    def distances(self) -> list[int]:
        return [1 << bit for bit in range(self.core.bit_length() - 1)]


def recursive_doubling_all_reduce(world: int, root: int) -> Plan:
    fold = Fold(world)
    moves = [Move(0, fold.core + i, i, 0, True) for i in range(fold.extra)]
    step = fold.steps
    for distance in fold.distances():
        moves += [Move(step, rank, rank ^ distance, 0, True) for rank in range(fold.core)]
        step += 1
    moves += [Move(step, i, fold.core + i, 0, False) for i in range(fold.extra)]
    return Plan(1, moves)


def recursive_doubling_all_gather(world: int, root: int) -> Plan:
    fold = Fold(world)
    moves = [Move(0, fold.core + i, i, fold.core + i, False) for i in range(fold.extra)]
    step = fold.steps
    for distance in fold.distances():
        moves += [
            Move(step, rank, rank ^ distance, chunk, False)
            for rank in range(fold.core)
            for chunk in range(world)
            if fold.stand_in(chunk) // distance == rank // distance  # chunks it has so far
        ]
        step += 1
    moves += [
        Move(step, i, fold.core + i, chunk, False)
        for i in range(fold.extra)
        for chunk in range(world)
        if chunk != fold.core + i
    ]
    return Plan(world, moves)


def halving(fold: Fold, chunks: int) -> list[Move]:
    """Afterwards rank ``c % core`` holds the sum of chunk c: half the bytes in every step."""
    moves = [
        Move(0, fold.core + i, i, chunk, True) for i in range(fold.extra) for chunk in range(chunks)
    ]
    for step, distance in enumerate(reversed(fold.distances()), start=fold.steps):
        moves += [
            Move(step, rank, rank ^ distance, chunk, True)
            for rank in range(fold.core)
            for chunk in range(chunks)
            if fold.stand_in(chunk) // distance == (rank ^ distance) // distance
        ]
    return moves


def halving_doubling_reduce_scatter(world: int, root: int) -> Plan:
    fold = Fold(world)
    end = fold.steps + len(fold.distances())
    unfold = [Move(end, i, fold.core + i, fold.core + i, False) for i in range(fold.extra)]
    return Plan(world, halving(fold, world) + unfold)


def halving_doubling_all_reduce(world: int, root: int) -> Plan:
    fold = Fold(world)
    moves = halving(fold, fold.core)
    step = fold.steps + len(fold.distances())
    doubling = recursive_doubling_all_gather(fold.core, root).moves  # the core ranks need no fold
    moves += later(doubling, step)
    step += len(fold.distances())
    moves += [
        Move(step, i, fold.core + i, chunk, False)
        for i in range(fold.extra)
        for chunk in range(fold.core)
    ]
    return Plan(fold.core, moves)


# --- tree: in every step each rank that has the data serves one more ---------------------------


def tree_edges(world: int) -> list[list[tuple[int, int, int]]]:
    """``(parent, child, size of the child's subtree)`` per step, the way data flows down.

    Positions count from the root. A child's subtree is the positions from it onwards.
    """
    steps = []
    for bit in reversed(range((world - 1).bit_length())):
        distance = 1 << bit
        parents = range(0, world - distance, 2 * distance)
        steps.append([(p, p + distance, min(distance, world - p - distance)) for p in parents])
    return steps


def tree_broadcast(world: int, root: int) -> Plan:
    moves = [
        Move(step, (root + parent) % world, (root + child) % world, 0, False)
        for step, edges in enumerate(tree_edges(world))
        for parent, child, _ in edges
    ]
    return Plan(1, moves)


def tree_reduce(world: int, root: int) -> Plan:
    moves = [
        Move(step, (root + child) % world, (root + parent) % world, 0, True)
        for step, edges in enumerate(reversed(tree_edges(world)))
        for parent, child, _ in edges
    ]
    return Plan(1, moves)


def tree_all_reduce(world: int, root: int) -> Plan:
    upwards = tree_reduce(world, 0).moves
    return Plan(1, upwards + later(tree_broadcast(world, 0).moves, len(tree_edges(world))))


def tree_scatter(world: int, root: int) -> Plan:
    moves = [
        Move(step, (root + parent) % world, (root + child) % world, (root + c) % world, False)
        for step, edges in enumerate(tree_edges(world))
        for parent, child, size in edges
        for c in range(child, child + size)
    ]
    return Plan(world, moves)


def tree_gather(world: int, root: int) -> Plan:
    moves = [
        Move(step, (root + child) % world, (root + parent) % world, (root + c) % world, False)
        for step, edges in enumerate(reversed(tree_edges(world)))
        for parent, child, size in edges
        for c in range(child, child + size)
    ]
    return Plan(world, moves)


# --- bruck: rotations by 1, 2, 4, ... ---------------------------------------------------------


def bruck_all_gather(world: int, root: int) -> Plan:
    """Rank r holds a run of chunks from r on; r - 2^k appends it to its own in step k."""
    moves = [
        Move(step, rank, (rank - (1 << step)) % world, (rank + i) % world, False)
        for step in range((world - 1).bit_length())
        for rank in range(world)
        for i in range(min(1 << step, world - (1 << step)))
    ]
    return Plan(world, moves)


def bruck_all_to_all(world: int, root: int) -> Plan:
    """A chunk that has to advance by j ranks takes the strides that j consists of in binary."""
    moves = []
    for step in range((world - 1).bit_length()):
        stride = 1 << step
        for origin in range(world):
            for advance in range(world):
                if advance & stride:
                    src = (origin + advance % stride) % world
                    chunk = origin * world + (origin + advance) % world
                    moves.append(Move(step, src, (src + stride) % world, chunk, False))
    return Plan(world * world, moves)
