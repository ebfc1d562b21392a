"""Where a comparison is: a bar that is drawn over and over on a terminal, else lines alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text


class Shown:
    """Lines that stay, above the bar where there is one."""

    def __init__(self, console: Console, bar: Progress | None, total: int) -> None:
        self._console, self._bar = console, bar
        self._task = bar.add_task("", total=total) if bar else None

    @property
    def is_drawn(self) -> bool:
        return self._bar is not None

    def say(self, text: str, style: str = "") -> None:
        if self._console.is_terminal:
            self._console.print(Text(text, style=style), soft_wrap=True)
        else:
            print(text, flush=True, file=self._console.file)

    def at(self, text: str) -> None:
        """What the bar says."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=text)
            self._bar.refresh()

    def advance(self) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task)
            self._bar.refresh()


@contextmanager
def shown(console: Console, total: int) -> Iterator[Shown]:
    if not console.is_terminal:
        yield Shown(console, None, total)
        return
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TimeRemainingColumn())
    # Drawn between turns only: a thread that redraws would run beside what is measured.
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as bar:
        yield Shown(console, bar, total)
