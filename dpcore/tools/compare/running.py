"""Measures the cells of a plan, round by round, and keeps every round as it ends."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from statistics import mean
from typing import Any

from rich.console import Console

from dpcore.tools.compare.devices import BACKENDS
from dpcore.tools.compare.plan import Cell, Plan
from dpcore.tools.compare.store import Store
from dpcore.tools.compare.training.start import RankFailed, run_job, shaped_hosts
from dpcore.tools.compare.training.worker import Job
from dpcore.tools.hosts import burst_of
from dpcore.tools.progress import Shown, shown


def measure(plan: Plan, store: Store, console: Console) -> None:
    """All rounds that are missing."""
    missing = {cell: plan.rounds - len(store.rounds.get(cell.key, [])) for cell in plan.cells}
    todo = {cell: count for cell, count in missing.items() if count > 0}
    with shown(console, sum(todo.values())) as bar:
        for cell, count in todo.items():
            if not bar.is_drawn:
                bar.say(f"measuring {cell.title}: {count} rounds")
            _measure_cell(plan, cell, store, bar)


def _measure_cell(plan: Plan, cell: Cell, store: Store, bar: Shown) -> None:
    first = len(store.rounds.get(cell.key, []))
    names = {one.inner: one.name for one in plan.entrants(cell)}
    ranks = "1 rank" if cell.world == 1 else f"{cell.world} ranks"
    where = f"{ranks}, {cell.link or 'this machine'}"
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
            bar.at(f"{where}: round {number + 1} of {plan.rounds}")
            bar.advance()

    job = Job(
        plan.model, plan.turns(cell), plan.rounds, steps=1, folder="", world=cell.world,
        seconds=plan.seconds, optimizer=plan.optimizer, every=plan.every, threads=plan.threads,
        first_round=first, by_round=True, init=_init(cell), device=plan.device, amp=plan.amp,
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
    kept = ("choices", "unused", "gradient_bytes", "steps", "threads", "taken")
    losses = {name: ended(of_ranks, result["steps"]) for name, of_ranks in result["losses"].items()}
    memory = {name: max(map(max, of_ranks)) for name, of_ranks in result["memory"].items()}
    kept_too = {"losses": losses, "memory": memory}
    store.add(cell=cell.key, result={key: result[key] for key in kept} | kept_too)


def ended(of_ranks: Sequence[Sequence[float]], steps: int) -> float | None:
    """The mean loss of the last round, over its steps and over ranks; None where it is unknown."""
    value = mean(mean(losses[-steps:]) for losses in of_ranks)
    return value if math.isfinite(value) else None


def _init(cell: Cell) -> dict[str, Any]:
    if cell.kind == "hosts":
        return {"transport": "tcp"}
    if cell.kind in BACKENDS:
        return {"backend": BACKENDS[cell.kind]}
    return {"link": cell.link} if cell.kind == "emulated" else {}
