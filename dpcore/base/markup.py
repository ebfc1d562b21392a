"""Numbers as text, and HTML for notebooks: a table, and a page in a frame, with every text
escaped."""

from __future__ import annotations

import html
from collections.abc import Sequence


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> str:
    """Columns whose cells are numbers are aligned to the right.

    >>> table(["a"], [["1 < 2"]])
    '<table><thead><tr><th>a</th></tr></thead><tbody><tr><td>1 &lt; 2</td></tr></tbody></table>'
    """
    head = "".join(f"<th>{html.escape(text)}</th>" for text in columns)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    above = f'<caption style="text-align:left">{html.escape(caption)}</caption>' if caption else ""
    return f"<table>{above}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(text: str) -> str:
    is_number = text.replace(".", "", 1).replace("-", "", 1).isdigit()
    style = ' style="text-align:right"' if is_number else ""
    return f"<td{style}>{html.escape(text)}</td>"


def paragraphs(lines: Sequence[str]) -> str:
    return "".join(f"<p>{html.escape(line)}</p>" for line in lines)


def frame(page: str, height: int) -> str:
    """A page in a sandboxed frame of another page."""
    return (
        f'<iframe srcdoc="{html.escape(page)}" sandbox="allow-scripts" '
        f'style="width:100%;height:{height}px;border:1px solid #8884"></iframe>'
    )


def short(value: float) -> str:
    """A number with three digits: 0.123, 3.14, 31.4, 314.

    >>> [short(value) for value in (0.12345, 3.14159, 31.4159, 3141.59)]
    ['0.123', '3.14', '31.4', '3142']
    """
    decimals = 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{decimals}f}"
