"""``mine.py:MySchedule``: a launch schedule that somebody has written in a file."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from dpcore.errors import Unsupported


def named_or_own(text: str) -> Any:
    """A name as it is; FILE:NAME as what the file calls so."""
    if ":" not in text:
        return text
    file, _, name = text.rpartition(":")
    found = getattr(_module_of(Path(file)), name, None)
    if not hasattr(found, "listens_to"):
        what = "does not define it" if found is None else f"has a {type(found).__name__} there"
        raise Unsupported(
            f"{text}: a class or an object of dpcore.LaunchSchedule is needed, but {file} {what}"
        )
    return found


def _module_of(path: Path) -> Any:
    if not path.is_file():
        raise Unsupported(f"{path}: there is no such file; expected FILE.py:NAME")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise Unsupported(f"{path} is no file of Python; expected FILE.py:NAME")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))  # so that it finds its neighbours
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module
