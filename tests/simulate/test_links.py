"""The simulator's cards: equal to the emulated link's, and shared as hosts and switches share."""

import random
from functools import partial
from itertools import pairwise

import pytest

from dpcore import _C
from dpcore.base.link import Speed
from dpcore.errors import Unsupported
from dpcore.tools.simulate import Links, Network, NetworkOperation
from dpcore.tools.simulate.links import FIRST_WINDOW, JITTER, draw

GBIT = Speed(1.25e8, 50e-6)
MB = 1_000_000


def arrivals(links, messages, world=4):
    """When each (moment, source, target, bytes, priority) has come to the receiver's card."""
    network = Network(world, links)
    came = {}

    def send(number, now):
        _, source, target, nbytes, priority = messages[number]
        network.cards.send(
            source, target, nbytes, priority, lambda message, moment: came.update({number: moment})
        )

    for number, message in enumerate(messages):
        network.at(message[0], partial(send, number))
    network.go_on()
    return [came[number] for number in range(len(messages))]


def arrivals_of_core(speed, messages, world=4):
    """The same of ``link.cpp``."""
    to = [(speed.bytes_per_second, speed.latency, speed.jitter, speed.loss)] * world
    cards = [_C.Link(rank, to, speed.bytes_per_second, speed.seed) for rank in range(world)]
    tickets = []
    for moment, source, target, nbytes, priority in messages:
        ticket = cards[source].send(target, nbytes, priority, round(moment * 1e9))
        tickets.append((cards[source], ticket))
    return [card.arrival(ticket, 10**12) * 1e-9 for card, ticket in tickets]


@pytest.mark.parametrize("seed", [0, 7, 1 << 52])
@pytest.mark.parametrize("words", ["", "jitter", "loss", "both"])
def test_messages_arrive_when_the_core_says(words, seed):
    """Of all sizes and priorities, ready at any moment. The core counts in nanoseconds, and rounds
    each fragment's."""
    of = random.Random(seed)
    jitter = 40e-6 if words in ("jitter", "both") else 0.0
    speed = Speed(1.25e8, 50e-6, jitter, 0.3 if words in ("loss", "both") else 0.0, seed)
    messages = [
        (
            of.randrange(10_000_000) * 1e-9,
            *of.sample(range(4), 2),
            of.choice([1, 1500, 65536, 300_000, 1_000_000]),
            of.randrange(3),
        )
        for _ in range(60)
    ]
    messages.sort()
    assert arrivals(Links.of(speed), messages) == pytest.approx(
        arrivals_of_core(speed, messages), abs=2e-7
    )


def test_latencies_are_drawn_from_seed_pair_and_number():
    """Alone on the card, a message tells what was drawn for it."""
    for seed, source, target in ((0, 0, 1), (3, 2, 0), (1 << 52, 1, 3)):
        speed = Speed(0.0, 1e-3, 1e-3, 0.0, seed)
        messages = [(number * 1.0, source, target, 100, 0) for number in range(20)]
        for number, arrival in enumerate(arrivals_of_core(speed, messages)):
            drawn = 2e-3 * draw(seed, source, target, number, JITTER)
            assert arrival - number == pytest.approx(drawn, abs=2e-9)


def test_a_file_of_links_has_a_speed_for_each_pair(tmp_path):
    path = tmp_path / "links.txt"
    path.write_text("* -> *: 1gbit,1ms\n0 -> 1: 100mbit,2ms\n")
    links = Links.of_text(f"file:{path}", 3)
    assert arrivals(links, [(0.0, 0, 1, MB, 0), (0.0, 1, 0, MB, 0)], 3) == pytest.approx(
        [0.082, 0.009]
    )
    assert (links.entry_latency(0, 3), links.entry_latency(1, 3)) == (2e-3, 1e-3)
    assert Links.of_text("1gbit", 3) == Links.of(Speed(1.25e8))


def test_ranks_of_a_host_share_its_card():
    levels = Links.levels(Speed(1.25e9), GBIT, ranks_per_host=2)
    within, first, second = arrivals(
        levels, [(0.0, 0, 1, MB, 0), (0.0, 0, 2, MB, 0), (0.0, 1, 3, MB, 0)]
    )
    assert within == pytest.approx(0.8e-3)  # on a port of its own
    assert max(first, second) == pytest.approx(16e-3 + 50e-6)
    apart = arrivals(Links.of(GBIT), [(0.0, 0, 2, MB, 0), (0.0, 1, 3, MB, 0)])
    assert apart == pytest.approx([8e-3 + 50e-6] * 2)


