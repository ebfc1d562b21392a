"""What a notebook and its ranks tell each other, pickled through one pipe per rank."""

from __future__ import annotations

from dataclasses import dataclass, field

# ---- to a rank -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """Run this, and send these variables."""

    number: int
    source: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Meet:
    """Leave the communicator, if there is one, and make another one under this name."""

    rendezvous: str


@dataclass(frozen=True)
class Abort:
    """Tell the other ranks that nothing more comes from this one, also while a cell runs."""

    reason: str


# ---- from a rank ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Printed:
    """Whole lines, but for the last ones of a cell. ``stream``: stdout or stderr."""

    stream: str
    text: str


@dataclass(frozen=True)
class Shown:
    """Something that a browser draws."""

    html: str
    text: str


@dataclass(frozen=True)
class Problem:
    """An error of a cell."""

    kind: str
    message: str
    traceback: str  # from the cell on
    at: float  # time.monotonic(), the same for all ranks

    @property
    def line(self) -> str:
        return f"{self.kind}: {self.message}" if self.message else self.kind


@dataclass(frozen=True)
class Done:
    """What was asked for has ended."""

    problem: Problem | None = None
    text: str | None = None  # the last expression of the cell, if it has a value
    html: str | None = None
    values: dict[str, bytes] = field(default_factory=dict)  # of the variables, each pickled
    # Of the communicator: what it has run, and whether it can run more.
    operations: dict[str, int] = field(default_factory=dict)
    is_usable: bool = True
