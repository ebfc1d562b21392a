"""Sizes in bytes on the command line, for every command and script that takes some."""

from __future__ import annotations

import math

_LARGEST, _MOST = 1 << 40, 1000
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
HELP = "8:64M:4x multiplies, 1M:8M:1M adds, 8,1K,1M lists; K, M, G are powers of 1024"


def parse_size(text: str) -> int:
    """Bytes of "64K", "1M", "8".

    >>> parse_size("64K"), parse_size("4 KiB")
    (65536, 4096)
    """
    digits = text.strip().upper().removesuffix("IB").removesuffix("B")
    unit = _UNITS.get(digits[-1:], 1)
    try:
        size = int(digits[:-1] if unit > 1 else digits) * unit
    except ValueError:
        raise ValueError(f"{text!r} is not a size: write 8, 64K or 256M") from None
    if not 1 <= size <= _LARGEST:
        raise ValueError(f"{text!r}: a size is at least one byte and at most 1024G")
    return size


def parse_sizes(text: str) -> tuple[int, ...]:
    """A list, or a range: FROM:TO:4x (or :4) multiplies, FROM:TO:1M adds, FROM:TO doubles.

    >>> parse_sizes("8:1K:4x"), parse_sizes("1K:3K:1K"), parse_sizes("1M,8")
    ((8, 32, 128, 512), (1024, 2048, 3072), (8, 1048576))
    """
    if ":" not in text:
        return tuple(sorted({parse_size(part) for part in text.split(",")}))
    first, last, *rest = text.split(":")
    growth = rest[0].strip() if rest else "2x"
    factor, step = 1.0, 0
    try:
        factor = float(growth.lower().removesuffix("x"))
    except ValueError:
        step = parse_size(growth)
    if len(rest) > 1 or not (step or 1 < factor < math.inf):
        raise ValueError(f"{text!r}: write FROM:TO:4x with a factor above 1, or FROM:TO:1M")
    sizes: list[int] = []
    size, end = float(parse_size(first)), parse_size(last)
    while size <= end and len(sizes) <= _MOST:
        sizes.append(int(size))
        size = size * factor + step
    if not sizes:
        raise ValueError(f"{text!r} holds no size, since {last} is less than {first}")
    if len(sizes) > _MOST:
        raise ValueError(f"{text!r} holds more than {_MOST} sizes")
    return tuple(dict.fromkeys(sizes))


def size_text(size: int) -> str:
    """
    >>> size_text(65536), size_text(1000)
    ('64 KiB', '1000 B')
    """
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor and size % factor == 0:
            return f"{size // factor} {unit}"
    return f"{size} B"
