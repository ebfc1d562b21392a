"""Pictures of docs/learn with a row for the processor and one for the network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from svg import BLUE, GREEN, GREY, INK, RED, Picture

from dpcore.reference.across_steps_time import Network
from dpcore.reference.buckets import plan_buckets

BYTES_PER_MS = 125e3  # 1 Gbit/s
LATENCY = 0.1  # ms: of two messages, one after the other
LEFT, WIDTH = 130, 560
HIDDEN = "#7fb2d0"


class Flight(NamedTuple):
    """On the network, in milliseconds."""

    begin: float
    end: float


def sent(
    buckets: Sequence[Sequence[int]], gradients: Sequence[tuple[float, float]]
) -> list[Flight]:
    """Each bucket when its last gradient is there, and the network free."""
    free, flights = 0.0, []
    for ready, size in sorted(
        (max(gradients[g][1] for g in bucket), sum(gradients[g][0] for g in bucket))
        for bucket in buckets
    ):
        free = max(free, ready) + size / BYTES_PER_MS
        flights.append(Flight(free - size / BYTES_PER_MS, free + LATENCY))
    return flights


def cut(gradients: Sequence[tuple[float, float]], cap_mb: float) -> list[list[int]]:
    order = sorted(range(len(gradients)), key=lambda g: gradients[g][1])
    sizes = [int(size) for size, _ in gradients]
    return plan_buckets(sizes, [0] * len(sizes), order, [int(cap_mb * 2**20)])


def rows(
    drawn: Picture, top: float, title: str, forward: float, backward: float,
    flights: Sequence[Flight], whole: float,
) -> None:  # fmt: skip
    """Forward and backward above, what travels below; red where backward is over."""
    scale, computed = WIDTH / whole, forward + backward
    drawn.text(LEFT - 12, top + 16, title, "end")
    drawn.text(LEFT - 12, top + 42, "network", "end", GREY, 12)
    drawn.box(LEFT, top, scale * forward, 24, GREEN, "forward")
    drawn.box(LEFT + scale * forward, top, scale * backward, 24, BLUE, "backward")
    for flight in flights:
        begin, end = forward + flight.begin, forward + flight.end
        seam = min(max(begin, computed), end)
        if seam > begin:
            drawn.box(LEFT + scale * begin, top + 28, scale * (seam - begin), 18, HIDDEN,
                      stroke="white")  # fmt: skip
        if end > seam:
            drawn.box(LEFT + scale * seam, top + 28, scale * (end - seam), 18, RED, stroke="white")
    end = max([computed, *(forward + flight.end for flight in flights)])
    drawn.text(LEFT + scale * end + 6, top + 42, f"{end:.0f} ms", size=12)


def whole_of(forward: float, backward: float, gradients: Sequence[tuple[float, float]]) -> float:
    return forward + backward + sum(size for size, _ in gradients) / BYTES_PER_MS + 25


def at_the_end(backward: float, gradients: Sequence[tuple[float, float]]) -> list[Flight]:
    return [
        Flight(backward, backward + sum(size for size, _ in gradients) / BYTES_PER_MS + LATENCY)
    ]


def per_gradient(forward: float, backward: float, gradients: list[tuple[float, float]]) -> Picture:
    drawn = Picture(720, 180)
    whole = whole_of(forward, backward, gradients)
    rows(drawn, 24, "at the end", forward, backward, at_the_end(backward, gradients), whole)
    each = sent([[g] for g in range(len(gradients))], gradients)
    rows(drawn, 104, "each gradient", forward, backward, each, whole)
    return drawn


def buckets(forward: float, backward: float, gradients: list[tuple[float, float]]) -> Picture:
    drawn = Picture(720, 240)
    whole = whole_of(forward, backward, gradients)
    for number, cap in enumerate((1, 4, 25)):
        flights = sent(cut(gradients, cap), gradients)
        rows(drawn, 20 + 74 * number, f"{cap} MiB", forward, backward, flights, whole)
    return drawn


def exposed(forward: float, backward: float, gradients: list[tuple[float, float]]) -> Picture:
    drawn = Picture(720, 190)
    whole = whole_of(forward, backward, gradients)
    flights = sent(cut(gradients, 4), gradients)
    rows(drawn, 20, "bucketed", forward, backward, flights, whole)
    rows(drawn, 94, "sequential", forward, backward, at_the_end(backward, gradients), whole)
    drawn.box(LEFT, 164, 14, 14, HIDDEN)
    drawn.text(LEFT + 20, 176, "hidden behind backward", size=12)
    drawn.box(LEFT + 190, 164, 14, 14, RED)
    drawn.text(LEFT + 210, 176, "exposed: the program waits", size=12)
    return drawn


def across_steps() -> Picture:
    """Two steps of the model of the page, when the first ones are over."""
    drawn = Picture(720, 200)
    layers, forward, backward, network = range(6), 5.0, 10.0, 15.0
    for number, name in enumerate(("plain", "priority")):
        top, wire, now = 26 + 84 * number, Network(), 0.0
        computed: list[tuple[float, float, str]] = []
        flights: list[float] = []
        ends: list[float] = []
        for _ in range(7):
            for layer in layers:
                begin = max(now, wire.wait(layer))
                now = begin + forward
                computed.append((begin, now, GREEN))
            flights.extend(wire.arrived.values())
            for layer in reversed(layers):
                computed.append((now, now + backward, BLUE))
                now += backward
                urgency = layer if name == "priority" else -layer
                wire.launch(layer, now, network, urgency)
            if name == "plain":
                now = max(now, *map(wire.wait, layers))
            ends.append(now)
        start, scale = computed[-36][0], WIDTH / 265.0
        drawn.text(LEFT - 12, top + 16, name, "end")
        drawn.text(LEFT - 12, top + 42, "network", "end", GREY, 12)
        flights.extend(wire.arrived.values())
        for begin, end, ink in computed[-36:-12]:
            drawn.box(LEFT + scale * (begin - start), top, scale * (end - begin), 24, ink,
                      stroke="white")  # fmt: skip
        for end in sorted({flight for flight in flights if flight - network >= start}):
            if end - start < 262:
                drawn.box(LEFT + scale * (end - network - start), top + 28, scale * network, 18,
                          HIDDEN, stroke="white")  # fmt: skip
        drawn.line([(LEFT + scale * (computed[-24][0] - start), top - 6)] * 2, INK)
        drawn.text(LEFT + scale * (computed[-24][0] - start) + 4, top - 6,
                   f"the next forward, after {computed[-24][0] - start:g} ms", size=12)  # fmt: skip
    return drawn
