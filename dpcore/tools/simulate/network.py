"""Operations over slow links, as the core runs them: the twin of ``executor.cpp``.

An operation is a schedule (``dpcore.reference``) over some bytes. Each chunk is cut into segments;
a rank works at a window of them at a time, each a *job*: step by step it sends and receives what
the moves say (``lanes.py``). Messages pass the cards of their ranks (``cards.py``).

What that costs processors is in ``processors.py``; without a link, nothing else takes time
(``in_memory.py``). Times are seconds.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from dpcore.base.link import Speed
from dpcore.errors import Unsupported
from dpcore.tools.simulate.cards import Cards, Message
from dpcore.tools.simulate.choice import AlgorithmChoice
from dpcore.tools.simulate.in_memory import FUSED, InMemory
from dpcore.tools.simulate.lanes import Lanes, LaneStep
from dpcore.tools.simulate.links import Links
from dpcore.tools.simulate.processors import Processors, Threads
from dpcore.tools.simulate.shapes import Fold, fold_of

SLOTS = 64  # operations of a rank in flight
_LEAST_WINDOW = 8  # jobs at a time
_WINDOW_PER_CHUNK = 2
_TCP_WINDOW_BYTES = 4 << 20
_EARLY_BYTES = 40 << 10  # up to here a message takes no turn, if its operation overtakes others
_SEGMENTS_LEFT = 12  # at most, of the runs before it, when one that takes turns begins to send


@dataclass
class NetworkOperation:
    """One collective. ``launched``: when each rank calls it, where that is known beforehand;
    ``finished``: when it is through, by rank. Without ``background`` only a thread that waits
    drives it. ``algorithm``: None for the network's."""

    nbytes: int
    launched: list[float]
    priority: int = 0
    collective: str = "all_reduce"
    background: bool = True
    algorithm: Any = None
    finished: list[float] = field(default_factory=list)
    _number: int = 0
    _callers: int = 0
    _over: set[int] = field(default_factory=set)
    _waiting: dict[int, Callable[[float], None]] = field(default_factory=dict)
    _followers: list[Callable[[float], None]] = field(default_factory=list)

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
        if len(self._over) == len(self.finished):
            for follow in self._followers:
                follow(now)


class _Key(NamedTuple):
    """A message of an operation."""

    source: int
    target: int
    chunk: int
    segment: int
    step: int


@dataclass
class _Job:
    chunk: int
    segment: int
    nbytes: float
    at: int = 0  # which step of its lane
    missing: int = 0  # messages of this step that have not left, or have not come


