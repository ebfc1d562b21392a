"""The types of the arguments of every command: what is accepted, and what is said of the rest.

Each reads a text or raises ``ArgumentTypeError`` with a sentence, which argparse shows behind the
name of the option. Importing this loads neither torch nor numpy: ``--help`` does without them.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from dpcore.base.link import parse_speed
from dpcore.tools import sizes

MOST_RANKS = 1024
_MOST_MIB = 1 << 20
T = TypeVar("T")


class CommandParser(argparse.ArgumentParser):
    """The parser of one command. A mistake takes one line, and not the list of all options."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        said = message.removeprefix("argument ")
        self.exit(2, f"{self.prog}: {said} ({self.prog} --help has examples)\n")


def typed(read: Callable[[str], T]) -> Callable[[str], T]:
    """The same reader with its own words, in place of argparse's "invalid value"."""

    def read_argument(text: str) -> T:
        try:
            return read(text)
        except ValueError as problem:
            raise argparse.ArgumentTypeError(str(problem)) from None

    return read_argument


def whole(least: int = 1, most: int = 1_000_000, what: str = "") -> Callable[[str], int]:
    """
    >>> whole()("15")
    15
    """

    def read(text: str) -> int:
        value = _number(int, text)
        if value is None or not least <= value <= most:
            raise ValueError(f"{text!r} is not a whole number{what} from {least} to {most}")
        return value

    return typed(read)


def _listed(read: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Several with commas, each of them once."""
    return lambda text: list(dict.fromkeys(read(part) for part in text.split(",")))


def _seconds(text: str) -> float:
    value = _number(float, text)
    if value is None or not 0 < value < 3600:
        raise ValueError(f"{text!r} is not a time in seconds, more than 0 and less than 3600")
    return value


def _mib(text: str) -> float:
    value = _number(float, text)
    if value is None or not 0 < value <= _MOST_MIB:
        raise ValueError(f"{text!r} is not a size in MiB, more than 0 and at most {_MOST_MIB}")
    return value


def _link(text: str) -> str:
    parse_speed(text)
    return text


def _links(text: str) -> list[str]:
    """ "none,1gbit,50us,100mbit" has three, since a latency belongs to the rate before it."""
    found: list[str] = []
    for word in (part.strip() for part in text.split(",")):
        if word == "none":
            found.append("")
        elif re.fullmatch(r"[\d.]+[kmg]?bit", word):
            found.append(word)
        elif found and found[-1] and word:
            found[-1] += f",{word}"
        else:
            raise ValueError(f"{word!r} is not a link; write none or a rate such as 1gbit")
    for words in filter(None, found):
        parse_speed(words)
    if len(set(found)) < len(found):
        raise ValueError(f"{text!r} names a link twice")
    return found


def _step_range(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    found = _number(int, first), _number(int, last or first)
    if found[0] is None or found[1] is None or not 1 <= found[0] <= found[1]:
        raise ValueError(f"{text!r} is not a step: write 5 or 5:7, and 1 is the first")
    return found[0], found[1]


def _number(kind: Callable[[str], T], text: str) -> T | None:
    try:
        return kind(text)
    except ValueError:
        return None


ranks = whole(1, MOST_RANKS, " of ranks")
worlds = _listed(whole(2, MOST_RANKS, " of ranks"))  # to compare: one has nobody to talk to
links = typed(_links)
process = whole(1, 1 << 22, " of a process")
seconds = typed(_seconds)
mib = typed(_mib)
caps = _listed(mib)
step_range = typed(_step_range)
link = typed(_link)
size_list = typed(sizes.parse_sizes)
