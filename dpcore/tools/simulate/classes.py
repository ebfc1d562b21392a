"""One rank that stands for all: thousands of ranks at the price of one.

In a symmetric algorithm all ranks do the same at the same time, each with its own neighbours. If
their work and their links are equal, too, then what rank 0 sends to its right arrives there just
when what its left neighbour has sent arrives at rank 0. So one rank is simulated, and *what it
sends stands for what it receives*.

It does not follow chunks from rank to rank, either. Each segment of all chunks passes *rounds*: so
many messages, which leave one after the other, and the next round begins when they have arrived. A
ring of N ranks has 2 (N-1) rounds of one message, a two-shot two of N-1 (``SHAPES``). The card
takes the messages of the most urgent operation first, and of those the one that was ready first, as
in ``cards``; a rank works at a window of chunks, as in ``network``; its threads are those of
``processors``, with its share of the cores.

Where thousands of rounds repeat, whole periods are passed over at once (``_Periods``). That changes
no result: times inside are whole picoseconds, so that two moments can be compared.

Ranks do not do the same in a tree, where worlds that are no power of two fold, over links that
differ or vary, or if one computes longer than another: ``stands_for_all``. On hosts of several
ranks, those of one host stand for all, each of them simulated: ``one_host_stands_for_all``.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, count, pairwise
from typing import Any

from dpcore.base.link import Speed
from dpcore.errors import Unsupported
from dpcore.tools.simulate.gradients import Gradients
from dpcore.tools.simulate.links import Links
from dpcore.tools.simulate.network import SLOTS, NetworkOperation, segments_of, window_of
from dpcore.tools.simulate.processors import Processors, Threads
from dpcore.tools.simulate.shapes import Shape, fold_of, in_trains, shape_of

_PS = 1e12


_FEW, MANY, MANY_ON_HOSTS = 8, 64, 1024  # ranks
_PARTS = 16  # in which a round is followed where each message has a consequence of its own


def stands_for_all(work: Gradients, links: Links, algorithm: Any) -> bool:
    """Whether one rank can; a few ranks are simulated each, which takes no longer."""
    if work.world <= _FEW or not isinstance(algorithm, str):
        return False
    if shape_of("all_reduce", algorithm, work.world) is None:
        return False
    # Beside other operations its ranks differ, since each sends another half first.
    if algorithm == "halving_doubling" and work.world <= MANY:
        return False
    link = links.inter
    one_level = not links.pairs and links.ranks_per_host == 1 and links.oversubscribed == 1
    if not one_level or link.jitter or link.loss or links.is_tcp or links.first_window:
        return False
    return _compute_alike(work)


def one_host_stands_for_all(
    work: Gradients,
    links: Links,
    algorithm: Any,
    processors: Processors = Processors.free(),  # noqa: B008
) -> bool:
    """Whether one host can, of which every rank is simulated; a card for each rank is a host."""
    if work.world <= _FEW or not isinstance(algorithm, str) or links.pairs:
        return False
    own = links.ranks_per_host
    if own >= work.world or processors.ranks not in (0, own):
        return False
    if fold_of("all_reduce", algorithm, work.world, links) is None:
        return False
    varies = any(link.jitter or link.loss for link in (links.inter, links.intra))
    return not varies and _compute_alike(work)


def _compute_alike(work: Gradients) -> bool:
    times = (work.forward, work.backward, work.update, work.busy, work.ready, work.begins)
    return all(one is each[0] or one == each[0] for each in times for one in each)


class _Segment:
    """A segment of all chunks, on its way through the rounds. ``opened``, ``sent`` and ``arrived``:
    messages by round, of those that may be sent, wait for the card or have left, and are there."""

    __slots__ = ("arrived", "done", "first", "nbytes", "opened", "running", "sent", "transfer")

    def __init__(self, running: _Running, first: int, nbytes: float, transfer: int) -> None:
        rounds = running.shape.rounds
        self.running = running
        self.first = first  # chunks of segments that go before
        self.nbytes = nbytes  # of a message
        self.transfer = transfer
        self.done = 0  # of the ``times`` of the round that it is in
        self.opened = [rounds[0].messages] + [0] * (len(rounds) - 1)
        self.sent = [0] * len(rounds)
        self.arrived = [0] * len(rounds)


class _Running:
    """An operation on its way. A rank works at a ``window`` of chunks of segments at a time; where
    they are more, messages are followed one by one, since each may let in another one."""

    __slots__ = ("ended", "held", "operation", "shape", "unasked", "under_way", "urgency", "window")

    def __init__(
        self, operation: NetworkOperation, shape: Shape, window: int, sizes: Sequence[float],
        rate: float,
    ) -> None:  # fmt: skip
        self.operation = operation
        self.shape = shape
        self.window = window
        self.urgency = -operation.priority
        self.ended = 0  # chunks of segments
        self.under_way = [
            _Segment(self, n * shape.chunks, size, round(size / rate * _PS) if rate else 0)
            for n, size in enumerate(sizes)
        ]
        # Segments that wait for the window, each with its round; None if the window has all.
        self.held: list[tuple[_Segment, int]] | None = None
        self.unasked: list[_Arrival] = []  # has come for chunks that wait for the window
        if len(sizes) * shape.chunks > window:
            self.held = []

    def within_window(self, segment: _Segment, at: int) -> int:
        """How many messages of a round may leave as far as the window goes."""
        messages = self.shape.rounds[at].messages
        begun = self.window + self.ended - segment.first
        if self.held is None or begun >= self.shape.chunks:
            return messages
        return max(0, min(messages, begun - self.shape.before[at] - segment.done))

    def is_asked_for(self, segment: _Segment, at: int) -> bool:
        """Whether the window has the chunk that a message of a round is for."""
        chunks, rounds = self.shape.chunks, self.shape.rounds[at]
        begun = self.window + self.ended - segment.first
        if self.held is None or begun >= chunks:
            return True
        next_one = self.shape.before[at] + (segment.done + 1) * rounds.messages
        return not rounds.collects and begun > next_one + segment.arrived[at]


# What waits for a card: urgency, order, segment, its round, messages.
_Piece = tuple[int, int, _Segment, int, int]


_Arrival = tuple[int, int, _Segment, int, int]  # moment, order, segment, its round, messages
# What happened: a moment, how many messages left (0: they arrived), segment, its round.
_Note = tuple[int, int, _Segment | None, int]
_Event = tuple[int, int, int, float, Callable[[float], None]]
_MOST_TURNS = 4  # of a segment, in a period


class _Card:
    __slots__ = ("busy", "ends", "piece", "since", "waiting")

    def __init__(self) -> None:
        self.waiting: list[_Piece] = []  # a heap
        self.piece: _Piece | None = None  # that passes it
        self.since = 0
        self.ends = 0


class RepresentativeNetwork:
    """As ``Network``, with one rank for a ``world`` of equal ones."""

    def __init__(
        self,
        world: int,
        link: Speed | Links,
        algorithm: str = "two_shot",
        processors: Processors = Processors.free(),  # noqa: B008
    ) -> None:
        self.world = world
        self.ranks = 1
        self.links = Links.of(link)
        self.algorithm = algorithm
        self.processors = processors
        self._is_free = processors.is_free
        self._latency = round(self.links.inter.latency * _PS)
        self._card = _Card()
        self._queue: list[_Event] = []  # a heap
        self._flying: list[_Arrival] = []  # a heap
        self._asked_for: list[tuple[int, int, _Arrival]] = []  # has come, by urgency: a heap
        self._ingress_free = 0
        self._order = count()
        self._periods = _Periods()
        self._launched = deque[NetworkOperation](maxlen=SLOTS)
        # Its share of the cores: what its threads do, those of the other ranks do as well.
        together = processors.ranks or self.links.ranks_per_host
        share = replace(processors, cores=processors.cores / together, ranks=1)
        self._threads = Threads(share, 1, 1, self.at)

    def run(self, operations: Sequence[NetworkOperation]) -> None:
        for operation in operations:
            self.at(max(operation.launched), partial(self.launch, operation, 0))
        self.go_on()

    def launch(self, operation: NetworkOperation, rank: int, now: float) -> None:
        """All ranks call it. It begins a latency later; with one rank, at once."""
        earlier = self._launched
        enter = partial(self._enter, operation)
        if len(earlier) == SLOTS and not earlier[0].is_finished(0):
            earlier[0]._followers.append(enter)
        else:
            enter(now)
        earlier.append(operation)

    def _enter(self, operation: NetworkOperation, now: float) -> None:
        operation.finished = [now]
        if self.world == 1:
            self.at(now, partial(operation._finish, 0))
            return
        priority = operation.priority
        wakes = partial(self._threads.work, 0, 0.0, priority, act=partial(self._begin, operation))

        def entered(moment: float) -> None:
            self._at(moment + self.links.entry_latency(0, self.world), priority, wakes)

        seconds = self.processors.operation
        self._threads.work(0, seconds, priority, now, entered, not operation.background)

    def at(self, moment: float, act: Callable[[float], None]) -> None:
        """Calls ``act`` with the moment when it has come."""
        self._at(moment, 0, act)

    def compute(
        self, rank: int, seconds: float, now: float, act: Callable[[float], None], busy: float = 1.0
    ) -> None:
        """Calls ``act`` with the moment when the program has computed for so long, alone."""
        self._threads.compute(rank, seconds, busy, now, act)

    def _at(self, moment: float, priority: int, act: Callable[[float], None]) -> None:
        entry = (round(moment * _PS), -priority, next(self._order), moment, act)
        heapq.heappush(self._queue, entry)

    def go_on(self) -> None:
        """Until nothing is left to happen."""
        queue, flying, card = self._queue, self._flying, self._card
        never = 1 << 62
        while True:
            now = min(
                queue[0][0] if queue else never,
                flying[0][0] if flying else never,
                card.ends if card.piece else never,
                max(self._ingress_free, 0) if self._asked_for else never,
            )
            if now == never:
                return
            if card.piece and card.ends == now:
                self._left(card, now)
            while flying and flying[0][0] == now:
                self._come(heapq.heappop(flying), now)
            self._take_in(now)
            while queue and queue[0][0] == now:
                _, _, _, moment, act = heapq.heappop(queue)
                act(moment)
            self._serve(card, now)

    # -- operations ------------------------------------------------------------------------------

    def _begin(self, operation: NetworkOperation, moment: float) -> None:
        algorithm = operation.algorithm or self.algorithm
        shape = shape_of(operation.collective, algorithm, self.world)
        if shape is None and operation.collective != "all_reduce" and not operation.algorithm:
            algorithm = "direct"  # the cheapest of the halves, as the engine chooses
            shape = shape_of(operation.collective, algorithm, self.world)
        if shape is None:
            raise Unsupported(
                f"{operation.collective} by {algorithm} of {self.world} ranks: they do different "
                "things, so one cannot stand for all"
            )
        rate = self.links.inter.bytes_per_second
        window = window_of(self.links, 0, self.world, shape.chunks)
        parts = segments_of(operation.nbytes / shape.chunks, self.links.segment_bytes(self.world))
        if self._is_free and len(parts) <= window:
            shape, parts = in_trains(shape, parts)
        running = _Running(operation, shape, window, parts, rate)
        self._periods.forget()
        if not parts:
            operation._finish(0, moment)
        for segment in list(running.under_way):
            self._send(segment, 0, round(moment * _PS))

    def _send(self, segment: _Segment, at: int, now: int) -> None:
        """What is open of a round waits for the card, as far as the window allows."""
        running = segment.running
        rounds = running.shape.rounds[at]
        allowed = min(segment.opened[at], running.within_window(segment, at))
        left = allowed - segment.sent[at]
        segment.sent[at] += left
        part = max(1, left)
        if running.held is not None:
            part = 1
            if allowed < segment.opened[at]:
                running.held.append((segment, at))
        elif rounds.opens or not self._is_free:
            part = max(1, rounds.messages // _PARTS)
        card = self._card
        if left and card.piece and card.ends > now and card.piece[0] > running.urgency:
            self._make_way(card, now)
        while left > 0:
            messages = min(part, left)
            left -= messages
            piece = (running.urgency, next(self._order), segment, at, messages)
            heapq.heappush(card.waiting, piece)

    def _let_in(self, running: _Running, now: int) -> None:
        """What the window has held, as far as it allows now."""
        if running.held:
            held, running.held = running.held, []
            for segment, at in held:
                self._send(segment, at, now)
        if running.unasked:
            unasked, running.unasked = running.unasked, []
            for arrival in unasked:
                self._ask_for(arrival, now)

    def _make_way(self, card: _Card, now: int) -> None:
        """For what is more urgent: the message that passes the card is the last one for now."""
        assert card.piece
        urgency, order, segment, at, messages = card.piece
        if segment.transfer:
            gone = max(1, -((card.since - now) // segment.transfer))
            if gone < messages:
                card.piece = (urgency, order, segment, at, gone)
                card.ends = card.since + gone * segment.transfer
                heapq.heappush(card.waiting, (urgency, order, segment, at, messages - gone))

    def _serve(self, card: _Card, now: int) -> None:
        """Lets the card take what is most urgent, if it is free."""
        if card.piece or not card.waiting:
            return
        card.since = self._periods.after(now, card.waiting[0][2], self._flying, self._queue)
        card.piece = piece = heapq.heappop(card.waiting)
        card.ends = card.since + piece[4] * piece[2].transfer

    def _left(self, card: _Card, now: int) -> None:
        assert card.piece
        _, _, segment, at, messages = card.piece
        card.piece = None
        self._periods.note(now, messages, segment, at)
        arrival = (now + self._latency, next(self._order), segment, at, messages)
        heapq.heappush(self._flying, arrival)

    def _come(self, arrival: _Arrival, now: int) -> None:
        """A message has arrived, and another one where the representative's has: it copies it."""
        if self._is_free:
            self._ask_for(arrival, now)
            return
        _, _, segment, _, messages = arrival
        seconds = self.processors.message + segment.nbytes * self.processors.copied_byte
        self._threads.work(
            0, messages * seconds, -segment.running.urgency, now / _PS,
            lambda moment: self._ask_for(arrival, round(moment * _PS)),
        )  # fmt: skip

    def _ask_for(self, arrival: _Arrival, now: int) -> None:
        """The card takes a message in when the rank works at its chunk; the time that this takes
        counts from its arrival, or from the end of what the card takes in before."""
        _, _, segment, at, _ = arrival
        running = segment.running
        if running.is_asked_for(segment, at):
            heapq.heappush(self._asked_for, (running.urgency, next(self._order), arrival))
            self._take_in(now)
        else:
            running.unasked.append(arrival)

    def _take_in(self, now: int) -> None:
        while self._asked_for and self._ingress_free <= now:
            _, _, (due, _, segment, at, messages) = heapq.heappop(self._asked_for)
            transfer = messages * segment.transfer
            self._ingress_free = max(self._ingress_free, due - transfer) + transfer
            self._take(segment, at, messages, now)

    def _take(self, segment: _Segment, at: int, messages: int, now: int) -> None:
        processors, rounds = self.processors, segment.running.shape.rounds[at]
        if self._is_free:
            self._arrive(segment, at, messages, now)
            return
        per_byte = processors.reduced_byte if rounds.adds else processors.copied_byte
        if rounds.adds and rounds.collects and rounds.messages > 1:
            per_byte += processors.copied_byte
        seconds = processors.message + segment.nbytes * per_byte
        self._threads.work(
            0, messages * seconds, -segment.running.urgency, now / _PS,
            lambda moment: self._arrive(segment, at, messages, round(moment * _PS)),
        )  # fmt: skip

    def _arrive(self, segment: _Segment, at: int, messages: int, now: int) -> None:
        self._periods.note(now, 0, segment, at)
        running = segment.running
        rounds = running.shape.rounds[at]
        segment.arrived[at] += messages
        if rounds.ends:
            running.ended += messages * rounds.ends
            self._let_in(running, now)
        if rounds.opens:
            most = running.shape.rounds[at + 1].messages
            segment.opened[at + 1] = min(most, segment.opened[at + 1] + messages * rounds.opens)
            self._send(segment, at + 1, now)
        elif segment.arrived[at] == rounds.messages:
            self._next_round(segment, at, now)

    def _next_round(self, segment: _Segment, at: int, now: int) -> None:
        running = segment.running
        segment.done += 1
        if segment.done == running.shape.rounds[at].times:
            self._periods.forget()
            at += 1
            segment.done = 0
        if at < len(running.shape.rounds):
            segment.arrived[at] = segment.sent[at] = 0
            segment.opened[at] = running.shape.rounds[at].messages
            self._send(segment, at, now)
            return
        running.ended += running.shape.ends_at_last
        self._let_in(running, now)
        running.under_way.remove(segment)
        if not running.under_way:
            running.operation._finish(0, now / _PS)


