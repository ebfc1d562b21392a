"""Operations over slow links, as the core runs them: the twin of ``executor.cpp`` and ``link.cpp``.

An operation is a schedule (``dpcore.reference``) over some bytes. Each chunk is cut into segments;
a rank works at a window of them at a time, each a *job*: step by step it sends and receives what
the moves say. What a rank sends passes its NIC one message after the other, at the bandwidth of
the link, and arrives a latency later; what arrives at once from several shares the receiver's NIC.

Times are seconds. Processors cost nothing here: where links are fast, the prediction is too low.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count

from dpcore import reference
from dpcore.base.link import Speed

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
    """One collective. ``launched``: when each rank calls it, where that is known beforehand;
    ``finished``: when it is through, by rank. Without ``background`` only a thread that waits
    drives it."""

    nbytes: int
    launched: list[float]
    priority: int = 0
    collective: str = "all_reduce"
    background: bool = True
    finished: list[float] = field(default_factory=list)
    _callers: int = 0
    _over: set[int] = field(default_factory=set)
    _waiting: dict[int, Callable[[float], None]] = field(default_factory=dict)

    def is_finished(self, rank: int) -> bool:
        return rank in self._over

    def when_finished(self, rank: int, act: Callable[[float], None]) -> None:
        """Calls ``act`` with the moment at which this rank is through, which lies ahead."""
        self._waiting[rank] = act

    def _finish(self, rank: int, now: float) -> None:
        self.finished[rank] = now
        self._over.add(rank)
        if rank in self._waiting:
            self._waiting.pop(rank)(now)


@dataclass
class _Job:
    chunk: int
    segment: int
    nbytes: float
    at: int = 0  # which step of its lane
    missing: int = 0  # messages of this step that have not left, or have not come


@dataclass
class _Sending:
    target: int
    transfer: float  # seconds on a NIC
    left: Callable[[float], None]
    taken: Callable[[float], None]


@dataclass
class _Nic:
    ready: list[tuple[int, int, _Sending]] = field(default_factory=list)  # a heap, by urgency
    sends: bool = False
    ingress: float = 0.0  # when it has taken in what came


class Network:
    """All ranks' NICs and processors. ``run`` takes the operations of one step and fills in when
    they end; where ranks launch as they go, ``at`` and ``compute`` let them act, ``launch`` is what
    they do, ``go_on`` runs it. ``ranks``: how many are simulated of ``world``, numbered from 0."""

    def __init__(self, world: int, link: Speed, algorithm: str = "two_shot") -> None:
        self.world = world
        self.ranks = world
        self.link = link
        self.algorithm = algorithm
        self._nics = [_Nic() for _ in range(world)]
        self._queue: list[tuple[float, int, int, Callable[[float], None]]] = []
        self._order = count()

    def run(self, operations: Sequence[NetworkOperation]) -> None:
        for operation in operations:
            for rank, moment in enumerate(operation.launched):
                self.at(moment, partial(self.launch, operation, rank))
        self.go_on()

    def launch(self, operation: NetworkOperation, rank: int, now: float) -> None:
        """A rank calls it. It begins a latency after the last one has; with one rank, at once."""
        operation._callers += 1
        if operation._callers < self.ranks:
            return
        begin = now + (self.link.latency if self.world > 1 else 0.0)
        operation.finished = [begin] * self.world
        if self.world == 1:
            self.at(begin, partial(operation._finish, rank))
            return
        running = _Running(self, operation)
        for each in range(self.world):
            self._at(begin, operation.priority, partial(running.begin, each))

    def at(self, moment: float, act: Callable[[float], None]) -> None:
        """Calls ``act`` with the moment when it has come."""
        self._at(moment, 0, act)

    def compute(self, rank: int, seconds: float, now: float, act: Callable[[float], None]) -> None:
        """Calls ``act`` with the moment when this rank's program has computed for so long."""
        self._at(now + seconds, 0, act)

    def go_on(self) -> None:
        """Until nothing is left to happen."""
        now = 0.0
        while True:
            if not self._queue or self._queue[0][0] > now:  # all that is ready now is known
                for rank in range(self.world):
                    self._serve(rank, now)
            if not self._queue:
                break
            now, _, _, act = heapq.heappop(self._queue)
            act(now)

    def send(
        self,
        source: int,
        target: int,
        nbytes: float,
        priority: int,
        left: Callable[[float], None],
        taken: Callable[[float], None],
    ) -> None:
        """A message is ready. ``left`` is called when the sender is through with it, ``taken`` when
        the receiver has it."""
        transfer = nbytes / self.link.bytes_per_second if self.link.bytes_per_second else 0.0
        sending = _Sending(target, transfer, left, taken)
        heapq.heappush(self._nics[source].ready, (-priority, next(self._order), sending))

    def _serve(self, source: int, now: float) -> None:
        """Lets the NIC take the next message, if it is free."""
        nic = self._nics[source]
        if nic.sends or not nic.ready:
            return
        sending = heapq.heappop(nic.ready)[-1]
        nic.sends = True
        self._at(now + sending.transfer, 0, partial(self._sent, source))
        self._at(now + sending.transfer + self.link.latency, 0, partial(self._arrive, sending))

    def _sent(self, source: int, now: float) -> None:
        self._nics[source].sends = False

    def _arrive(self, sending: _Sending, now: float) -> None:
        sending.left(now)
        nic = self._nics[sending.target]
        # A lone message took the NIC while it came: only what comes beside others waits.
        nic.ingress = max(now, nic.ingress + sending.transfer)
        self._at(nic.ingress, 0, sending.taken)

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
            [
                _Job(chunk, n, parts[n])
                for n in range(len(parts))
                for chunk in lanes
                if lanes[chunk]
            ][::-1]
            for lanes in self._lanes
        ]
        on_the_way = 2 * network.link.bytes_per_second * network.link.latency * network.world
        self._window = max(
            _LEAST_WINDOW, _WINDOW_PER_CHUNK * chunks, int(on_the_way / SEGMENT_BYTES)
        )
        self._left = [len(jobs) for jobs in self._waiting]
        self._arrived: set[tuple[int, int, int, int, int]] = set()
        self._expecting: dict[tuple[int, int, int, int, int], tuple[int, _Job]] = {}

    def begin(self, rank: int, now: float) -> None:
        if not self._left[rank]:
            self._operation._finish(rank, now)
        for _ in range(min(self._window, len(self._waiting[rank]))):
            self._step(rank, self._waiting[rank].pop(), now)

    def _step(self, rank: int, job: _Job, now: float) -> None:
        """Sends what the step of a job sends; it is over when that has left and all has come."""
        number, (sends, receives) = self._lanes[rank][job.chunk][job.at]
        job.missing = 1  # until all are counted
        for target in sends:
            job.missing += 1
            key = (rank, target, job.chunk, job.segment, number)
            self._network.send(
                rank, target, job.nbytes, self._operation.priority,
                partial(self._one_less, rank, job), partial(self._take, key),
            )  # fmt: skip
        for source in receives:
            key = (source, rank, job.chunk, job.segment, number)
            if key not in self._arrived:
                job.missing += 1
                self._expecting[key] = (rank, job)
        self._one_less(rank, job, now)

    def _take(self, key: tuple[int, int, int, int, int], now: float) -> None:
        self._arrived.add(key)
        if key in self._expecting:
            self._one_less(*self._expecting.pop(key), now)

    def _one_less(self, rank: int, job: _Job, now: float) -> None:
        job.missing -= 1
        if job.missing == 0:
            self._network._at(now, self._operation.priority, partial(self._advance, rank, job))

    def _advance(self, rank: int, job: _Job, now: float) -> None:
        job.at += 1
        if job.at < len(self._lanes[rank][job.chunk]):
            self._step(rank, job, now)
            return
        if self._waiting[rank]:
            self._step(rank, self._waiting[rank].pop(), now)
        self._left[rank] -= 1
        if self._left[rank] == 0:
            self._operation._finish(rank, now)


def _segments(nbytes: float) -> list[float]:
    whole, rest = divmod(nbytes, SEGMENT_BYTES)
    return [float(SEGMENT_BYTES)] * int(whole) + ([rest] if rest else [])
