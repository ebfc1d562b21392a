"""What a check of ``dpcore doctor`` says."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

BUILD_AGAIN = "pip install --no-build-isolation --force-reinstall --no-deps ."


@dataclass(frozen=True)
class Finding:
    """What a check has found. ``state``: ok; missing (something optional is not there); trouble
    (dpcore does not work without it). ``advice``: what to do, empty when ok."""

    topic: str
    state: str
    text: str
    advice: str = ""
    details: Any = None


Check = Callable[[], Finding]


def version_of(package: str) -> str:
    """The version that is installed, or nothing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
