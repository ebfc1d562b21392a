"""One run of a script: starts contenders, goes through the cells, shows and keeps the figures."""

from __future__ import annotations

import itertools
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from dpcore.commands.sizes import size_text
from dpcore.compare.collectives import table
from dpcore.compare.collectives.cells import Cell, cells_of
from dpcore.compare.collectives.contenders import Contender
from dpcore.compare.collectives.interleave import Field, Measurement
from dpcore.compare.collectives.leftovers import private_folder
from dpcore.compare.collectives.options import Options
from dpcore.compare.collectives.summary import records, total_wrong
from dpcore.compare.collectives.wires import LOOPBACK, wire
from dpcore.compare.records import append, run_facts

Run = list[Measurement]  # one cell, all contenders
AWAKE_LIMIT = 0.05  # cores; more means that an idle group disturbed the others


def run(
    contenders: Sequence[Contender],
    collectives: Sequence[str],
    options: Options,
    link: str = LOOPBACK.name,
    quiet: bool = False,
) -> list[Run]:
    """Everything asked for. What is missing is reported, and is not an error."""
    _end_in_order_on_signals()
    console = Console(highlight=False, stderr=quiet)
    runs: list[Run] = []
    cells = {world: cells_of(collectives, options.sizes, world) for world in options.worlds}
    turns = len(contenders) * (options.pace.rounds + 2)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
    with (
        private_folder() as folder,
        _progress(console, turns * sum(map(len, cells.values()))) as progress,
    ):
        for world, of_world in cells.items():
            progress.say(f"starting {world} ranks of each contender", kept=False)
            with (
                wire(link, world) as between,
                Field(contenders, world, folder, options.huge_pages, between) as field,
            ):
                for group, reason in field.absent.items():
                    progress.say(f"# without {group}: {reason}")
                facts = run_facts(field.versions(), options.settings() | {"link": link})
                for _, group_of in itertools.groupby(of_world, lambda c: c.collective):
                    for number, cell in enumerate(group_of):
                        progress.at(cell)
                        run = field.measure(cell, options.pace, progress.advance)
                        runs.append(run)
                        if number == 0:
                            progress.lines(table.heading(cell, options.pace.rounds))
                        progress.rows(table.lines(run))
                        if options.json:
                            append(options.json, records(facts, run))
                    progress.say("")
                for group, cores in field.awake_share().items():
                    if cores > AWAKE_LIMIT:
                        progress.say(
                            f"# {group} used {cores:.2f} cores while others measured: "
                            "their figures are too slow"
                        )
    return runs


def start(main: Callable[[], int]) -> NoReturn:
    """Runs a script; Ctrl-C ends it without a traceback, after all ranks have ended."""
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted; all ranks are ended", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


def exit_status(runs: Sequence[Run]) -> int:
    wrong = sum(total_wrong(run) for run in runs)
    if wrong:
        print(f"{wrong} elements were wrong", file=sys.stderr)
    return 1 if wrong else 0


class _Shown:
    """Lines as cells end; above a bar where there is a terminal."""

    def __init__(self, console: Console, bar: Progress | None, total: int) -> None:
        self._console, self._bar = console, bar
        self._task = bar.add_task("", total=total) if bar else None

    def say(self, text: str, style: str = "", kept: bool = True) -> None:
        if self._bar and not kept:
            self._describe(text)
        elif self._console.is_terminal:
            self._console.print(Text(text, style=style), soft_wrap=True)
        else:
            print(text, flush=True, file=self._console.file)

    def lines(self, texts: Sequence[str]) -> None:
        for text in texts:
            self.say(text)

    def rows(self, rows: Sequence[tuple[str, str]]) -> None:
        for text, style in rows:
            self.say(text, style)

    def at(self, cell: Cell) -> None:
        if self._bar:
            self._describe(f"{cell.collective} {size_text(cell.bytes)}, {cell.world} ranks")

    def advance(self) -> None:
        if self._bar and self._task is not None:
            self._bar.advance(self._task)
            self._bar.refresh()

    def _describe(self, text: str) -> None:
        if self._bar and self._task is not None:
            self._bar.update(self._task, description=text)
            self._bar.refresh()


@contextmanager
def _progress(console: Console, total: int) -> Iterator[_Shown]:
    if not console.is_terminal:
        yield _Shown(console, None, total)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    # Drawn between turns only: a thread that redraws would run beside what is measured.
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as bar:
        yield _Shown(console, bar, total)


def _end_in_order_on_signals() -> None:
    """A terminated run leaves through its `finally` blocks and so ends all ranks."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
