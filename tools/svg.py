"""Draws the few things that the pictures of docs/learn consist of, as SVG."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

BLUE, RED, GREEN, YELLOW, GREY = "#3d7ea6", "#c8443a", "#5b9a6b", "#dba13a", "#8a8f98"
RANKS = (BLUE, YELLOW, GREEN, "#8b6fb0")
PALE = "#e8edf2"
INK = "#22272e"


class Picture:
    """White, so that it is the same on a dark page."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._parts: list[str] = []

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        text: str = "",
        **more: str,
    ) -> None:
        extra = "".join(f' {name}="{value}"' for name, value in more.items())
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
            f'fill="{fill}"{extra}/>'
        )
        if text:
            ink = INK if fill in (PALE, "white", "none") else "white"
            self.text(x + width / 2, y + height / 2 + 4.5, text, "middle", ink, 13)

    def text(
        self, x: float, y: float, text: str, anchor: str = "start", ink: str = INK, size: int = 14
    ) -> None:
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{ink}" '
            f'font-size="{size}">{html.escape(text)}</text>'
        )

    def line(
        self, points: Sequence[tuple[float, float]], ink: str, width: float = 2, dash: str = ""
    ) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="{ink}" stroke-width="{width}"{dashes}/>'
        )

    def dot(self, x: float, y: float, ink: str, radius: float = 4) -> None:
        self._parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{ink}"/>')

    def arrow(
        self, x: float, y: float, to_x: float, to_y: float, ink: str, width: float = 1.8
    ) -> None:
        angle = math.atan2(to_y - y, to_x - x)
        back = [(to_x - 8 * math.cos(angle + turn), to_y - 8 * math.sin(angle + turn))
                for turn in (0.4, -0.4)]  # fmt: skip
        self.line([(x, y), (to_x - 5 * math.cos(angle), to_y - 5 * math.sin(angle))], ink, width)
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in [(to_x, to_y), *back])
        self._parts.append(f'<polygon points="{path}" fill="{ink}"/>')

    def svg(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" font-family="sans-serif">'
        )
        ground = f'<rect width="{self.width}" height="{self.height}" rx="8" fill="white"/>'
        return "\n".join([head, ground, *self._parts, "</svg>"]) + "\n"


class Plot:
    """Logarithmic axes within a picture."""

    def __init__(
        self, picture: Picture, box: tuple[float, float, float, float],
        x: tuple[float, float], y: tuple[float, float],
    ) -> None:  # fmt: skip
        self._picture, self._box, self._x, self._y = picture, box, x, y
        left, top, width, height = box
        picture.line([(left, top), (left, top + height), (left + width, top + height)], GREY, 1)

    def at(self, x: float, y: float) -> tuple[float, float]:
        left, top, width, height = self._box

        def part(value: float, ends: tuple[float, float]) -> float:
            return math.log(value / ends[0]) / math.log(ends[1] / ends[0])

        return left + width * part(x, self._x), top + height * (1 - part(y, self._y))

    def ticks(self, x: dict[float, str], y: dict[float, str], what_x: str, what_y: str) -> None:
        left, top, width, height = self._box
        for value, name in x.items():
            place, _ = self.at(value, self._y[0])
            self._picture.line([(place, top + height), (place, top + height + 5)], GREY, 1)
            self._picture.text(place, top + height + 20, name, "middle", size=12)
        for value, name in y.items():
            _, place = self.at(self._x[0], value)
            self._picture.line([(left - 5, place), (left, place)], GREY, 1)
            self._picture.text(left - 9, place + 4, name, "end", size=12)
        self._picture.text(left + width / 2, top + height + 40, what_x, "middle", size=13)
        self._picture.text(left - 40, top - 12, what_y, size=13)

    def curve(
        self, points: Sequence[tuple[float, float]], ink: str, name: str = "", dash: str = "",
        above: float = -9,
    ) -> None:  # fmt: skip
        places = [self.at(*point) for point in points]
        self._picture.line(places, ink, 2.2, dash)
        for place in places if not dash else ():
            self._picture.dot(*place, ink, 3.2)
        if name:
            self._picture.text(
                places[-1][0] + 8, places[-1][1] + above + 13, name, ink=ink, size=13
            )