class Network:
    """All ranks' NICs and processors. ``run`` takes the operations of one step and fills in when
    they end; where ranks launch as they go, ``at`` and ``compute`` let them act, ``launch`` is what
    they do, ``go_on`` runs it. ``ranks``: how many are simulated of ``world``, numbered from 0; if
    not all, those of a host that stands for all hosts (``one_host_stands_for_all``)."""

    def __init__(
        self,
        world: int,
        link: Speed | Links,
        algorithm: Any = "two_shot",
        processors: Processors = Processors.free(),  # noqa: B008
        ranks: int = 0,
    ) -> None:
        self.world = world
        self.ranks = ranks or world
        self.links = Links.of(link)
        self.algorithm = algorithm
        self.processors = processors
        self.choice = AlgorithmChoice(algorithm, world, self.ranks, self.links, processors.costs)
        self._queue: list[tuple[float, int, int, Callable[[float], None]]] = []
        self._order = count()
        self.cards = Cards(
            self.links, world, self.ranks, self.at, processors.are_shared, self._has_more_urgent
        )
        self.threads = Threads(processors, self.ranks, self.links.ranks_per_host, self.at)
        self._launched = [deque[NetworkOperation](maxlen=SLOTS) for _ in range(self.ranks)]
        self._numbers = count(1)
        self._has_priorities = False
        self._running: list[list[_Running]] = [[] for _ in range(self.ranks)]  # on each rank

    def run(self, operations: Sequence[NetworkOperation]) -> None:
        for operation in operations:
            for rank, moment in enumerate(operation.launched):
                self.at(moment, partial(self.launch, operation, rank))
        self.go_on()

    def launch(self, operation: NetworkOperation, rank: int, now: float) -> None:
        """A rank calls it. It begins a latency after the last one has; with one rank, at once."""
        operation._number = operation._number or next(self._numbers)
        earlier = self._launched[rank]
        enter = partial(self._enter, operation, rank)
        if len(earlier) == SLOTS and len(earlier[0]._over) < self.ranks:
            earlier[0]._followers.append(enter)  # until all ranks are through
        else:
            enter(now)
        earlier.append(operation)

    def _enter(self, operation: NetworkOperation, rank: int, now: float) -> None:
        is_memory = self.links.is_memory(self.world)
        seconds = self.processors.memory_operation if is_memory else self.processors.operation
        seconds = seconds if self.world > 1 else 0.0
        entered = partial(self._entered, operation, rank)
        is_awake = not operation.background
        self.threads.work(rank, seconds, operation.priority, now, entered, is_awake)

    def _entered(self, operation: NetworkOperation, rank: int, now: float) -> None:
        operation._callers += 1
        if operation._callers < self.ranks:
            return
        operation.finished = [now] * self.ranks
        algorithm, priority = operation.algorithm or self.algorithm, operation.priority
        if self.world == 1:
            self.at(now, partial(operation._finish, rank))
        elif self.links.is_memory(self.world) and self._is_fused(algorithm, operation.collective):
            running = InMemory(
                operation.collective, operation.nbytes, priority, algorithm, self.world,
                self.processors, self.threads, operation._finish, not operation.background,
            )  # fmt: skip
            self._begin(running.begin, operation, now, travels=False)
        else:
            # The data of a small one travels with the word that its rank has entered.
            is_posted = self.links.is_posted(operation.nbytes, self.world) and algorithm == "auto"
            self._begin(_Running(self, operation).begin, operation, now, travels=not is_posted)

    def _lanes_of(self, operation: NetworkOperation) -> tuple[Lanes, Fold | None]:
        collective, asked = operation.collective, operation.algorithm
        lanes = self.choice.lanes(collective, operation.nbytes, asked)
        if self.ranks == self.world:
            return lanes, None
        fold = fold_of(collective, lanes.algorithm, self.world, self.links)
        if fold is None and collective != "all_reduce" and not asked:
            lanes = self.choice.lanes(collective, operation.nbytes, "direct")
            fold = fold_of(collective, "direct", self.world, self.links)
        if fold is None:
            raise Unsupported(
                f"{collective} by {lanes.algorithm} of {self.world} ranks: hosts do different "
                "things, so one cannot stand for all"
            )
        return lanes, fold

    def _is_fused(self, algorithm: Any, collective: str) -> bool:
        is_named = isinstance(algorithm, str) and algorithm in FUSED
        return is_named or not self.choice.has(algorithm, collective)

    def _begin(
        self,
        begin: Callable[[int, float], None],
        operation: NetworkOperation,
        now: float,
        travels: bool,
    ) -> None:
        """``travels``: the word that the last rank has entered takes a latency to each other."""
        for rank in range(self.ranks):
            latency = self.links.entry_latency(rank, self.world) if travels else 0.0
            wake = partial(
                self.threads.work, rank, 0.0, operation.priority,
                act=partial(begin, rank), is_awake=self.polls(operation),
            )  # fmt: skip
            self._at(now + latency, operation.priority, wake)

    def _adds(self, run: _Running, rank: int) -> None:
        """A run begins on a rank."""
        others, priority = self._running[rank], run._operation.priority
        if any(other._operation.priority != priority for other in others):
            self._has_priorities = True
        others.append(run)

    def _wakes(self, nbytes: float) -> int:
        """How often a rank wakes up to send a message: once priorities have met, for each frame,
        since the kernel is given no more than keeps it busy. Before, it has enough for long."""
        if not self._has_priorities:
            return 0
        return math.ceil(nbytes / self.links.frame_bytes(self.world))

    def _has_more_urgent(self, rank: int, priority: int) -> bool:
        others = self._running[rank % self.ranks]
        return any(run._operation.priority > priority for run in others)

    def _early_bytes(self, rank: int, priority: int) -> int:
        """How short a message has to be to take no turn. The core also begins longer ones so much
        before their turn, which would gain nothing here, where a turn comes without delay."""
        overtakes = any(run._operation.priority < priority for run in self._running[rank])
        return _EARLY_BYTES if overtakes and not self._has_more_urgent(rank, priority) else 0

    def polls(self, operation: NetworkOperation) -> bool:
        """A thread that waits polls before it sleeps, but not over an emulated link; the progress
        thread never does."""
        is_emulated = not (self.links.is_tcp or self.links.is_memory(self.world))
        return not operation.background and not is_emulated

    def at(self, moment: float, act: Callable[[float], None]) -> None:
        """Calls ``act`` with the moment when it has come."""
        self._at(moment, 0, act)

    def compute(
        self,
        rank: int,
        seconds: float,
        now: float,
        act: Callable[[float], None],
        busy: float = 1.0,
    ) -> None:
        """Calls ``act`` with the moment when this rank's program has computed for so long, alone.
        ``busy``: for which part of it a core; layers that sleep need none."""
        self.threads.compute(rank, seconds, busy, now, act)

    def go_on(self) -> None:
        """Until nothing is left to happen."""
        now = 0.0
        while True:
            if not self._queue or self._queue[0][0] > now:  # all that is ready now is known
                self.cards.serve(now)
            if not self._queue:
                break
            now, _, _, act = heapq.heappop(self._queue)
            act(now)

    def _at(self, moment: float, priority: int, act: Callable[[float], None]) -> None:
        heapq.heappush(self._queue, (moment, -priority, next(self._order), act))


