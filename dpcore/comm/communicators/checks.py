"""Mistakes in the arguments of a collective that every kind of communicator finds in Python.

The texts are the contract's: what is wrong, what was expected, and what to pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any

from dpcore.errors import Unsupported

OPERATORS = ("sum", "mean", "prod", "min", "max", "band", "bor", "bxor", "premul_sum")

# Every keyword option of the contract that some kind may lack, and its default.
_DEFAULTS = {
    "algorithm": None,
    "priority": 0,
    "timeout": 0.0,
    "factor": 1.0,
    "layout": 0,
    "tag": 0,
}


def check_integer(value: Any, role: str, least: int = -(2**31), most: int = 2**31 - 1) -> int:
    """The value as Python's own; it may be numpy's, or a tensor of one element.

    >>> check_integer(True, "root"), check_integer(2**40, "nbytes", most=2**63 - 1)
    (1, 1099511627776)
    """
    try:
        number = index(value)
    except TypeError:  # of arrays as well: they have __index__, which fails
        raise TypeError(f"{role}: expected an integer, not {value!r}") from None
    if not least <= number <= most:
        raise ValueError(f"{role} {number} is out of range: {least}..{most}")
    return number


def _is_flag(value: Any) -> bool:
    return type(value).__name__ in ("bool", "bool_", "int")  # numpy has its own


def is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # torch's for several elements
        return False
    return not isinstance(value, str | bytes | bytearray)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)


_IS = {"True or False": _is_flag, "a number": is_number, "a string": _is_text}


def check_is(kind: str, or_none: bool = False, **values: Any) -> None:
    """``kind``: "True or False", "a number" or "a string".

    >>> check_is("a number", timeout="3")
    Traceback (most recent call last):
    TypeError: timeout: expected a number, not '3'
    """
    for name, value in values.items():
        if not _IS[kind](value) and not (or_none and value is None):
            raise TypeError(
                f"{name}: expected {kind}{' or None' if or_none else ''}, not {value!r}"
            )


def check_rank(rank: int, world_size: int, role: str) -> None:
    """``role``: "root", ..."""
    check_integer(rank, role)
    if not 0 <= rank < world_size:
        raise ValueError(f"{role} {rank} is not a rank: 0..{world_size - 1}")


def check_peer(peer: int, rank: int, world_size: int) -> None:
    """The other rank of a message."""
    check_integer(peer, "the other rank")
    if not 0 <= peer < world_size or peer == rank:
        raise Unsupported(
            f"rank {rank} can't exchange a message with {peer}: choose another rank of "
            f"0..{world_size - 1}"
        )


def check_presence(buffer: Any, role: str, rank: int, root: int) -> None:
    """A buffer that the root alone has."""
    if (buffer is None) == (rank == root):
        wanted = "must be given" if rank == root else "must be None"
        raise ValueError(f"rank {rank}: {role} {wanted} here (root is {root})")


def check_groups(color: int | None, key: int) -> None:
    """What is given to ``split``."""
    check_integer(key, "key")
    if color is not None and check_integer(color, "color") < 0:
        raise Unsupported(f"color {color} is negative; pass None to be in no group")


def check_both(output_sizes: Sequence[int] | None, input_sizes: Sequence[int] | None) -> None:
    """The two lists of ``all_to_all``."""
    if (output_sizes is None) != (input_sizes is None):
        raise ValueError("give both output_sizes and input_sizes, or neither")


def check_timeout(timeout: float) -> None:
    """Seconds; 0 stands for the communicator's."""
    if not isinstance(timeout, int | float) or not timeout >= 0:
        raise TypeError(f"timeout: expected seconds, or 0 for the communicator's, not {timeout!r}")


def check_wait(timeout: float | None) -> None:
    """The timeout that is given to a handle's ``wait``."""
    check_is("a number", or_none=True, timeout=timeout)
    if timeout is not None and not timeout >= 0:
        raise Unsupported(
            f"timeout {timeout}: wait() takes seconds, or 0 for the operation's own deadline"
        )


def expect(have: int, want: int, role: str) -> None:
    """Elements of a buffer."""
    if have != want:
        raise Unsupported(f"{role} has {have} elements, {want} are needed")


def lengths_of(sizes: Sequence[int] | None, each: int, world_size: int) -> list[int]:
    """Elements in each rank's part: ``sizes``, or ``each`` everywhere."""
    if sizes is None:
        return [each] * world_size
    if len(sizes) != world_size:
        raise Unsupported(f"sizes has {len(sizes)} entries, {world_size} are needed: one per rank")
    try:
        lengths = [index(size) for size in sizes]
    except TypeError:
        lengths = [-1]
    if min(lengths) < 0:
        raise TypeError(f"sizes: expected integers that are not negative, not {list(sizes)!r}")
    return lengths


def refuse(options: Mapping[str, Any], who: str, instead: str = "") -> None:
    """The options that a kind does not have, by name, unless they have their default value."""
    asked = sorted(
        name
        for name, value in options.items()
        if value is not None and value != _DEFAULTS[name] and (name, value) != ("algorithm", "auto")
    )
    if asked:
        raise Unsupported(f"{who} has no {', '.join(asked)}{instead}")