@pytest.mark.parametrize("factor", [1, 2, 4])
def test_switches_carry_a_part_of_what_cards_send(factor):
    links = Links.levels(Speed(), GBIT, 1, oversubscribed=factor)
    messages = [(0.0, rank, (rank + 1) % 4, 4 * MB, 0) for rank in range(4)]
    assert max(arrivals(links, messages)) == pytest.approx(32e-3 * factor + 50e-6, rel=0.07)


def test_one_message_alone_is_not_slowed_down_by_shared_switches():
    links = Links.levels(Speed(), GBIT, 1, oversubscribed=4)
    assert arrivals(links, [(0.0, 0, 1, MB, 0)]) == pytest.approx([8e-3 + 50e-6])


def test_real_links_carry_headers_and_begin_slowly():
    """Doubling each round trip of 2 ms from 14 KB on: 250 KB are on the way after about 6 ms."""
    slow = Links(Speed(1.25e8, 1e-3), first_window=FIRST_WINDOW, goodput=0.9)
    (alone,) = arrivals(slow, [(0.0, 0, 1, 10 * MB, 0)])
    flat = 10 * MB / (0.9 * 1.25e8) + 1e-3
    assert flat + 2e-3 < alone < flat + 6e-3
    again = arrivals(slow, [(0.0, 0, 1, 10 * MB, 0), (0.2, 0, 1, MB, 0), (1.0, 0, 1, MB, 0)])
    assert again[1] - 0.2 == pytest.approx(MB / (0.9 * 1.25e8) + 1e-3)  # the window is open
    assert again[2] - 1.0 > MB / (0.9 * 1.25e8) + 3e-3  # after a pause it is not


def test_a_shaper_lets_a_burst_pass_after_a_pause():
    """As tc's tbf does: so many bytes are saved up, and no more."""
    shaped = Links(Speed(1.25e8), burst=250_000)
    messages = [(0.0, 0, 1, MB, 0), (1e-3, 0, 1, MB, 0), (1.0, 0, 1, 200_000, 0)]
    first, second, after_pause = arrivals(shaped, messages)
    assert (first, second) == (pytest.approx(6e-3), pytest.approx(14e-3))
    assert after_pause == pytest.approx(1.0)


def all_reduce_seconds(links, algorithm, world=8, nbytes=8 * MB):
    operation = NetworkOperation(nbytes, [0.0] * world)
    Network(world, links, algorithm).run([operation])
    return max(operation.finished)


def test_the_hierarchical_algorithm_gains_where_ranks_share_a_card():
    """Over the card goes the data of a host, and not that of each of its ranks."""
    levels = Links.levels(Speed(6e9, 2e-6), GBIT, ranks_per_host=4)
    hierarchical = all_reduce_seconds(levels, "hierarchical")
    assert hierarchical == pytest.approx(8 * MB / 1.25e8, rel=0.05)  # 2 (H-1)/H of the bytes
    assert all_reduce_seconds(levels, "two_shot") > 3 * hierarchical


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Links.levels(GBIT, GBIT, 0), "ranks_per_host=0: it is a number from 1 on"),
        (lambda: Links.levels(GBIT, GBIT, 2, 0.5), r"oversubscribed=0\.5: it is a number from 1"),
        (lambda: Links(GBIT, goodput=0.0), r"goodput=0\.0: it is a share"),
    ],
)
def test_links_that_mean_nothing_are_refused(make, message):
    with pytest.raises(Unsupported, match=message):
        make()


def test_over_tcp_operations_at_once_end_one_after_the_other():
    """Those of two ranks, or of a list of moves in which no message has a turn, do not."""

    def ends(world, algorithm):
        operations = [NetworkOperation(MB, [0.0] * world) for _ in range(12)]
        Network(world, Links.tcp(GBIT), algorithm).run(operations)
        return [max(operation.finished) for operation in operations]

    of_four = ends(4, "two_shot")
    assert all(now > before + 5e-3 for before, now in pairwise(of_four))
    assert ends(4, "ring")[0] > 0.8 * ends(4, "ring")[-1]
    assert ends(2, "two_shot")[0] > 0.5 * ends(2, "two_shot")[-1]
