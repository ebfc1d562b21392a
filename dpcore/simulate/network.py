"""Operations over slow links, as the core runs them: the twin of ``executor.cpp`` and ``link.cpp``.

An operation is a schedule (``dpcore.reference``) over some bytes. Each chunk is cut into segments;
a rank works at a window of them at a time, each a *job*: step by step it sends and receives what
the moves say. What a rank sends passes its card one message after the other, at the bandwidth of
the link, and arrives a latency later; what arrives at once from several shares the receiver's card.

Times are seconds. Processors cost nothing here: where links are fast, the prediction is too low.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count

from dpcore import reference
from dpcore.link import Speed

SEGMENT_BYTES = 256 << 10
_LEAST_WINDOW = 8  # jobs at a time
_WINDOW_PER_CHUNK = 2

Step = tuple[tuple[int, ...], tuple[int, ...]]  # to whom a rank sends a chunk, from whom it comes
Lanes = dict[int, list[tuple[int, Step]]]  # numbered steps by chunk, in the order of the chunks


@cache
def lanes_of(algorithm: str, collective: str, world: int) -> list[Lanes]:
    """By rank and chunk: the steps in which the rank has to do with the chunk."""
    plan = reference.make_schedule(algorithm, collective, world)
    lanes: list[Lanes] = [
        {chunk: [] for chunk in reference.order_of_chunks(plan, rank)} for rank in range(world)
    ]
    steps: dict[tuple[int, int, int], tuple[list[int], list[int]]] = {}
    for move in plan.moves:
        steps.setdefault((move.src, move.chunk, move.step), ([], []))[0].append(move.dst)
        steps.setdefault((move.dst, move.chunk, move.step), ([], []))[1].append(move.src)
    for (rank, chunk, step), (sends, receives) in sorted(steps.items(), key=lambda item: item[0]):
        lanes[rank][chunk].append((step, (tuple(sends), tuple(receives))))
    return lanes


@dataclass
class NetworkOperation:
    """One collective. ``launched``: when each rank calls it; ``finished``: when it is through."""

    nbytes: int
    launched: list[float]
    priority: int = 0
    finished: list[float] = field(default_factory=list)


@dataclass
class _Job:
    chunk: int
    segment: int
    nbytes: float
    at: int = 0  # which step of its lane
    sent: float = 0.0  # when the sends of this step have left


class Network:
    """All ranks' cards. ``run`` takes the operations of one step and fills in when they end."""

    def __init__(self, world: int, link: Speed, algorithm: str = "two_shot") -> None:
        self.world = world
        self.link = link
        self.algorithm = algorithm
        self._egress = [0.0] * world
        self._ingress = [0.0] * world
        self._queue: list[tuple[float, int, int, Callable[[float], None]]] = []
        self._order = count()

    def run(self, operations: Sequence[NetworkOperation]) -> None:
        for operation in operations:
            everybody = max(operation.launched) + self.link.latency
            operation.finished = [everybody] * self.world
            if self.world == 1:
                continue
            running = _Running(self, operation)
            for rank in range(self.world):
                self._at(everybody, operation.priority, partial(running.begin, rank))
        while self._queue:
            moment, _, _, act = heapq.heappop(self._queue)
            act(moment)

    def send(
        self, source: int, target: int, nbytes: float, now: float, taken: Callable[[float], None]
    ) -> float:
        """When a message has left for good; ``taken`` is told when it is there."""
        transfer = nbytes / self.link.bytes_per_second if self.link.bytes_per_second else 0.0
        arrival = max(now + self.link.latency, self._egress[source]) + transfer
        self._egress[source] = arrival

        def arrive(moment: float) -> None:
            # A lone message took the card while it came: only what comes beside others waits.
            self._ingress[target] = max(moment, self._ingress[target] + transfer)
            taken(self._ingress[target])

        self._at(arrival, 0, arrive)
        return arrival

    def _at(self, moment: float, priority: int, act: Callable[[float], None]) -> None:
        heapq.heappush(self._queue, (moment, -priority, next(self._order), act))


class _Running:
    """An operation on its way."""

    def __init__(self, network: Network, operation: NetworkOperation) -> None:
        self._network = network
        self._operation = operation
        self._lanes = lanes_of(network.algorithm, "all_reduce", network.world)
        chunks = reference.make_schedule(network.algorithm, "all_reduce", network.world).chunks
        parts = _segments(operation.nbytes / chunks)
        # The first segment of all chunks, each rank's in its own order; the second, ...
        self._waiting = [
            [_Job(chunk, n, parts[n]) for n in range(len(parts)) for chunk in lanes if lanes[chunk]][::-1]
            for lanes in self._lanes
        ]
        on_the_way = 2 * network.link.bytes_per_second * network.link.latency * network.world
        self._window = max(
            _LEAST_WINDOW, _WINDOW_PER_CHUNK * chunks, int(on_the_way / SEGMENT_BYTES)
        )
        self._arrived: dict[tuple[int, int, int, int, int], float] = {}
        self._expecting: dict[tuple[int, int, int, int, int], tuple[int, _Job]] = {}

    def begin(self, rank: int, now: float) -> None:
        for _ in range(min(self._window, len(self._waiting[rank]))):
            self._step(rank, self._waiting[rank].pop(), now)

    def _step(self, rank: int, job: _Job, now: float) -> None:
        """Sends what the step of a job sends, and goes on when what it receives is there."""
        lane = self._lanes[rank][job.chunk]
        number, (sends, _) = lane[job.at]
        job.sent = now
        for target in sends:
            key = (rank, target, job.chunk, job.segment, number)
            left = self._network.send(rank, target, job.nbytes, now, partial(self._take, key))
            job.sent = max(job.sent, left)
        self._receive(rank, job)

    def _take(self, key: tuple[int, int, int, int, int], there: float) -> None:
        self._arrived[key] = there
        if key in self._expecting:
            self._receive(*self._expecting.pop(key))

    def _receive(self, rank: int, job: _Job) -> None:
        number, (_, receives) = self._lanes[rank][job.chunk][job.at]
        done = job.sent
        for source in receives:
            key = (source, rank, job.chunk, job.segment, number)
            if key not in self._arrived:
                self._expecting[key] = (rank, job)
                return
            done = max(done, self._arrived[key])
        network = self._network
        network._at(done, self._operation.priority, partial(self._advance, rank, job))

    def _advance(self, rank: int, job: _Job, now: float) -> None:
        job.at += 1
        if job.at < len(self._lanes[rank][job.chunk]):
            self._step(rank, job, now)
            return
        self._operation.finished[rank] = max(self._operation.finished[rank], now)
        if self._waiting[rank]:
            self._step(rank, self._waiting[rank].pop(), now)


def _segments(nbytes: float) -> list[float]:
    whole, rest = divmod(nbytes, SEGMENT_BYTES)
    return [float(SEGMENT_BYTES)] * int(whole) + ([rest] if rest else [])