class _Periods:
    """Passes over what repeats. Each time the same segment is about to leave, what has left and
    arrived is compared with what did before that. If it was the same in the same order, and

    * every event has come equally much later: the state is the one of that time, and comes again;
    * or each has come as much later as the time before: operations of different sizes drift towards
      each other, and do so until two events would change places.

    It ends when a segment is through with its rounds, or something else happens."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self._anchor: _Segment | None = None  # its turn ends a log and begins another one
        self._log: list[_Note] = []
        self._logs: list[list[_Note]] = []  # those before
        self._later: list[int] = []  # by event of the last log, than in the one before

    def note(self, now: int, messages: int, segment: _Segment, at: int) -> None:
        self._log.append((now, messages, segment, at))

    def after(
        self, now: int, following: _Segment, flying: list[_Arrival], queue: Sequence[_Event]
    ) -> int:
        """The moment after all that can be passed over; ``following`` is the next to leave."""
        if following is not self._anchor:
            if self._anchor is None or len(self._log) > 4 * len(flying) + 16:  # it has no turn
                self.forget()
                self._anchor = following
            return now
        self._log.append((now, 0, None, 0))
        self._logs = [*self._logs[1 - 2 * _MOST_TURNS :], self._log]
        self._log = []
        log, later = self._period()
        arrivals = [(segment, at) for _, messages, segment, at in log if segment and not messages]
        if not log or not {arrival[2:4] for arrival in flying} <= set(arrivals):
            return now
        times = self._times(log, later, arrivals, queue)
        if times <= 0:
            return now
        first: dict[_Segment, int] = {}
        for (_, messages, segment, _), step in zip(log, later, strict=True):
            if segment and not messages:
                segment.done += times
                first.setdefault(segment, step)
        flying[:] = [(m + times * first[s], order, s, at, n) for m, order, s, at, n in flying]
        heapq.heapify(flying)
        self._logs = [
            [
                (moment + times * step, messages, segment, at)
                for (moment, messages, segment, at), step in zip(log, later, strict=True)
            ]
        ]
        return now + times * later[-1]

    def _period(self) -> tuple[list[_Note], list[int]]:
        """What will come again, and by how much later each event of it; empty if nothing will."""
        logs, before = self._logs, self._later
        for turns in range(1, 1 + len(logs) // 2):
            latest, earlier = logs[-turns:], logs[-2 * turns : -turns]
            if [*map(len, latest)] != [*map(len, earlier)]:
                continue
            log = list(chain(*latest))
            pairs = list(zip(log, chain(*earlier), strict=True))
            if any(one[1:] != other[1:] for one, other in pairs):
                continue
            later = [one[0] - other[0] for one, other in pairs]
            if turns == 1:
                self._later = later
            if len(set(later)) == 1 or later == before:
                return log, later
        return [], []

    @staticmethod
    def _times(
        log: Sequence[_Note],
        later: Sequence[int],
        arrivals: Sequence[tuple[_Segment, int]],
        queue: Sequence[_Event],
    ) -> int:
        """How many more periods are like this one."""
        now, period = log[-1][0], later[-1]
        times = [(queue[0][0] - now - 1) // period] if queue else []
        if any(segment and segment.running.held is not None for _, _, segment, _ in log):
            return 0
        for (segment, at), moved in Counter(arrivals).items():
            rounds = segment.running.shape.rounds[at]
            times.append((rounds.times - 1 - segment.done) // moved)
        moments = [event[0] for event in log] + [log[0][0] + later[0]]
        steps = [*later, later[0]]
        for gap, closes in zip(_differences(moments), _differences(steps), strict=True):
            if closes < 0:
                times.append(gap // -closes - 1)
        return min(times, default=0)


def _differences(values: Sequence[int]) -> list[int]:
    return [after - before for before, after in pairwise(values)]
