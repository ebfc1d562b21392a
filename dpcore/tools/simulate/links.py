"""What connects the ranks: one speed, a speed per pair, or hosts whose ranks share a card.

    Links.of(Speed(1.25e8, 50e-6))        a card for each rank, as on an emulated link
    Links.of_text("file:links.txt", 4)    the same with a speed for each pair
    Links.levels(intra, inter, 8, 4)      eight ranks on a host and a card for all of them, under
                                          switches that carry a quarter of what all cards send

A message within a host passes the sender's own port at the speed ``intra``; between hosts it passes
the host's card at ``inter``. What several send at once, they share.

The last four fields are what TCP and a shaper do over a real network; an emulated link has none of
it.
``draw`` is the twin of the function in ``csrc/comm/transport/link.cpp``.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

from dpcore.base.link import Speed, speeds
from dpcore.errors import Unsupported

ETHERNET_GOODPUT = 1448 / 1514  # of 1514 bytes on the wire, TCP with timestamps carries 1448
FIRST_WINDOW = 10 * 1448  # bytes that Linux sends before the first acknowledgement
IDLE_SECONDS = 0.2  # after which Linux begins with the first window again, or later

JITTER, LOSS = 1, 2
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Links:
    """The links of a job.

    ``oversubscribed``: what all cards could send together is so many times what the switches carry.
    ``pairs``: the speed by sender and receiver, in place of ``inter``. ``goodput``: the share of
    the bandwidth that payload gets. ``first_window``: bytes on the way at the begin and after a
    pause, doubled with each round trip; 0 for no such ramp. ``burst``: bytes that a shaped link
    sends at once after a pause. ``is_tcp``: whether messages are cut, and take turns, as over TCP.
    """

    inter: Speed
    intra: Speed = Speed()  # noqa: RUF009
    ranks_per_host: int = 1
    oversubscribed: float = 1.0
    pairs: tuple[tuple[Speed, ...], ...] = ()
    goodput: float = 1.0
    first_window: int = 0
    burst: int = 0
    is_tcp: bool = False

    def __post_init__(self) -> None:
        for name, value, least in (
            ("ranks_per_host", self.ranks_per_host, 1),
            ("oversubscribed", self.oversubscribed, 1.0),
        ):
            if not least <= value < math.inf:
                raise Unsupported(f"{name}={value}: it is a number from 1 on")
        if not 0 < self.goodput <= 1:
            raise Unsupported(f"goodput={self.goodput}: it is a share, more than 0 and at most 1")

    @classmethod
    def of(cls, link: Speed | Links) -> Links:
        """
        >>> Links.of(Speed(1.25e8)).speed(0, 1).bytes_per_second
        125000000.0
        """
        return link if isinstance(link, Links) else cls(link)

    @classmethod
    def of_text(cls, text: str, world: int) -> Links:
        """From the words of ``link=``, which may name a file with a line per pair of ranks."""
        table = tuple(map(tuple, speeds(text, world)))
        return cls(table[0][0], pairs=table) if text.startswith("file:") else cls(table[0][0])

    @classmethod
    def levels(
        cls, intra: Speed, inter: Speed, ranks_per_host: int, oversubscribed: float = 1.0
    ) -> Links:
        """
        >>> links = Links.levels(Speed(6e9, 2e-6), Speed(1.25e8, 50e-6), ranks_per_host=8)
        >>> links.speed(0, 7).latency, links.speed(0, 8).latency
        (2e-06, 5e-05)
        """
        return cls(inter, intra, ranks_per_host, oversubscribed)

    @classmethod
    def tcp(cls, speed: Speed, burst: int = 0, first_window: int = FIRST_WINDOW) -> Links:
        """A real Ethernet link of this bandwidth, or one that the kernel shapes to it (tc's tbf has
        a ``burst``): headers take a part of it, and connections begin slowly.

        >>> round(Links.tcp(Speed(1.25e8, 50e-6)).goodput, 3)
        0.956
        """
        return cls(
            speed, goodput=ETHERNET_GOODPUT, first_window=first_window, burst=burst, is_tcp=True
        )

    @classmethod
    def memory(cls) -> Links:
        """No link at all: the ranks of one host, which share memory.

        >>> Links.memory().is_memory(8)
        True
        """
        return cls(Speed(), ranks_per_host=sys.maxsize)

    def is_memory(self, world: int) -> bool:
        """Whether all ranks share memory, which has no speed of its own here."""
        return self.host_of(world - 1) == 0 and self.intra == Speed()

    def host_of(self, rank: int) -> int:
        return rank // self.ranks_per_host

    def hosts(self, world: int) -> list[int]:
        """The host of each rank."""
        return [self.host_of(rank) for rank in range(world)]

    def is_within_host(self, source: int, target: int) -> bool:
        return self.host_of(source) == self.host_of(target)

    def speed(self, source: int, target: int) -> Speed:
        """Of the way from one rank to another. A bandwidth of 0 means no limit."""
        if self.pairs:
            return self.pairs[source][target]
        return self.intra if self.is_within_host(source, target) else self.inter

    def entry_latency(self, rank: int, world: int) -> float:
        """How long this rank waits for the word of the last one that enters an operation."""
        if self.pairs:
            return max((self.pairs[rank][r].latency for r in range(world) if r != rank), default=0)
        return (self.intra if self.host_of(world - 1) == 0 else self.inter).latency

    def bytes_on_the_way(self, rank: int, world: int) -> float:
        """What the longest link of a rank holds when it is busy."""
        if self.pairs:
            of = [self.pairs[rank][r] for r in range(world) if r != rank]
        else:
            of = [self.inter, self.intra]
        return max((speed.bytes_per_second * speed.latency for speed in of), default=0.0)

    def ingress_rate(self, rank: int, world: int) -> float:
        """Bytes per second that arrive at a card at most: whatever any sender may send."""
        if not self.pairs:
            return self.inter.bytes_per_second
        towards = [self.pairs[r][rank].bytes_per_second for r in range(world) if r != rank]
        return max(towards) if all(towards) else 0.0

    def segment_bytes(self, world: int) -> int:
        """What large messages are cut into."""
        if not self.is_tcp:
            return 64 << 10
        return max((256 << 10) // world // 4096 * 4096, 32 << 10)

    def frame_bytes(self, world: int) -> int:
        """How much of a message a rank gives its kernel at a time."""
        peers = max(1, world - self.ranks_per_host)
        return max((128 << 10) // peers // 4096 * 4096, 32 << 10)

    def is_posted(self, nbytes: float, world: int) -> bool:
        """Whether data is so little that it travels with the word that a rank has entered."""
        return self.is_tcp and nbytes <= (64 if world == 2 else 16) << 10

    def least_seconds(self, nbytes: int, world: int) -> float:
        """No all-reduce takes less: its bytes, over all cards and what the switches carry of them.

        >>> Links.of(Speed(1.25e8)).least_seconds(1_250_000, 2)
        0.01
        """
        hosts = self.host_of(world - 1) + 1
        if hosts == 1:
            return 0.0
        if self.pairs:
            rates = [
                max(own[:rank] + own[rank + 1 :], key=lambda to: to.bytes_per_second or math.inf)
                for rank, own in enumerate(self.pairs)
            ]
            rate = sum(to.bytes_per_second or math.inf for to in rates)
        else:
            rate = hosts * (self.inter.bytes_per_second or math.inf)
        least = min(
            (to for own in self.pairs for to in own), key=_least_latency, default=self.inter
        )
        share = rate * self.goodput / self.oversubscribed
        return _least_latency(least) + 2 * (hosts - 1) * nbytes / share

    def seed(self, rank: int) -> int:
        """Of this rank's random latencies and losses."""
        return (self.pairs[rank][rank] if self.pairs else self.inter).seed


def _least_latency(speed: Speed) -> float:
    return max(0.0, speed.latency - speed.jitter)


def draw(seed: int, source: int, target: int, number: int, purpose: int) -> float:
    """An even number in [0, 1) for the message with this number between two ranks.

    >>> round(draw(3, 0, 1, 0, JITTER), 6), round(draw(3, 0, 1, 0, LOSS), 6)
    (0.242952, 0.482345)
    """
    x = seed
    for part in (source << 32 | target, number, purpose):
        x = (x + part + 0x9E3779B97F4A7C15) & _MASK
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
        x ^= x >> 31
    return (x >> 11) * 2.0**-53


def latency_of(
    speed: Speed, seed: int, source: int, target: int, number: int
) -> tuple[float, bool]:
    """The latency of the message with this number, and whether it is lost once: then it takes the
    link twice and a round trip more."""
    latency = speed.latency
    if speed.jitter:
        latency += speed.jitter * (2 * draw(seed, source, target, number, JITTER) - 1)
    is_lost = speed.loss > 0 and draw(seed, source, target, number, LOSS) < speed.loss
    return max(0.0, latency + (2 * speed.latency if is_lost else 0.0)), is_lost
