"""The schedules of ``dpcore simulate``: names, and ``mine.py:MySchedule`` of your own."""

from __future__ import annotations

from typing import Any

from dpcore.base.user_code import loaded, names_code
from dpcore.errors import Unsupported


def named_or_own(text: str) -> Any:
    """A name as it is; FILE:NAME as what the file calls so."""
    if not names_code(text):
        return text
    found = loaded(text, "MySchedule")
    if not all(callable(getattr(found, name, None)) for name in ("listens_to", "order", "caps")):
        raise Unsupported(
            f"{text} is a {type(found).__name__}; a dpcore.LaunchSchedule is needed, the class or "
            "an object of it"
        )
    return found
