"""What rooms above plug into rooms below, which never import them.

The core works without ``tools`` and ``school``: where it would use them, it calls a function of
this module. ``dpcore/__init__.py`` puts functions here that import what they need when they are
called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _nothing(*_: Any) -> None:
    return None


# A communicator was made, by a name for its ranks, which did not begin to meet before a time.
communicator_made: Callable[[Any, str, int], None] = _nothing

# This process has waited for long, in an operation with this timeout.
waits_for_long: Callable[[float], None] = _nothing

# The HTML page of a trace: of a file, or of what would be written to one.
page_of_trace: Callable[[Any], str | None] = _nothing

# HTML for a schedule, move by move, or None where it cannot be drawn.
page_of_schedule: Callable[[Any], str | None] = _nothing
