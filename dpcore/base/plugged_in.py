"""Hooks through which the core calls upper folders that it never imports.

The core works without ``tools`` and ``school``: to use them, it calls a function of this module.
``dpcore/__init__.py`` sets these to functions that import the upper folder when they are called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _nothing(*_: Any) -> None:
    return None


# A communicator was made: the rendezvous name of its ranks, and a time before their rendezvous.
communicator_made: Callable[[Any, str, int], None] = _nothing

# This process has waited for long, in an operation with this timeout.
waits_for_long: Callable[[float], None] = _nothing

# The HTML page of a trace: of a file, or of a name and the content of one.
page_of_trace: Callable[[Any], str | None] = _nothing

# HTML for a schedule, move by move, or None if it cannot be drawn.
page_of_schedule: Callable[[Any], str | None] = _nothing
