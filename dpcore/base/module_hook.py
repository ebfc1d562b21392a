"""A hook that stays behind when the module, or the optimizer, that it hangs on is copied.

Both kinds of object copy their hooks by pickle and deepcopy. Here because the schedules across
steps and what looks for mistakes need it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class ModuleHook:
    """A hook on a module. In a copy of the module, by pickle or deepcopy, it does nothing."""

    def __init__(self, call: Callable[[], None] | None = None) -> None:
        self._call = call

    def __call__(self, *_: Any) -> None:
        if self._call is not None:
            self._call()

    def __reduce__(self) -> Any:
        return ModuleHook, ()
