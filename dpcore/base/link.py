"""``link="10gbit,50us"``: parses the description of an emulated network.

``csrc/comm/transport/link.h`` explains the parameters.

    10gbit,50us                          every link: bandwidth and latency, one way
    1gbit,200us,jitter=20us,loss=0.1%    with variation; seed=3 seeds the random numbers
    file:links.txt                       a line per pair of ranks; the last that matches wins

A line of the file is ``from -> to: words``, with ``*`` for every rank; ``#`` begins a comment.

If the program gives no link, DPCORE_LINK does.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from dpcore.errors import Unsupported

_BITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_TIMES = (0, 3600, "up to an hour")
_BOUNDS = {  # by field of Speed: the least, the most, and both in words
    "bytes_per_second": (1 / 8, 1e15 / 8, "from 1 bit/s to 1e6 gbit; leave it out for no limit"),
    "latency": _TIMES,
    "jitter": _TIMES,
    "loss": (0, 0.999, "up to 99.9%"),
    "seed": (0, 1 << 53, "up to 2**53"),
}
_LINE = re.compile(r"(\d+|\*)\s*->\s*(\d+|\*)\s*:\s*(\S+)")


@dataclass(frozen=True)
class Speed:
    """One direction between two ranks. A bandwidth of 0 means no limit."""

    bytes_per_second: float = 0.0
    latency: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0
    seed: int = 0


def parse_speed(text: str) -> Speed:
    """
    >>> parse_speed("10gbit,2ms")
    Speed(bytes_per_second=1250000000.0, latency=0.002, jitter=0.0, loss=0.0, seed=0)
    >>> parse_speed("100mbit,1ms,jitter=100us,loss=1%,seed=3").loss
    0.01
    """
    values: dict[str, float] = {}
    for word in text.split(","):
        name, value = _value_of(word)
        if not name:
            raise Unsupported(
                f"link {text!r}: {word!r} is not understood; write '10gbit,50us', then if you like "
                "jitter=5us, loss=0.1% or seed=3"
            )
        least, most, words = _BOUNDS[name]
        if name in values or not least <= value <= most:
            why = "comes second" if name in values else f"is out of range: {words}"
            raise Unsupported(f"link {text!r}: {word!r} {why}")
        values[name] = value
    seed = int(values.pop("seed", 0))
    return Speed(**values, seed=seed)


def _value_of(word: str) -> tuple[str, float]:
    """The field of ``Speed`` that a word sets, and its value; "" for an unknown word."""
    name, _, value = word.strip().rpartition("=")
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)([a-z%]*)", value)
    if match is None:
        return "", 0.0
    number, unit = float(match[1]), match[2]
    if not name and unit in _BITS:
        return "bytes_per_second", number * _BITS[unit] / 8
    if name in ("", "jitter") and unit in _SECONDS:
        return name or "latency", number * _SECONDS[unit]
    if name == "loss" and unit == "%":
        return "loss", number / 100
    if name == "seed" and unit == "" and number.is_integer():
        return "seed", number
    return "", 0.0


def speeds(text: str, world_size: int) -> list[list[Speed]]:
    """The speed of each link, by sender, then by receiver."""
    if not text.startswith("file:"):
        return [[parse_speed(text)] * world_size for _ in range(world_size)]
    table = [[Speed()] * world_size for _ in range(world_size)]
    path = Path(text.removeprefix("file:"))
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise Unsupported(f"link: {error}") from error
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].strip()
        match = _LINE.fullmatch(words)
        if words and not match:
            raise Unsupported(f"{path}:{number}: write 'from -> to: 10gbit,50us', not {words!r}")
        if match:
            speed = parse_speed(match[3])
            for source in _ranks(match[1], world_size):
                for target in _ranks(match[2], world_size):
                    table[source][target] = speed
    return table


def link_or_variable(given: str | None, world_size: int) -> str | None:
    """The link that the program gives, else DPCORE_LINK, else None."""
    words = os.environ.get("DPCORE_LINK", "")
    if given is not None or not words:
        return given
    try:
        speeds(words, world_size)
    except Unsupported as problem:
        raise Unsupported(f"DPCORE_LINK={words}: {problem}") from None
    return words


def check_no_link(what: str) -> None:
    """Raises if DPCORE_LINK is set but has no effect: times would be misread as that link's."""
    if refusal := refusal_of_link(what):
        raise Unsupported(refusal)


def refusal_of_link(what: str) -> str:
    """The reason why DPCORE_LINK excludes ``what``, or "" if the variable is not set."""
    words = os.environ.get("DPCORE_LINK", "")
    if not words:
        return ""
    return (
        f"DPCORE_LINK={words}: only dpcore's own communicator on the CPU emulates a link, and "
        f"not {what}; unset the variable, or use the CPU and the ranks of one host"
    )


def _ranks(word: str, world_size: int) -> list[int]:
    every = list(range(world_size))
    return every if word == "*" else [rank for rank in every if rank == int(word)]
