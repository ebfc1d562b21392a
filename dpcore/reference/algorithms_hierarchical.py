"""Hierarchical algorithms: they reduce within each host, then send only the results between hosts.

``hosts[r]`` names the host of rank r. Ranks of one host are local peers. Each chunk has a *leader*
on every host, and a *home*, the host that holds its result first. Leaders and homes change from
chunk to chunk, so that work and traffic are spread evenly over ranks and links. Twin of
``csrc/comm/schedule/algorithms/hierarchical.cpp``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from dpcore.reference.moves import Move, Plan

HostAlgorithm = Callable[[Sequence[int], int], Plan]  # (host of each rank, root) -> Plan


def _ranks_by_host(hosts: Sequence[int]) -> list[list[int]]:
    """The ranks of each host, with hosts in the order of their first ranks."""
    groups: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        groups.setdefault(host, []).append(rank)
    return list(groups.values())


def _plan(chunks: int, moves: Iterable[tuple[int, int, int, int, bool]]) -> Plan:
    """A plan without moves from a rank to itself and without empty steps."""
    kept = [Move(*move) for move in moves if move[1] != move[2]]
    number = {step: i for i, step in enumerate(sorted({move.step for move in kept}))}
    return Plan(chunks, [move._replace(step=number[move.step]) for move in kept])


def _pairs(groups: list[list[int]]) -> Iterable[tuple[int, int]]:
    """Every host with every other one and at last with itself, each beginning with the one on its
    right: if all began with host 0, its card would take in what all others send."""
    for ahead in range(1, len(groups) + 1):
        for host in range(len(groups)):
            yield host, (host + ahead) % len(groups)


def _turns(groups: list[list[int]]) -> Iterable[tuple[int, int, int]]:
    """(chunk, number of its home, turn of the leaders)."""
    for chunk in range(len(groups) * max(map(len, groups))):
        yield chunk, chunk % len(groups), chunk // len(groups)


def hierarchical_all_reduce(hosts: Sequence[int], root: int) -> Plan:
    groups = _ranks_by_host(hosts)
    moves = []
    for turn in range(max(map(len, groups))):
        leaders = [local[turn % len(local)] for local in groups]
        for host, home in _pairs(groups):
            chunk, leader, at_home = turn * len(groups) + home, leaders[host], leaders[home]
            moves += [(0, peer, leader, chunk, True) for peer in groups[host]]
            moves += [(1, leader, at_home, chunk, True), (2, at_home, leader, chunk, False)]
            moves += [(3, leader, peer, chunk, False) for peer in groups[host]]
    return _plan(len(groups) * max(map(len, groups)), moves)


def hierarchical_reduce(hosts: Sequence[int], root: int) -> Plan:
    groups = _ranks_by_host(hosts)
    moves = []
    for chunk, home_host, turn in _turns(groups):
        leaders = [root if root in local else local[turn % len(local)] for local in groups]
        home = leaders[home_host]
        for leader, local in zip(leaders, groups, strict=True):
            moves += [(0, peer, leader, chunk, True) for peer in local]
            if leader != root:
                moves.append((1, leader, home, chunk, True))
        moves.append((2, home, root, chunk, True))
    return _plan(len(groups) * max(map(len, groups)), moves)


def hierarchical_broadcast(hosts: Sequence[int], root: int) -> Plan:
    groups = _ranks_by_host(hosts)
    moves = []
    for chunk, home_host, turn in _turns(groups):
        leaders = [root if root in local else local[turn % len(local)] for local in groups]
        home = leaders[home_host]
        if home != root:
            moves.append((0, root, home, chunk, False))
        for leader, local in zip(leaders, groups, strict=True):
            if leader not in (root, home):
                moves.append((1, home, leader, chunk, False))
            step = 0 if leader == root else 2
            moves += [(step, leader, peer, chunk, False) for peer in local]
    return _plan(len(groups) * max(map(len, groups)), moves)


def hierarchical_reduce_scatter(hosts: Sequence[int], root: int) -> Plan:
    groups = _ranks_by_host(hosts)
    moves = []
    for host, home in _pairs(groups):
        local = groups[host]
        for turn, rank in enumerate(groups[home]):
            leader = local[turn % len(local)]
            moves += [(0, peer, leader, rank, True) for peer in local]
            moves.append((1, leader, rank, rank, True))
    return _plan(len(hosts), moves)


def hierarchical_all_gather(hosts: Sequence[int], root: int) -> Plan:
    groups = _ranks_by_host(hosts)
    moves = []
    for home, host in _pairs(groups):
        local = groups[host]
        for turn, rank in enumerate(groups[home]):
            leader = rank if host == home else local[turn % len(local)]
            moves.append((0, rank, leader, rank, False))
            moves += [(int(host != home), leader, peer, rank, False) for peer in local]
    return _plan(len(hosts), moves)