class _Running:
    """An operation on its way."""

    def __init__(self, network: Network, operation: NetworkOperation) -> None:
        self._network = network
        self._operation = operation
        links = network.links
        lanes, self._fold = network._lanes_of(operation)
        self._program = lanes
        self._lanes = lanes.by_rank
        self._segment = links.segment_bytes(network.world)
        parts = segments_of(operation.nbytes / lanes.chunks, self._segment)
        # The first segment of all chunks, each rank's in its own order; the second, ...
        self._waiting = [
            [_Job(chunk, n, parts[n]) for n in range(len(parts)) for chunk in steps][::-1]
            for steps in self._lanes
        ]
        self._window = [
            window_of(links, rank, network.world, lanes.chunks) for rank in range(network.ranks)
        ]
        self._left = [len(jobs) for jobs in self._waiting]
        self._bytes_left = [sum(job.nbytes for job in jobs) for jobs in self._waiting]
        self._sends = [not lanes.has_turns] * network.ranks  # whether it has begun to
        self._held: list[list[Callable[[float], None]]] = [[] for _ in range(network.ranks)]
        self._arrived: dict[_Key, Message] = {}
        self._taken: set[_Key] = set()
        self._expecting: dict[_Key, _Job] = {}
        self._next_in_turn: defaultdict[_Key, list[Callable[[float], None]]] = defaultdict(list)

    def begin(self, rank: int, now: float) -> None:
        if not self._left[rank]:
            self._operation._finish(rank, now)
            return
        self._network._adds(self, rank)
        self._begin_to_send(rank, now)
        for _ in range(min(self._window[rank], len(self._waiting[rank]))):
            self._step(rank, self._waiting[rank].pop(), now)

    def _begin_to_send(self, rank: int, now: float) -> None:
        """If little enough is left of the runs before it with the same moves."""
        if self._sends[rank]:
            return
        number, priority = self._operation._number, self._operation.priority
        left = sum(
            run._bytes_left[rank]
            for run in self._network._running[rank]
            if run._operation._number < number
            and run._operation.priority >= priority
            and run._program is self._program
        )
        if left <= _SEGMENTS_LEFT * self._segment:
            self._sends[rank] = True
            for send in self._held[rank]:
                send(now)
            self._held[rank] = []

    def _step(self, rank: int, job: _Job, now: float) -> None:
        """Sends what the step of a job sends; it is over when that has left and all has come."""
        step = self._lanes[rank][job.chunk][job.at]
        job.missing = 1 + len(step.sends) + len(step.receives)
        for target, turn in zip(step.sends, step.turns, strict=True):
            send = partial(self._send_or_hold, rank, partial(self._send, rank, job, step, target))
            awaited = turn and _Key(
                turn.source, rank, turn.chunk, job.segment - turn.segments_ago, step.number
            )
            if (
                awaited is None
                or awaited.segment < 0
                or awaited in self._taken
                or job.nbytes <= self._network._early_bytes(rank, self._operation.priority)
            ):
                send(now)
            else:
                self._next_in_turn[awaited].append(send)
        for source in step.receives:
            key = _Key(source, rank, job.chunk, job.segment, step.number)
            self._expecting[key] = job
            if key in self._arrived:
                self._ask_for(key, now)
        self._one_less(rank, job, now)

    def _send_or_hold(self, rank: int, send: Callable[[float], None], now: float) -> None:
        if self._sends[rank]:
            send(now)
        else:
            self._held[rank].append(send)

    def _send(self, rank: int, job: _Job, step: LaneStep, target: int, now: float) -> None:
        """Over TCP the kernel takes the message and sends it; an emulated link lets time pass, and
        the sender then copies the message to where the receiver finds it."""
        names = rank, target, job.chunk
        key = _Key(*(self._fold(*names) if self._fold else names), job.segment, step.number)
        processors, priority = self._network.processors, self._operation.priority

        def has_left(message: Message, moment: float) -> None:
            self._one_less(rank, job, moment)
            come(message, moment)

        def come(message: Message, moment: float) -> None:
            self._arrived[key] = message
            if key in self._expecting:
                self._ask_for(key, moment)

        def copy(message: Message, moment: float) -> None:
            seconds = processors.message + job.nbytes * processors.copied_byte
            through = partial(has_left, message)
            self._network.threads.work(rank, seconds, priority, moment, through)

        def give_to_kernel(moment: float) -> None:
            self._one_less(rank, job, moment)
            self._network.cards.send(key.source, key.target, job.nbytes, priority, come)

        if self._network.links.is_tcp:
            seconds = processors.tcp_message + job.nbytes * processors.tcp_byte
            seconds += self._network._wakes(job.nbytes) * processors.woken
            self._network.threads.work(rank, seconds, priority, now, give_to_kernel)
        else:
            self._network.cards.send(key.source, key.target, job.nbytes, priority, copy)

    def _ask_for(self, key: _Key, now: float) -> None:
        self._network.cards.take(self._arrived.pop(key), now, partial(self._take, key))

    def _take(self, key: _Key, now: float) -> None:
        job = self._expecting[key]
        processors = self._network.processors
        step = self._lanes[key.target][key.chunk][job.at]
        if self._network.links.is_tcp:
            seconds, per_byte = processors.tcp_message, processors.tcp_byte
        else:
            seconds, per_byte = processors.message, 0.0
        per_byte += processors.reduced_byte if step.reduces else 0.0
        if not (step.reduces or self._network.links.is_tcp) or len(step.receives) > 1:
            per_byte += processors.copied_byte  # to its place, or to where several are collected
        seconds += job.nbytes * per_byte
        self._network.threads.work(
            key.target, seconds, self._operation.priority, now, partial(self._has, key),
            self._network.polls(self._operation),
        )  # fmt: skip

    def _has(self, key: _Key, now: float) -> None:
        self._taken.add(key)
        for send in self._next_in_turn.pop(key, []):
            send(now)
        self._one_less(key.target, self._expecting.pop(key), now)

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
        self._bytes_left[rank] -= job.nbytes
        running = self._network._running[rank]
        if self._left[rank] == 0:
            running.remove(self)
            self._operation._finish(rank, now)
        if self._program.has_turns:
            for run in running:
                run._begin_to_send(rank, now)


def window_of(links: Links, rank: int, world: int, chunks: int) -> int:
    """How many segments of chunks a rank works at."""
    # Twice what is on the way: the answers of the peers take the latency as well.
    on_the_way = 2 * links.bytes_on_the_way(rank, world) * world
    nbytes = _TCP_WINDOW_BYTES if links.is_tcp else on_the_way
    return max(_LEAST_WINDOW, _WINDOW_PER_CHUNK * chunks, int(nbytes / links.segment_bytes(world)))


def segments_of(nbytes: float, segment: int) -> list[float]:
    whole, rest = divmod(nbytes, segment)
    return [float(segment)] * int(whole) + ([rest] if rest else [])
