"""Network cards: the twin of ``csrc/comm/transport/link.h``, and what real networks add to it.

A card sends one fragment after the other, each of the most urgent message that is ready, and takes
in what arrives one message after the other. A message passes the sender's card, the switches where
they carry less than all cards send, and the receiver's card; within a host, the ports of its ranks.

Over TCP, a rank gives its kernel a message before the one that leaves is gone: until it polls
again, or has a core again, there must be something to send. More urgent messages wait for that, and
at the receiver's card for all that came before them. Of an operation that is overtaken, the kernel
is given less.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from dpcore.tools.simulate.links import IDLE_SECONDS, Links, latency_of

FRAGMENT_BYTES = 256 << 10
QUEUE_SECONDS = 0.5e-3  # of what the kernel has before it has left, of all connections
LEAST_QUEUE_BYTES = 32 << 10  # of each connection
LATE_QUEUE_BYTES = 256 << 10  # of all, where a rank that has something to send waits for a core
OVERTAKEN_SHARE = 1 / 4  # of the first two

Act = Callable[[float], None]
At = Callable[[float, Act], None]


@dataclass
class Message:
    """``arrived`` is called when the last byte has come to the receiver's card."""

    source: int
    target: int
    nbytes: float
    priority: int
    arrived: Callable[[Message, float], None]
    rate: float  # bytes per second, 0: no limit
    latency: float
    is_lost: bool
    left: float  # bytes that the sender's card has not taken yet
    due: float = 0.0  # when it arrived

    def seconds(self, nbytes: float) -> float:
        return nbytes / self.rate if self.rate else 0.0


@dataclass
class _Card:
    ingress_rate: float
    ready: list[tuple[int, int, Message]] = field(default_factory=list)  # a heap, by urgency
    is_sending: bool = False
    clock: float = -math.inf  # of a shaper: when all that was sent has left at the link's rate
    asked_for: list[tuple[int, int, Message, Act]] = field(default_factory=list)  # a heap as well
    ingress_free: float = 0.0
    is_taking: bool = False


@dataclass
class _Flow:
    """The bytes between two ranks: TCP sends few of them at first."""

    sent: int = 0  # messages
    acknowledged: float = 0.0  # bytes since the begin, or a pause
    clock: float = -math.inf  # when all of them have left


