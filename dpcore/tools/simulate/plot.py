"""``--html FILE``: a step's time against bandwidth, ranks and the size of buckets, as a page.

Each picture varies one of them and keeps the others; the dashed line is the bound that no schedule
beats. Beyond 8 ranks the picture is shaded and says that it is extrapolated. Dots are steps that
were measured, with their intervals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape

from dpcore.base.link import Speed
from dpcore.base.markup import short
from dpcore.tools.simulate.gradients import Gradients
from dpcore.tools.simulate.links import Links
from dpcore.tools.simulate.measured import Measured, asked_as
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
    """``lines``: by name, points of x and milliseconds; both axes are logarithmic. ``dots``: by the
    name of a line, what was measured and where."""

    title: str
    unit: str
    lines: dict[str, list[tuple[float, float]]]
    extrapolated_from: float = math.inf
    dots: Sequence[tuple[str, float, Measured]] = ()


def page(
    recorded: Gradients,
    words: str,
    links: Links,
    world: int,
    asked: Sequence[Asked],
    ask: Predict,
    measured: Sequence[Measured] = (),
) -> str:
    """The page as HTML."""
    work = on_ranks(recorded, world)
    named = {_name(one): one for one in asked}
    dots = _dots(named, measured)
    rate = links.inter.bytes_per_second
    pictures = []
    if rate:
        faster = [
            (rate * times * 8e-9, work, replace(links, inter=_with_rate(links, rate * times)))
            for times in _RATES
        ]
        by_rate = [
            (name, each.speed.bytes_per_second * 8e-9, each)
            for name, each in dots
            if each.world == world and each.is_over(replace(links, inter=_as_fast(links, each)))
        ]
        pictures.append(
            _Picture("against bandwidth", "Gbit/s", _lines(named, faster, ask), dots=by_rate)
        )
    by_ranks = [(float(n), on_ranks(recorded, n), links) for n in _WORLDS]
    first = next(n for n in range(1, 1 << 20) if is_extrapolated(n))
    if all(one.algorithm in ("two_shot", "ring") for one in asked):
        counted = [(name, float(each.world), each) for name, each in dots if each.is_over(links)]
        pictures.append(
            _Picture("against ranks", "ranks", _lines(named, by_ranks, ask), first, counted)
        )
    of_any_size = [one._replace(bucket_cap_mb=None) for one in asked]
    lines: dict[str, list[tuple[float, float]]] = {}
    for cap in _CAPS_MB:
        capped = {_name(one): one._replace(bucket_cap_mb=cap) for one in of_any_size}
        for name, points in _lines(capped, [(cap, work, links)], ask).items():
            lines.setdefault(name, []).extend(points)
    here = [one for one in measured if one.cap_mb and one.world == world and one.is_over(links)]
    by_cap = [
        (name, each.cap_mb or 0.0, each)
        for each in here
        for name, _ in _dots({_name(one): one for one in of_any_size}, [each.of_any_size()])
    ]
    pictures.append(_Picture("against the size of buckets", "MiB", lines, dots=by_cap))
    title = f"A step on {world} ranks over {words}, predicted"
    note = " Dots: measured, with the intervals of their medians." * bool(measured)
    note += " Extrapolated: more ranks than in any run that was compared." * is_extrapolated(world)
    return (
        f"<!doctype html><meta charset=utf-8><title>{escape(title)}</title>"
        "<style>body{font:15px sans-serif;margin:2em}figure{display:inline-block;margin:0 1em 1em}"
        "span{margin-right:1.5em;white-space:nowrap}figcaption{max-width:430px}</style>"
        f"<h1>{escape(title)}</h1><p>Milliseconds of a step. Dashed: no schedule is faster."
        f"{note}</p>{''.join(map(_drawn, pictures))}"
    )


def _name(one: Asked) -> str:
    name, cap = asked_as(one)
    return f"{name}{'' if cap is None else f' {cap:g}'}, {one.algorithm}"


def _dots(named: Mapping[str, Asked], measured: Sequence[Measured]) -> list[tuple[str, Measured]]:
    """Beside the first line of each schedule: what was measured says no algorithm."""
    first = {asked_as(one): name for name, one in reversed(list(named.items()))}
    known = [(first.get((each.name, each.cap_mb)), each) for each in measured]
    return [(name, each) for name, each in known if name is not None]


def _as_fast(links: Links, measured: Measured) -> Speed:
    return _with_rate(links, measured.speed.bytes_per_second)


def _with_rate(links: Links, rate: float) -> Speed:
    return replace(links.inter, bytes_per_second=rate)


def _lines(
    named: Mapping[str, Asked], places: Sequence[tuple[float, Gradients, Links]], ask: Predict
) -> dict[str, list[tuple[float, float]]]:
    lines: dict[str, list[tuple[float, float]]] = {}
    for x, work, links in places:
        found = {name: ask(one, work, links) for name, one in named.items()}
        for name, predicted in found.items():
            lines.setdefault(name, []).append((x, predicted.step_ms))
        lines.setdefault(_BOUND, []).append((x, min(each.bound_ms for each in found.values())))
    return lines


def _bound_last(names: Iterable[str]) -> list[str]:
    return sorted(names, key=_BOUND.__eq__)


def _color(number: int, name: str) -> str:
    return "#444" if name == _BOUND else _COLORS[number % len(_COLORS)]


def _drawn(picture: _Picture) -> str:
    points = [point for line in picture.lines.values() for point in line]
    xs = sorted({x for x, _ in points})
    times = [ms for _, ms in points]
    times += [ms for _, _, dot in picture.dots for ms in (dot.low_ms, dot.high_ms)]
    low, high = min(times) * 0.9, max(times) * 1.1
    places = [*xs, *(x for _, x, _ in picture.dots)]
    begin, end = min(places), max(places)
    right = _WIDTH - 12

    def across(x: float) -> float:
        return _LEFT + 10 + (right - _LEFT - 20) * math.log(x / begin) / math.log(end / begin)

    def up(ms: float) -> float:
        height = _HEIGHT - _BOTTOM - _TOP
        return _HEIGHT - _BOTTOM - height * math.log(ms / low) / math.log(high / low)

    parts = [f'<text x="{_LEFT}" y="18" font-weight="bold">{escape(picture.title)}</text>']
    if picture.extrapolated_from < xs[-1]:
        edge = across(picture.extrapolated_from)
        parts.append(
            f'<rect x="{edge:.0f}" y="{_TOP}" width="{right - edge:.0f}" '
            f'height="{_HEIGHT - _BOTTOM - _TOP}" fill="#eee"/>'
            f'<text x="{edge + 4:.0f}" y="{_HEIGHT - _BOTTOM - 6}" fill="#666">extrapolated</text>'
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
        for x, dot in [(x, dot) for of, x, dot in picture.dots if of == name]:
            parts.append(
                f'<path d="M{across(x):.1f} {up(dot.low_ms):.1f}V{up(dot.high_ms):.1f}" '
                f'stroke="{color}"/><circle cx="{across(x):.1f}" cy="{up(dot.step_ms):.1f}" r="4" '
                f'fill="{color}" stroke="#fff"><title>{escape(name)}, measured: '
                f"{short(dot.step_ms)} ms</title></circle>"
            )
    legend = " ".join(
        f'<span style="color:{_color(number, name)}">{escape(name)}</span>'
        for number, name in enumerate(_bound_last(picture.lines))
    )
    return (
        f'<figure><svg width="{_WIDTH}" height="{_HEIGHT}" font-size="12" font-family="sans-serif">'
        f"{''.join(parts)}</svg><figcaption>{legend}</figcaption></figure>"
    )
