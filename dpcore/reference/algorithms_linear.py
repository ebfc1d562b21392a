"""Algorithms in which ranks talk to their neighbours or to all peers: direct, two_shot, ring.

Direct plans take one step, two-shot plans two, a ring as many as there are ranks. Their costs, and
when others are faster, are described in the C++ twins, ``{direct,two_shot,ring}.cpp`` in
``csrc/comm/schedule/algorithms``.
"""

from __future__ import annotations

from collections.abc import Iterator

from dpcore.reference.moves import Move, Plan, later

# --- direct: one step, all ranks send at once -------------------------------------------------


def pairs(world: int) -> Iterator[tuple[int, int]]:
    return ((src, dst) for src in range(world) for dst in range(world) if src != dst)


def one_shot_all_reduce(world: int, root: int) -> Plan:
    return Plan(1, [Move(0, src, dst, 0, True) for src, dst in pairs(world)])


def direct_reduce_scatter(world: int, root: int) -> Plan:
    return Plan(world, [Move(0, src, dst, dst, True) for src, dst in pairs(world)])


def direct_all_gather(world: int, root: int) -> Plan:
    return Plan(world, [Move(0, src, dst, src, False) for src, dst in pairs(world)])


def direct_all_to_all(world: int, root: int) -> Plan:
    moves = [Move(0, src, dst, src * world + dst, False) for src, dst in pairs(world)]
    return Plan(world * world, moves)


def direct_broadcast(world: int, root: int) -> Plan:
    return Plan(1, [Move(0, root, dst, 0, False) for dst in range(world) if dst != root])


def direct_reduce(world: int, root: int) -> Plan:
    return Plan(1, [Move(0, src, root, 0, True) for src in range(world) if src != root])


def direct_gather(world: int, root: int) -> Plan:
    return Plan(world, [Move(0, src, root, src, False) for src in range(world) if src != root])


def direct_scatter(world: int, root: int) -> Plan:
    return Plan(world, [Move(0, root, dst, dst, False) for dst in range(world) if dst != root])


# --- two_shot: rank c owns chunk c, one step to the owners and one from them ------------------


def two_shot_all_reduce(world: int, root: int) -> Plan:
    to_owners = direct_reduce_scatter(world, root).moves
    return Plan(world, to_owners + later(direct_all_gather(world, root).moves, 1))


def two_shot_reduce(world: int, root: int) -> Plan:
    to_owners = direct_reduce_scatter(world, root).moves
    return Plan(world, to_owners + later(direct_gather(world, root).moves, 1))


def two_shot_broadcast(world: int, root: int) -> Plan:
    to_owners = direct_scatter(world, root).moves
    to_all = [move for move in direct_all_gather(world, root).moves if move.dst != root]
    return Plan(world, to_owners + later(to_all, 1))


# --- ring: each rank sends only to its right neighbour ----------------------------------------

BROADCAST_CHUNKS_PER_RANK = 4  # more chunks fill the pipeline faster, and cost more steps


def ring_reduce_scatter(world: int, root: int) -> Plan:
    """A chunk starts right of its owner and travels around to it, and each rank adds its part."""
    moves = [
        Move(step, rank, (rank + 1) % world, (rank - 1 - step) % world, True)
        for step in range(world - 1)
        for rank in range(world)
    ]
    return Plan(world, moves)


def ring_all_gather(world: int, root: int) -> Plan:
    moves = [
        Move(step, rank, (rank + 1) % world, (rank - step) % world, False)
        for step in range(world - 1)
        for rank in range(world)
    ]
    return Plan(world, moves)


def ring_all_reduce(world: int, root: int) -> Plan:
    first_half = ring_reduce_scatter(world, root).moves
    return Plan(world, first_half + later(ring_all_gather(world, root).moves, world - 1))


def ring_broadcast(world: int, root: int) -> Plan:
    """A chain from the root: every rank forwards the chunk that it received in the last step."""
    chunks = BROADCAST_CHUNKS_PER_RANK * world
    moves = [
        Move(link + chunk, (root + link) % world, (root + link + 1) % world, chunk, False)
        for link in range(world - 1)
        for chunk in range(chunks)
    ]
    return Plan(chunks, moves)
