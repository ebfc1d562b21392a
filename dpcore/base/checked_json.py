"""Reads JSON that other programs have written, and checks it field by field.

A reader either gets values of the kinds that its schema names, or raises ``Unreadable`` with one
sentence that names the file, the entry and what is wrong with it. Fields that the schema does not
name may hold anything.
"""

from __future__ import annotations

import gzip
import json
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dpcore.errors import Error

Where = tuple[str | int, ...]  # ("traceEvents", 17, "args")

_MOST = 1 << 62  # sums and differences of two fit 64 bits
_SHOWN = 40


class Unreadable(Error, ValueError):
    """A file does not have the expected content."""


class Wrong(ValueError):
    """A value is not what the schema says."""

    def __init__(self, where: Where, says: str) -> None:
        super().__init__(f"{place_of(where)} {says}")


def read_json(path: Path, what: str) -> Any:
    """The JSON of a file, which may be compressed. ``what`` names its content in errors."""

    def refused(why: object) -> Unreadable:
        return Unreadable(f"{path} is not {what}: {why}")

    text = ""
    try:
        mode = path.stat().st_mode
        if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
            raise refused("it is a device")
        data = path.read_bytes()
        if not data:
            raise refused("it is empty; its program ended before it was written")
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        text = data.decode(errors="replace")
        return json.loads(text, strict=False)
    except (FileNotFoundError, Unreadable):
        raise
    except (EOFError, zlib.error, gzip.BadGzipFile) as problem:
        raise refused(f"it was cut off or damaged ({problem})") from None
    except OSError as problem:
        raise refused(problem.strerror) from None
    except RecursionError:
        raise refused("its lists and objects are nested too deeply") from None
    except json.JSONDecodeError as problem:
        is_cut = text.lstrip()[:1] in ("{", "[") and problem.pos >= len(text.rstrip()) - 200
        why = "it was cut off, its last bytes are missing" if is_cut else problem
        raise refused(why) from None
    except ValueError as problem:  # of int, and of the name of a file
        is_number = bool(text)
        raise refused("a number in it has thousands of digits" if is_number else problem) from None


@contextmanager
def checking(path: Path) -> Iterator[None]:
    """Turns ``Wrong`` in the block into an ``Unreadable`` that names the file."""
    try:
        yield
    except Wrong as problem:
        raise Unreadable(f"{path}: {problem}") from None


# ---- schemas ---------------------------------------------------------------------------------


class Kind:
    """A kind of values. ``words`` describe it after "it must be". ``fits`` is fast, since most
    values of a long file fit; ``wrong`` finds the place of one that does not."""

    def __init__(self, words: str, fits: Callable[[Any], bool]) -> None:
        self.words, self.fits = words, fits

    def check(self, value: Any, where: Where = ()) -> None:
        """Raises ``Wrong`` unless it fits."""
        if not self.fits(value):
            raise self.wrong(value, where)

    def wrong(self, value: Any, where: Where) -> Wrong:
        return Wrong(where, f"is {shown(value)}; it must be {self.words}")


class ListOf(Kind):
    """A list whose entries are all of one kind, and as many as ``count`` where it is given."""

    def __init__(self, kind: Kind, count: int | None = None) -> None:
        self._kind, self._count = kind, count
        super().__init__("a list" if count is None else f"a list of {count}", self._fits)

    def _fits(self, value: Any) -> bool:
        return self._is_list(value) and all(map(self._kind.fits, value))

    def _is_list(self, value: Any) -> bool:
        return type(value) is list and self._count in (None, len(value))

    def wrong(self, value: Any, where: Where) -> Wrong:
        for index, entry in enumerate(value if self._is_list(value) else ()):
            if not self._kind.fits(entry):
                return self._kind.wrong(entry, (*where, index))
        return super().wrong(value, where)


class MapOf(Kind):
    """An object whose values are all of one kind."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        super().__init__("an object", lambda x: type(x) is dict and all(map(kind.fits, x.values())))

    def wrong(self, value: Any, where: Where) -> Wrong:
        for name, entry in value.items() if type(value) is dict else ():
            if not self._kind.fits(entry):
                return self._kind.wrong(entry, (*where, name))
        return super().wrong(value, where)


class Fields(Kind):
    """An object that has the fields of ``needed`` and may have ``others``. A field that neither
    names may hold anything. ``agree`` returns what is wrong between fields that fit, or ""."""

    def __init__(
        self,
        needed: Mapping[str, Kind],
        others: Mapping[str, Kind] | None = None,
        agree: Callable[[dict[str, Any]], str] | None = None,
    ) -> None:
        self._kinds = {**needed, **(others or {})}
        self._needed, self._agree = needed.keys(), agree
        fits_of = {name: kind.fits for name, kind in self._kinds.items()}

        def fits(value: Any) -> bool:
            if type(value) is not dict or not value.keys() >= self._needed:
                return False
            for name, entry in value.items():
                if name in fits_of and not fits_of[name](entry):
                    return False
            return agree is None or not agree(value)

        super().__init__("an object", fits)

    def wrong(self, value: Any, where: Where) -> Wrong:
        if type(value) is not dict:
            return super().wrong(value, where)
        for name, kind in self._kinds.items():
            if name in value and not kind.fits(value[name]):
                return kind.wrong(value[name], (*where, name))
        for name in self._needed:
            if name not in value:
                return Wrong(where, f"has no {name!r}")
        return Wrong(where, self._agree(value) if self._agree else "is not right")


def whole(least: int = 0, most: int = _MOST) -> Kind:
    bound = "" if most == _MOST else f" and at most {most}"
    return Kind(
        f"a whole number, at least {least}{bound}",
        lambda value: type(value) is int and least <= value <= most,
    )


def number(least: float, most: float, words: str) -> Kind:
    """A number in this range, which excludes NaN and infinity."""
    return Kind(words, lambda value: type(value) in (int, float) and least <= value <= most)


def or_null(kind: Kind) -> Kind:
    return Kind(f"{kind.words}, or null", lambda value: value is None or kind.fits(value))


ANY_WHOLE = Kind(
    "a whole number of at most 62 bits", lambda value: type(value) is int and abs(value) <= _MOST
)
TEXT = Kind("a text that UTF-8 has", lambda value: type(value) is str and _is_in_utf8(value))
TRUTH = Kind("true or false", lambda value: type(value) is bool)
PLAIN = Kind("a text or a number", lambda value: not isinstance(value, dict | list))


def _is_in_utf8(text: str) -> bool:
    """Whether a text can be encoded. JSON may contain half of a surrogate pair."""
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)


def place_of(where: Where) -> str:
    """
    >>> place_of(("traceEvents", 17, "args", "bytes"))
    'traceEvents[17].args.bytes'
    """
    parts = (f"[{step}]" if isinstance(step, int) else f".{step[:_SHOWN]}" for step in where)
    return "".join(parts).removeprefix(".") or "its content"


def shown(value: Any) -> str:
    """A value as JSON, cut if it is long.

    >>> shown(float("nan")), shown([1]), shown(None), shown("ring")
    ('NaN', 'a list', 'null', '"ring"')
    """
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
