"""Hierarchical algorithms: within a host first, and only what is left between hosts.

``hosts[r]`` names the host of rank r. Ranks that share one are mates; each chunk has a *speaker* on
every host, and a *home*, the host that holds its result first. Speakers and homes change from
chunk to chunk, so that all ranks work and all links carry the same. Twin of
``csrc/comm/schedule/algorithms/hierarchical.cpp``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from dpcore.reference.moves import Move, Plan

HostAlgorithm = Callable[[Sequence[int], int], Plan]  # (host of each rank, root) -> Plan


def _mates(hosts: Sequence[int]) -> list[list[int]]:
    """The ranks of each host; hosts in the order in which ranks name them."""
    groups: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        groups.setdefault(host, []).append(rank)
    return list(groups.values())


def _plan(chunks: int, moves: Iterable[tuple[int, int, int, int, bool]]) -> Plan:
    """Nobody sends to itself, and steps in which nothing happens are left out."""
    kept = [Move(*move) for move in moves if move[1] != move[2]]
    number = {step: i for i, step in enumerate(sorted({move.step for move in kept}))}
    return Plan(chunks, [move._replace(step=number[move.step]) for move in kept])


def _turns(groups: list[list[int]]) -> Iterable[tuple[int, int, int]]:
    """(chunk, number of its home, turn of the speakers)."""
    for chunk in range(len(groups) * max(map(len, groups))):
        yield chunk, chunk % len(groups), chunk // len(groups)


def hierarchical_all_reduce(hosts: Sequence[int], root: int) -> Plan:
    groups = _mates(hosts)
    moves = []
    for chunk, home_host, turn in _turns(groups):
        speakers = [mates[turn % len(mates)] for mates in groups]
        home = speakers[home_host]
        for speaker, mates in zip(speakers, groups, strict=True):
            moves += [(0, mate, speaker, chunk, True) for mate in mates]
            moves += [(1, speaker, home, chunk, True), (2, home, speaker, chunk, False)]
            moves += [(3, speaker, mate, chunk, False) for mate in mates]
    return _plan(len(groups) * max(map(len, groups)), moves)


def hierarchical_reduce(hosts: Sequence[int], root: int) -> Plan:
    groups = _mates(hosts)
    moves = []
    for chunk, home_host, turn in _turns(groups):
        speakers = [root if root in mates else mates[turn % len(mates)] for mates in groups]
        home = speakers[home_host]
        for speaker, mates in zip(speakers, groups, strict=True):
            moves += [(0, mate, speaker, chunk, True) for mate in mates]
            if speaker != root:
                moves.append((1, speaker, home, chunk, True))
        moves.append((2, home, root, chunk, True))
    return _plan(len(groups) * max(map(len, groups)), moves)


def hierarchical_broadcast(hosts: Sequence[int], root: int) -> Plan:
    groups = _mates(hosts)
    moves = []
    for chunk, home_host, turn in _turns(groups):
        speakers = [root if root in mates else mates[turn % len(mates)] for mates in groups]
        home = speakers[home_host]
        if home != root:
            moves.append((0, root, home, chunk, False))
        for speaker, mates in zip(speakers, groups, strict=True):
            if speaker not in (root, home):
                moves.append((1, home, speaker, chunk, False))
            step = 0 if speaker == root else 2
            moves += [(step, speaker, mate, chunk, False) for mate in mates]
    return _plan(len(groups) * max(map(len, groups)), moves)


def hierarchical_reduce_scatter(hosts: Sequence[int], root: int) -> Plan:
    groups = _mates(hosts)
    moves = []
    for own in groups:
        for turn, rank in enumerate(own):
            for mates in groups:
                speaker = mates[turn % len(mates)]
                moves += [(0, mate, speaker, rank, True) for mate in mates]
                moves.append((1, speaker, rank, rank, True))
    return _plan(len(hosts), moves)


def hierarchical_all_gather(hosts: Sequence[int], root: int) -> Plan:
    groups = _mates(hosts)
    moves = []
    for own in groups:
        for turn, rank in enumerate(own):
            moves += [(0, rank, mate, rank, False) for mate in own]
            for mates in groups:
                if mates is not own:
                    speaker = mates[turn % len(mates)]
                    moves.append((0, rank, speaker, rank, False))
                    moves += [(1, speaker, mate, rank, False) for mate in mates]
    return _plan(len(hosts), moves)
