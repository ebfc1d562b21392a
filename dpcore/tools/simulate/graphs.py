"""Chakra's traces as programs: a graph for each rank, whose nodes begin when what they depend on is
over. A rank computes one node at a time, and its collectives go beside that."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dpcore.base.link import Speed
from dpcore.errors import Mismatch, Unsupported
from dpcore.reference.plans import chakra
from dpcore.tools.simulate.links import Links
from dpcore.tools.simulate.network import Network, NetworkOperation
from dpcore.tools.simulate.processors import Processors

_SIMULATED = ("all_reduce", "all_gather", "reduce_scatter")
Graph = Sequence[chakra.Node]


@dataclass(frozen=True)
class GraphPrediction:
    """Milliseconds: until the last rank is through, and what the longest rank computes alone."""

    algorithm: str
    world: int
    collectives: int
    nbytes: int
    total_ms: float
    compute_ms: float

    @property
    def exposed_ms(self) -> float:
        return self.total_ms - self.compute_ms


class _Program:
    """Of one rank."""

    def __init__(
        self, rank: int, nodes: Graph, network: Network, operations: Sequence[NetworkOperation]
    ) -> None:
        self.rank, self._network = rank, network
        self.over = 0.0
        self._operations = dict(zip(_collectives(nodes), operations, strict=True))
        self._nodes = {node.number: node for node in nodes}
        self._missing = {node.number: len(set(node.after)) for node in nodes}
        self._followers: dict[int, list[int]] = {}
        for node in nodes:
            for one in set(node.after):
                self._followers.setdefault(one, []).append(node.number)
        self._to_compute: deque[int] = deque()
        self._computes = False

    def begin(self, now: float) -> None:
        for number in [number for number, missing in self._missing.items() if not missing]:
            self._ready(number, now)

    def _ready(self, number: int, now: float) -> None:
        if number in self._operations:
            operation = self._operations[number]
            operation.when_finished(self.rank, partial(self._finished, number))
            self._network.launch(operation, self.rank, now)
        elif self._nodes[number].kind == chakra.COMPUTE:
            self._to_compute.append(number)
            self._compute_next(now)
        else:
            self._finished(number, now)

    def _compute_next(self, now: float) -> None:
        if self._computes or not self._to_compute:
            return
        number = self._to_compute.popleft()
        self._computes = True
        computed = partial(self._computed, number)
        self._network.compute(self.rank, self._nodes[number].micros * 1e-6, now, computed)

    def _computed(self, number: int, now: float) -> None:
        self._computes = False
        self._finished(number, now)
        self._compute_next(now)

    def _finished(self, number: int, now: float) -> None:
        self.over = max(self.over, now)
        for follower in self._followers.get(number, ()):
            self._missing[follower] -= 1
            if not self._missing[follower]:
                self._ready(follower, now)


def is_graph(path: Path) -> bool:
    return path.suffix == ".et"


def read_graphs(paths: Sequence[Path]) -> list[Graph]:
    """Of each rank, or one for all. Refuses what is not simulated, by file and node."""
    graphs: list[Graph] = [chakra.read(path) for path in paths]
    for path, nodes in zip(paths, graphs, strict=True):
        for node in nodes:
            where = f"{path}, node {node.number} ({node.name})"
            if node.kind in (chakra.SEND, chakra.RECEIVE):
                raise Unsupported(
                    f"{where} is a single send or receive: only collectives are simulated"
                )
            if node.kind == chakra.COLLECTIVE and node.collective not in _SIMULATED:
                raise Unsupported(
                    f"{where} is of kind {node.collective}; simulated are {', '.join(_SIMULATED)}"
                )
    first = list(map(_said, _of(graphs[0])))
    for path, nodes in zip(paths, graphs, strict=True):
        said = list(map(_said, _of(nodes)))
        if said != first:
            same = [mine == theirs for mine, theirs in zip(said, first, strict=False)]
            at = [*same, False].index(False)
            raise Mismatch(
                f"{path} has {len(said)} collectives and {paths[0]} {len(first)}, and they differ "
                f"from collective {at} on"
            )
    return graphs


def _of(nodes: Graph) -> list[chakra.Node]:
    return sorted((n for n in nodes if n.kind == chakra.COLLECTIVE), key=lambda node: node.number)


def _collectives(nodes: Graph) -> list[int]:
    return [node.number for node in _of(nodes)]


def _said(node: chakra.Node) -> tuple[str, int]:
    return node.collective, node.attributes.get("comm_size", 0)


def predict_graphs(
    graphs: Sequence[Graph],
    world: int,
    link: Speed | Links,
    algorithm: Any = "two_shot",
    processors: Processors = Processors.free(),  # noqa: B008
) -> GraphPrediction:
    """``graphs``: of each rank, or one for all."""
    network = Network(world, link, algorithm, processors)
    said = [_said(node) for node in _of(graphs[0])]
    operations = [NetworkOperation(nbytes, [], 0, name) for name, nbytes in said]
    programs = [
        _Program(rank, graphs[rank % len(graphs)], network, operations) for rank in range(world)
    ]
    for program in programs:
        network.at(0.0, program.begin)
    network.go_on()
    computing = [sum(n.micros for n in nodes if n.kind == chakra.COMPUTE) for nodes in graphs]
    return GraphPrediction(
        algorithm=str(algorithm),
        world=world,
        collectives=len(said),
        nbytes=sum(nbytes for _, nbytes in said),
        total_ms=round(max(program.over for program in programs) * 1e3, 3),
        compute_ms=round(max(computing) * 1e-3, 3),
    )
