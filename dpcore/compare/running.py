"""Measures the cells of a plan, round by round, and keeps every round as it ends."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from dpcore.compare.hosts import burst_of
from dpcore.compare.plan import Cell, Plan
from dpcore.compare.store import Store
from dpcore.compare.training.start import RankFailed, run_job, shaped_hosts
from dpcore.compare.training.worker import Job


class Shown:
    """Where the run is: a line that is drawn over and over on a terminal, else a line per cell."""

    def __init__(self, console: Console, bar: Progress | None, total: int) -> None:
        self._console, self._bar = console, bar
        self._task = bar.add_task("", total=total) if bar else None

    def cell(self, title: str, rounds: int) -> None:
        if self._bar is None:
            self._console.print(f"measuring {title}: {rounds} rounds", soft_wrap=True)

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def at(self, text: str, advance: int = 0) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=text, advance=advance)
            self._bar.refresh()


@contextmanager
def shown(console: Console, total: int) -> Iterator[Shown]:
    if not console.is_terminal:
        yield Shown(console, None, total)
        return
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TimeRemainingColumn())
    # Drawn between rounds only: a thread that redraws would run beside what is measured.
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as bar:
        yield Shown(console, bar, total)


def measure(plan: Plan, store: Store, console: Console) -> None:
    """All rounds that are missing."""
    missing = {cell: plan.rounds - len(store.rounds.get(cell.key, [])) for cell in plan.cells}
    todo = {cell: count for cell, count in missing.items() if count > 0}
    with shown(console, sum(todo.values())) as bar:
        for cell, count in todo.items():
            bar.cell(cell.title, count)
            _measure_cell(plan, cell, store, bar)


def _measure_cell(plan: Plan, cell: Cell, store: Store, bar: Shown) -> None:
    first = len(store.rounds.get(cell.key, []))
    names = {one.inner: one.name for one in plan.entrants(cell)}
    where = f"{cell.world} ranks, {cell.link or 'this machine'}"
    bar.at(f"{where}: starting")

    def on_line(line: dict[str, Any]) -> None:
        if "warming" in line:
            name = names.get(line["warming"], "references")
            bar.at(f"{where}: {name} warms up, {line['at'] + 1} of {line['of']}")
        elif "result" in line:
            result.update(line["result"])
        elif "round" in line:
            number = line.pop("round")
            store.add(cell=cell.key, round=line | {"at": time.time()})
            bar.at(f"{where}: round {number + 1} of {plan.rounds}", advance=1)

    job = Job(
        plan.model, plan.turns(cell), plan.rounds, steps=1, folder="", world=cell.world,
        seconds=plan.seconds, optimizer=False, threads=plan.threads, first_round=first,
        by_round=True, init=_init(cell),
    )  # fmt: skip
    result: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        hosts = None
        if cell.kind == "hosts":
            rate = cell.link
            hosts = stack.enter_context(shaped_hosts(rate, burst_of(rate), cell.world))
        try:
            result = run_job(job, on_line, hosts)
        except RankFailed as problem:
            if not result:
                raise
            bar.say(f"everything was measured, but a rank crashed as it ended: {problem}".rstrip())
    kept = ("choices", "unused", "gradient_bytes", "steps", "threads")
    store.add(cell=cell.key, result={key: result[key] for key in kept})


def _init(cell: Cell) -> dict[str, Any]:
    if cell.kind == "hosts":
        return {"transport": "tcp"}
    return {"link": cell.link} if cell.kind == "emulated" else {}
