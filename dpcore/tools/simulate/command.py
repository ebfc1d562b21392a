"""``dpcore simulate run.json --link 1gbit,50us``: a table of predictions."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from dpcore.base.link import parse_speed
from dpcore.base.markup import short
from dpcore.base.user_code import loaded, names_code
from dpcore.errors import Unsupported
from dpcore.reference import algorithms_of
from dpcore.reference.launches import ACROSS_STEPS, CAPPED, SCHEDULES
from dpcore.tools.argument_types import name_and_cap
from dpcore.tools.simulate.gradients import Gradients, gradients_of
from dpcore.tools.simulate.training import Prediction, predict


def run(options: argparse.Namespace) -> int:
    """Predicts and prints; the exit status."""
    recorded = gradients_of(*options.gradients)
    if unknown := [name for name in options.algorithm if name not in algorithms_of("all_reduce")]:
        known = ", ".join(algorithms_of("all_reduce"))
        raise Unsupported(f"--algorithm {', '.join(unknown)}: choose from {known}")
    if "" in options.link:
        raise Unsupported("--link none: a prediction is for a link, such as 1gbit,50us")
    schedules = [_schedule_and_cap(text) for text in options.schedule]
    lines = []
    for world in options.world or [max(2, recorded.world)]:
        work = recorded.on(world)
        for link in options.link:
            predictions = [
                predict(work, parse_speed(link), schedule, cap, algorithm)
                for schedule, cap in schedules
                for algorithm in options.algorithm[: 1 if schedule == "oracle" else None]
            ]
            lines += [{"link": link, "world": world} | asdict(one) for one in predictions]
            if not options.json:
                _tell(work, link, predictions)
    if options.json:
        json.dump(lines, sys.stdout, indent=1)
        print()
    return 0


def _schedule_and_cap(text: str) -> tuple[Any, float | None]:
    name, cap = name_and_cap(text, (*SCHEDULES, *ACROSS_STEPS))
    if cap == "auto":
        raise Unsupported(f"--schedule {text}: a prediction needs a size in MiB, such as {name}:25")
    return named_or_own(name), float(cap) if cap else None


def _tell(work: Gradients, link: str, predictions: Sequence[Prediction]) -> None:
    nbytes = sum(work.sizes)
    bound_ms = min(one.bound_ms for one in predictions)
    print(
        f"{len(work.sizes)} gradients of {nbytes / 2**20:.1f} MiB, {work.world} ranks, "
        f"link {link}. Forward and backward take at least "
        f"{short(work.compute_seconds * 1e3)} ms; with communication over this link no "
        f"step is shorter than {short(bound_ms)} ms"
    )
    _print_table(predictions)


def _print_table(predictions: Sequence[Prediction]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(box=None)
    columns = ("schedule", "algorithm", "cap MiB", "buckets", "step ms", "exposed ms", "of bound")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < 2 else "right")
    for line in predictions:
        table.add_row(
            line.schedule,
            line.algorithm,
            _caps_of(line),
            str(line.buckets),
            short(line.step_ms),
            short(line.exposed_ms),
            f"{line.step_ms / line.bound_ms:.2f}" if line.bound_ms else "–",
        )
    console.print(table)


def _caps_of(line: Prediction) -> str:
    if line.schedule in SCHEDULES and line.schedule not in CAPPED:
        return "–"
    return ", ".join(f"{cap:g}" for cap in line.caps_mb)


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
