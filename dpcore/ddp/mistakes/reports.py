"""How a mistake is told. There are three grades:

``prove``  a cause was seen on this rank, and what it leads to as well: an error.
``warn``   one of the two is missing: a ``dpcore.MistakeWarning``, once for each kind.
``note``   right programs do it, too: a line in ``notes``, and nothing else.

``mistakes=`` of ``DataParallel``, or DPCORE_MISTAKES, shifts the grades: "all" warns of notes as
well, "raise" raises what would be a warning, and "ignore" looks for nothing.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import torch

from dpcore.base.switch import is_on
from dpcore.errors import Error, Mismatch, MistakeWarning, Unsupported

MODES = ("warn", "all", "raise", "ignore")
_LIBRARIES = (str(Path(__file__).parents[2]), str(Path(torch.__file__).parent))


def mode_of(asked: str | None) -> str:
    """The argument, or else DPCORE_MISTAKES, or else "warn"."""
    where, mode = ("mistakes", asked) if asked is not None else ("DPCORE_MISTAKES", _wanted())
    if mode not in MODES:
        raise Unsupported(f"{where}={mode!r}: use one of {', '.join(MODES)}")
    return mode


def _wanted() -> str:
    return os.environ.get("DPCORE_MISTAKES") or "warn"


def _level_of_program() -> int:
    """How far above the caller the program's own code is."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        level, frame = level + 1, frame.f_back
    return level


class Reports:
    """The mistakes of one wrapped model, as this rank has told them."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        is_asked = is_on("DPCORE_CHECK_FINITE")
        # For NaN and Inf, also where no sum of dpcore's own has done it.
        self.looks_at_all_gradients = self.is_on and (is_asked or mode == "all")
        self.notes: list[str] = []
        self._told: set[str] = set()  # kinds

    @property
    def is_on(self) -> bool:
        """Whether anything looks for mistakes."""
        return self.mode != "ignore"

    def prove(self, kind: str, text: str) -> None:
        """Raises: ranks train different models from here on."""
        if self.is_on:
            self._told.add(kind)
            raise Mismatch(text)

    def warn(self, kind: str, text: str) -> None:
        """Warns, once for each kind."""
        if not self.is_on or kind in self._told:
            return
        self._told.add(kind)
        if self.mode == "raise":
            raise Error(text)
        warnings.warn(text, MistakeWarning, stacklevel=_level_of_program())

    def note(self, kind: str, text: str) -> None:
        """Keeps a line for ``dpcore.check``, ``bucket_report()`` and the monitor."""
        if not self.is_on or kind in self._told:
            return
        if self.mode == "all":
            self.warn(kind, text)
            return
        self._told.add(kind)
        self.notes.append(text)
