"""Which algorithm an operation runs: the twin of ``comm/schedule/cost.cpp`` and ``choice.cpp``.

A communicator's own algorithm is for the collectives that have it; for all others, and where none
is asked for, the cheapest one runs. Each algorithm of a collective has a price, fixed + bytes *
slope. A step costs the time of its way, the messages of its busiest rank, the bytes that its
busiest rank copies and adds in memory, and the time of the cards, each of which sends and takes in
one message at a time. The cheapest ordered algorithm runs, unless another one is expected to take
less than 0.8 of its time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any

from dpcore.base.own_algorithm import OwnAlgorithm, is_own
from dpcore.comm.communicators.costs import Costs, Way, over_link
from dpcore.errors import Unsupported
from dpcore.reference import Schedule, algorithms_of, make_schedule
from dpcore.tools.simulate.lanes import Lanes, lanes_of
from dpcore.tools.simulate.links import Links

DEFAULT_COSTS = Costs(Way(3e-6, 1e-6, 0.25e-9), Way(30e-6, 8e-6, 0.8e-9), 0.1e-9, "defaults")
_WORTH = 0.8
_NOISE = 1e-9  # equal prices that were summed in another order must not look different

AUTO = "auto"
Price = tuple[float, float]  # seconds: fixed, and for each byte of the whole buffer


class AlgorithmChoice:
    """Of a communicator. ``algorithm``: a name, ``auto``, or what ``own_algorithm`` takes.
    ``ranks``: how many of them are simulated, from 0 on."""

    def __init__(self, algorithm: Any, world: int, ranks: int, links: Links, costs: Costs) -> None:
        self._algorithm = algorithm
        self._world = world
        self._ranks = ranks
        self._links = links
        self._costs = costs
        self._schedules: dict[tuple[Any, str], Schedule | None] = {}
        self._lanes: dict[tuple[Any, str], Lanes] = {}

    def lanes(self, collective: str, nbytes: float, asked: Any = None) -> Lanes:
        """What each rank does in an operation. ``asked``: an algorithm for this one only."""
        algorithm = asked or self._algorithm
        if algorithm == AUTO or (asked is None and not self.has(algorithm, collective)):
            algorithm = choose(collective, nbytes, self._world, self._links, self._costs)
        schedule = self._schedule(algorithm, collective)
        if schedule is None:
            raise Unsupported(f"{collective} has no algorithm {algorithm!r}")
        key = algorithm, collective
        if key not in self._lanes:
            self._lanes[key] = lanes_of(schedule, self._links.is_tcp, self._ranks)
        return self._lanes[key]

    def has(self, algorithm: Any, collective: str) -> bool:
        """Whether an algorithm other than ``auto`` is for this collective."""
        return self._schedule(algorithm, collective) is not None

    def _schedule(self, algorithm: Any, collective: str) -> Schedule | None:
        """None where the collective has no such algorithm."""
        key = algorithm, collective
        if key not in self._schedules:
            self._schedules[key] = self._made(algorithm, collective)
        return self._schedules[key]

    def _made(self, algorithm: Any, collective: str) -> Schedule | None:
        if is_own(algorithm):
            own = OwnAlgorithm(algorithm).schedule(self._world, None)
            return own if own.collective == collective else None
        name = algorithm.removesuffix("/moves")
        if name not in algorithms_of(collective):
            return None
        hosts = self._links.hosts(self._world)
        return make_schedule(name, collective, self._world, hosts=hosts)


def choose(
    collective: str, nbytes: float, world: int, links: Links, costs: Costs = DEFAULT_COSTS
) -> str:
    """
    >>> from dpcore.base.link import Speed
    >>> link = Links.of(Speed(1.25e8, 50e-6))
    >>> choose("all_reduce", 1000, 2, link), choose("all_reduce", 10_000_000, 2, link)
    ('one_shot', 'two_shot')
    """
    if links.is_posted(nbytes, world):
        return "one_shot" if collective == "all_reduce" else "direct"
    best, best_seconds = "", 0.0
    # Over a real network a communicator knows what was calibrated, and not how fast a link is.
    known = costs if links.is_tcp else over_link(costs, links.speed(0, 1))
    prices = _prices(collective, tuple(links.hosts(world)), known)
    for name, is_ordered, (fixed, per_byte) in sorted(prices, key=lambda one: not one[1]):
        seconds = fixed + per_byte * nbytes
        if not best or seconds < best_seconds * (1 - _NOISE if is_ordered else _WORTH):
            best, best_seconds = name, seconds
    return best


@lru_cache(maxsize=64)
def _prices(
    collective: str, hosts: tuple[int, ...], costs: Costs
) -> tuple[tuple[str, bool, Price], ...]:
    found = []
    for name in algorithms_of(collective):
        schedule = make_schedule(name, collective, len(hosts), hosts=hosts)
        found.append((name, schedule.ordered, price_of(schedule, hosts, costs)))
    return tuple(found)


def price_of(schedule: Schedule, hosts: Sequence[int], costs: Costs) -> Price:
    """What a schedule is expected to take."""
    fixed = per_byte = 0.0
    for _, moves in groupby(schedule.moves, key=lambda move: move.step):
        step = 0.0
        share = 1 / schedule.chunks
        messages: defaultdict[int, float] = defaultdict(float)  # seconds, by rank
        in_memory: defaultdict[int, float] = defaultdict(float)  # seconds per byte, by rank
        sent: defaultdict[int, int] = defaultdict(int)  # between hosts, by rank
        transfers = []
        for move in moves:
            is_remote = hosts[move.src] != hosts[move.dst]
            way = costs.network if is_remote else costs.memory
            step = max(step, way.step)
            for rank in (move.src, move.dst):
                messages[rank] += way.message
                in_memory[rank] += 0.0 if is_remote else share * way.byte
            in_memory[move.dst] += share * costs.added_byte if move.reduce else 0.0
            if is_remote:
                transfers.append((sent[move.src], hosts[move.src], hosts[move.dst]))
                sent[move.src] += 1
        fixed += step + max(messages.values())
        per_byte += max(in_memory.values())
        per_byte += _messages_of_cards(transfers) * share * costs.network.byte
    return fixed, per_byte


def _messages_of_cards(transfers: list[tuple[int, int, int]]) -> float:
    """For how many messages the last card is busy: each sends what its ranks hand it in turns, and
    takes in one message after the other."""
    sends_until: defaultdict[int, int] = defaultdict(int)
    takes_until: defaultdict[int, int] = defaultdict(int)
    arrivals = []
    for _, source, target in sorted(transfers, key=lambda transfer: transfer[0]):
        sends_until[source] += 1
        arrivals.append((sends_until[source], target))
    last = 0
    for moment, target in sorted(arrivals, key=lambda arrival: arrival[0]):
        takes_until[target] = max(takes_until[target], moment - 1) + 1
        last = max(last, takes_until[target])
    return last
