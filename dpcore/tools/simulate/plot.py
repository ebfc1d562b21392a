"""``--html FILE``: a step's time against bandwidth, ranks and the size of buckets, as a page.

Each picture varies one of them and keeps the others; the dashed line is the bound that no schedule
beats. Beyond 8 ranks the picture is shaded and says that it is extrapolated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape

from dpcore.base.link import Speed
from dpcore.base.markup import short
from dpcore.tools.simulate.control import name_of
from dpcore.tools.simulate.gradients import Gradients
from dpcore.tools.simulate.links import Links
from dpcore.tools.simulate.questions import Asked, is_extrapolated, on_ranks
from dpcore.tools.simulate.training import Prediction

Predict = Callable[[Asked, Gradients, Links], Prediction]
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 430, 300, 52, 40, 30
_COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf")
_BOUND = "bound"
_RATES = (0.1, 0.3, 1.0, 3.0, 10.0)  # times the link's
_WORLDS = (2, 4, 8, 16, 64, 256)
_CAPS_MB = (0.5, 1.0, 4.0, 16.0, 64.0)


@dataclass(frozen=True)
class _Picture:
    """``lines``: by name, points of x and milliseconds; both axes are logarithmic."""

    title: str
    unit: str
    lines: dict[str, list[tuple[float, float]]]
    extrapolated_from: float = math.inf


def page(
    recorded: Gradients, words: str, links: Links, world: int, asked: Sequence[Asked], ask: Predict
) -> str:
    """The page as HTML."""
    work = on_ranks(recorded, world)
    rate = links.inter.bytes_per_second
    pictures = []
    if rate:
        faster = [
            (rate * times * 8e-9, work, replace(links, inter=_with_rate(links, rate * times)))
            for times in _RATES
        ]
        pictures.append(_Picture("against bandwidth", "Gbit/s", _lines(asked, faster, ask)))
    by_ranks = [(float(n), on_ranks(recorded, n), links) for n in _WORLDS]
    first = next(n for n in range(1, 1 << 20) if is_extrapolated(n))
    if all(one.algorithm in ("two_shot", "ring") for one in asked):
        pictures.append(_Picture("against ranks", "ranks", _lines(asked, by_ranks, ask), first))
    lines: dict[str, list[tuple[float, float]]] = {}
    for cap in _CAPS_MB:
        capped = [one._replace(bucket_cap_mb=cap) for one in asked]
        for name, points in _lines(capped, [(cap, work, links)], ask).items():
            lines.setdefault(name, []).extend(points)
    pictures.append(_Picture("against the size of buckets", "MiB", lines))
    title = f"A step on {world} ranks over {words}, predicted"
    legend = "".join(
        f'<span style="color:{_color(number, name)}">{escape(name)}</span> '
        for number, name in enumerate(_bound_last(pictures[-1].lines))
    )
    note = " Extrapolated: more ranks than in any run that was compared." * is_extrapolated(world)
    return (
        f"<!doctype html><meta charset=utf-8><title>{escape(title)}</title>"
        "<style>body{font:15px sans-serif;margin:2em}svg{margin:0 1em 1em 0}"
        "span{margin-right:1.5em}</style>"
        f"<h1>{escape(title)}</h1><p>Milliseconds of a step. Dashed: no schedule is faster."
        f"{note}</p><p>{legend}</p>{''.join(map(_drawn, pictures))}"
    )


def _with_rate(links: Links, rate: float) -> Speed:
    return replace(links.inter, bytes_per_second=rate)


def _lines(
    asked: Sequence[Asked], places: Sequence[tuple[float, Gradients, Links]], ask: Predict
) -> dict[str, list[tuple[float, float]]]:
    lines: dict[str, list[tuple[float, float]]] = {}
    for x, work, links in places:
        found = [ask(one, work, links) for one in asked]
        for one, predicted in zip(asked, found, strict=True):
            name = one.schedule if isinstance(one.schedule, str) else name_of(one.schedule)
            lines.setdefault(f"{name}, {one.algorithm}", []).append((x, predicted.step_ms))
        lines.setdefault(_BOUND, []).append((x, min(each.bound_ms for each in found)))
    return lines


def _bound_last(names: Iterable[str]) -> list[str]:
    return sorted(names, key=_BOUND.__eq__)


def _color(number: int, name: str) -> str:
    return "#444" if name == _BOUND else _COLORS[number % len(_COLORS)]


def _drawn(picture: _Picture) -> str:
    points = [point for line in picture.lines.values() for point in line]
    xs = sorted({x for x, _ in points})
    low, high = min(ms for _, ms in points) * 0.9, max(ms for _, ms in points) * 1.1
    right = _WIDTH - 12

    def across(x: float) -> float:
        return _LEFT + 10 + (right - _LEFT - 20) * math.log(x / xs[0]) / math.log(xs[-1] / xs[0])

    def up(ms: float) -> float:
        height = _HEIGHT - _BOTTOM - _TOP
        return _HEIGHT - _BOTTOM - height * math.log(ms / low) / math.log(high / low)

    parts = [f'<text x="{_LEFT}" y="18" font-weight="bold">{escape(picture.title)}</text>']
    if picture.extrapolated_from < xs[-1]:
        begin = across(picture.extrapolated_from)
        parts.append(
            f'<rect x="{begin:.0f}" y="{_TOP}" width="{right - begin:.0f}" '
            f'height="{_HEIGHT - _BOTTOM - _TOP}" fill="#eee"/>'
            f'<text x="{begin + 4:.0f}" y="{_HEIGHT - _BOTTOM - 6}" fill="#666">extrapolated</text>'
        )
    for x in xs:
        parts.append(
            f'<text x="{across(x):.0f}" y="{_HEIGHT - 22}" text-anchor="middle">{x:g}</text>'
        )
    for ms in (low / 0.9, math.sqrt(low * high), high / 1.1):
        parts.append(
            f'<text x="{_LEFT - 6}" y="{up(ms) + 4:.0f}" text-anchor="end">{short(ms)}</text>'
        )
    middle = (_LEFT + right) / 2
    parts.append(
        f'<text x="{middle}" y="{_HEIGHT - 5}" text-anchor="middle">{picture.unit}</text>'
        f'<path d="M{_LEFT} {_TOP}V{_HEIGHT - _BOTTOM}H{right}" fill="none" stroke="#999"/>'
    )
    for number, name in enumerate(_bound_last(picture.lines)):
        color, line = _color(number, name), picture.lines[name]
        dashes = ' stroke-dasharray="5 4"' if name == _BOUND else ""
        path = " ".join(f"{across(x):.1f},{up(ms):.1f}" for x, ms in line)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"{dashes}/>'
        )
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" font-size="12" font-family="sans-serif">'
        f"{''.join(parts)}</svg>"
    )