class Cards:
    """The cards of all ranks, or of all hosts; of one host, if only its ``ranks`` are simulated and
    it stands for all. ``at`` calls a function when its moment has come.
    ``is_late``: ranks share cores, so they poll when they get one. ``is_overtaken``: whether a rank
    has more urgent operations in flight than one of this priority."""

    def __init__(
        self,
        links: Links,
        world: int,
        ranks: int,
        at: At,
        is_late: bool,
        is_overtaken: Callable[[int, int], bool],
    ) -> None:
        self._links = links
        self._at = at
        self._order = count()
        self._cards = [
            _Card(links.ingress_rate(rank, world) * links.goodput)
            for rank in range(links.host_of(ranks - 1) + 1)
        ]
        self._hosts = links.host_of(world - 1) + 1
        self._ports = [_Card(links.intra.bytes_per_second) for _ in range(ranks)]
        self._seeds = [links.seed(rank) for rank in range(world)]
        self._is_late = is_late
        self._is_overtaken = is_overtaken
        self._flows: defaultdict[tuple[int, int], _Flow] = defaultdict(_Flow)
        self._to_serve: list[_Card] = []  # have something ready, or have become free
        self._switch_rate = len(self._cards) * links.inter.bytes_per_second / links.oversubscribed
        self._switch_free = 0.0

    def send(
        self,
        source: int,
        target: int,
        nbytes: float,
        priority: int,
        arrived: Callable[[Message, float], None],
    ) -> None:
        """A message is ready."""
        speed = self._links.speed(source, target)
        flow = self._flows[source, target]
        latency, is_lost = latency_of(speed, self._seeds[source], source, target, flow.sent)
        flow.sent += 1
        is_within = self._links.is_within_host(source, target)
        rate = speed.bytes_per_second * (1.0 if is_within else self._links.goodput)
        message = Message(
            source, target, nbytes, priority, arrived, rate, latency, is_lost, left=nbytes
        )
        card = self._card_of(source, message)
        heapq.heappush(card.ready, (-priority, next(self._order), message))
        self._to_serve.append(card)

    def _card_of(self, rank: int, message: Message) -> _Card:
        if self._links.is_within_host(message.source, message.target):
            return self._ports[rank % len(self._ports)]
        return self._cards[self._links.host_of(rank) % len(self._cards)]

    def serve(self, now: float) -> None:
        """Lets each free card take the next fragment; to be called when all that is ready now is
        known."""
        cards, self._to_serve = self._to_serve, []
        for card in cards:
            if card.ready and not card.is_sending:
                self._take_fragment(card, now)

    def _take_fragment(self, card: _Card, now: float) -> None:
        urgency, order, message = heapq.heappop(card.ready)
        nbytes = min(message.left, FRAGMENT_BYTES)
        message.left -= nbytes
        transfer = message.seconds(nbytes) * (2 if message.is_lost else 1)
        # After a pause, a shaper lets a burst pass at once.
        card.clock = max(card.clock, now - message.seconds(self._links.burst)) + transfer
        ends = max(now, card.clock)
        card.is_sending = True
        self._at(max(now, ends - self._queue(message)), partial(self._is_free, card))
        gone = self._through_switches(message, nbytes, now, ends)
        gone = max(gone, self._ramp(message, nbytes, now))
        if message.left > 0:
            heapq.heappush(card.ready, (urgency, order, message))
        else:
            self._at(gone + message.latency, partial(self._arrive, message))

    def _queue(self, message: Message) -> float:
        """How long the kernel takes to send what it is given ahead of time, together with this."""
        if not self._links.is_tcp:
            return 0.0
        nbytes = min(LEAST_QUEUE_BYTES * (self._hosts - 1), LATE_QUEUE_BYTES)
        if self._is_overtaken(message.source, message.priority):
            return OVERTAKEN_SHARE * max(message.seconds(nbytes), QUEUE_SECONDS)
        late = message.seconds(LATE_QUEUE_BYTES) if self._is_late else 0.0
        return max(message.seconds(nbytes), QUEUE_SECONDS, late)

    def _is_free(self, card: _Card, now: float) -> None:
        card.is_sending = False
        self._to_serve.append(card)

    def _through_switches(
        self, message: Message, nbytes: float, begins: float, ends: float
    ) -> float:
        """When the last byte of a fragment is through: all cards share what the switches carry."""
        is_within = self._links.is_within_host(message.source, message.target)
        if self._links.oversubscribed == 1 or is_within or not self._switch_rate:
            return ends
        transfer = nbytes / self._switch_rate
        self._switch_free = max(self._switch_free, begins, ends - transfer) + transfer
        return max(ends, self._switch_free)

    def _ramp(self, message: Message, nbytes: float, now: float) -> float:
        """When slow start lets the last byte leave: with each acknowledged byte one more may be on
        the way, until that is what the link holds."""
        if not self._links.first_window or not message.rate:
            return now
        flow = self._flows[message.source, message.target]
        if now - flow.clock > IDLE_SECONDS:
            flow.acknowledged = 0.0
        round_trip = 2 * message.latency
        window = self._links.first_window + flow.acknowledged
        slow = min(nbytes, max(0.0, message.rate * round_trip - window))
        seconds = round_trip * math.log((window + slow) / window) + message.seconds(nbytes - slow)
        flow.acknowledged += nbytes
        flow.clock = max(flow.clock, now) + seconds
        return flow.clock

    def _arrive(self, message: Message, now: float) -> None:
        message.due = now
        message.arrived(message, now)

    def take(self, message: Message, now: float, act: Act) -> None:
        """The receiver asks for a message that has arrived: ``act`` is called when it has it."""
        card = self._card_of(message.target, message)
        if not card.ingress_rate:
            act(now)
            return
        urgency = 0 if self._links.is_tcp else -message.priority
        heapq.heappush(card.asked_for, (urgency, next(self._order), message, act))
        if not card.is_taking:
            self._take_in(card, now)

    def _take_in(self, card: _Card, now: float) -> None:
        card.is_taking = False
        while card.asked_for and card.ingress_free <= now:
            _, _, message, act = heapq.heappop(card.asked_for)
            # What a lone sender sent took the card while it came: only more than that has to wait.
            transfer = message.nbytes / card.ingress_rate
            card.ingress_free = max(card.ingress_free, message.due - transfer) + transfer
            act(now)
        if card.asked_for and not card.is_taking:
            card.is_taking = True
            self._at(card.ingress_free, partial(self._take_in, card))
