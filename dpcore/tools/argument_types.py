"""The grammar of the command line: what an option is called, takes and says, in every command.

An option that several commands have is added by `add`, from one table, so that it means the same in
all of them. A type reads a text or raises ``ArgumentTypeError`` with a sentence, which argparse
shows behind the name of the option. Importing this loads neither torch nor numpy: ``--help`` does
without them.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from dpcore.base.link import parse_speed
from dpcore.tools import sizes

MOST_RANKS = 4096
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
            raise ValueError(f"{word!r} is not a link; write a rate such as 1gbit")
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


def _names(text: str) -> list[str]:
    found = [part.strip() for part in text.split(",")]
    if not all(found):
        raise ValueError(f"{text!r}: write a name, or several with commas between them")
    return found


_CAP = re.compile(r"(.+?):([0-9.]+|auto)")


def name_and_cap(text: str, known: Collection[str]) -> tuple[str, str]:
    """What is before and behind the last colon of ``bucketed:25``, which is a size of buckets in
    MiB or auto; a name of one's own has a colon of its own.

    >>> name_and_cap("bucketed:25", ["bucketed"]), name_and_cap("mine.py:MySchedule:4", [])
    (('bucketed', '25'), ('mine.py:MySchedule', '4'))
    """
    found = _CAP.fullmatch(text)
    name, cap = found.groups() if found else (text, "")
    if text.partition(":")[0] in known:
        name, _, cap = text.partition(":")
    if cap and cap != "auto":
        try:
            mib(cap)
        except argparse.ArgumentTypeError as problem:
            raise ValueError(f"{text!r}: {problem}") from None
    return name, cap


def _share(text: str) -> float:
    value = _number(float, text)
    if value is None or not 0 < value < 1:
        raise ValueError(f"{text!r} is not a share, more than 0 and less than 1")
    return value


def _link(text: str) -> str:
    found = _links(text)
    if len(found) != 1 or not found[0]:
        raise ValueError(f"{text!r} is not one link; write a rate such as 1gbit,50us")
    return found[0]


def _stacks(text: str) -> list[str]:
    found = _names(text)
    if wrong := next((name for name in found if name not in ("torch", "dpcore")), ""):
        raise ValueError(f"{wrong!r} trains no model here; write torch, dpcore or torch,dpcore")
    return list(dict.fromkeys(found))


worlds = _listed(whole(1, MOST_RANKS, " of ranks"))
links = typed(_links)
link = typed(_link)
stacks = typed(_stacks)
share = typed(_share)
names = typed(_names)
process = whole(1, 1 << 22, " of a process")
seconds = typed(_seconds)
mib = typed(_mib)
step_range = typed(_step_range)
size_list = typed(sizes.parse_sizes)

ROUNDS, QUICK_ROUNDS = 15, 7
SIZES, QUICK_SIZES = "8:64M:8x", "8:8M:64x"
_SCHEDULES = "launch schedules, each with :MIB behind it for the size of buckets"
_GRAMMAR: dict[str, tuple[str, dict[str, Any]]] = {
    "--world": ("ranks, several numbers with commas", {"type": worlds, "metavar": "N,..."}),
    "--link": ("1gbit,50us, several with commas", {"type": links, "metavar": "LINKS"}),
    "--intra": ("one link", {"type": link, "metavar": "LINK"}),
    "--inter": ("one link", {"type": link, "metavar": "LINK"}),
    "--schedule": (_SCHEDULES, {"type": names, "metavar": "NAMES"}),
    "--algorithm": (
        "algorithms, also file.py:function or plan.xml, with commas",
        {"type": names, "metavar": "NAMES"},
    ),
    "--collective": ("collectives, with commas", {"type": names, "metavar": "NAMES"}),
    "--peers": ("libraries to compare with, or none", {"type": names, "metavar": "NAMES"}),
    "--rounds": ("rounds in which all take turns", {"type": whole(), "metavar": "N"}),
    "--seconds": ("time of each one in a round", {"type": seconds, "metavar": "S"}),
    "--steps": ("the steps of a trace, from 1", {"type": step_range, "metavar": "A:B"}),
    "--sizes": (sizes.HELP, {"type": size_list, "metavar": "SIZES"}),
    "--op": ("sum, mean, prod, min or max", {"metavar": "OP"}),
    "--quick": ("fewer and shorter rounds", {"action": "store_true"}),
    "--out": ("folder for what is made", {"type": Path, "metavar": "FOLDER"}),
    "--csv": ("write rows; - prints them", {"type": Path, "metavar": "FILE"}),
    "--json": ("print JSON, and no table", {"action": "store_true"}),
}


def add(
    made: argparse._ActionsContainer, option: str, default: Any = None, said: str = "", **more: Any
) -> None:
    """Adds an option of the grammar. ``said``: what is left to say of it in this command, such as
    its default where that is not ``default``."""
    meaning, kind = _GRAMMAR[option]
    notes = said or ("" if default is None else f"default: {default}")
    text = f"{meaning} ({notes})" if notes else meaning
    given = {} if default is None else {"default": default}
    made.add_argument(option, help=text, **kind, **given, **more)


def rounds_of(options: argparse.Namespace) -> int:
    given: int | None = options.rounds
    return given or (QUICK_ROUNDS if options.quick else ROUNDS)
