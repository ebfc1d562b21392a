"""``dpcore show run.json [other.json]``: page, picture, tables, numbers; ``dpcore show ring``."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from dpcore.base.user_code import is_own, names_code, place_of
from dpcore.errors import Unsupported
from dpcore.reference import Schedule, describe
from dpcore.reference.plans import chakra
from dpcore.tools.flight_recorder import Called, write_dumps
from dpcore.tools.show import moves
from dpcore.tools.show.figures import RunFigures, figures_of
from dpcore.tools.show.kineto import export
from dpcore.tools.show.page import write_moves_page, write_page
from dpcore.tools.show.picture import write_picture
from dpcore.tools.show.reading import read_runs
from dpcore.tools.show.rows import csv_text, write_csv
from dpcore.tools.show.run import Run
from dpcore.tools.show.schedules import can_be_followed
from dpcore.tools.show.tables import print_tables


def run(options: argparse.Namespace) -> int:
    """Does what the command line asks for; the exit status."""
    if moves.is_meant(options.trace):
        return _run_moves(options)
    if any(trace.suffix == ".et" for trace in options.trace):
        for trace in options.trace:
            print(f"{trace}: {chakra.in_words(chakra.read(trace))}")
        return 0
    _refuse_what_is_of_algorithms(options)
    only_data = options.json or options.csv is not None or options.export is not None
    _refuse_what_would_do_nothing(options, only_data)
    runs = read_runs(options.trace)
    figures = [figures_of(trace) for trace in runs]
    advice = importlib.import_module(options.advice)  # which reads runs by modules of this room
    page = options.html or (None if only_data else beside(runs[0], ".html"))
    written = [path for path in (page, options.png) if path is not None]
    _refuse_to_overwrite([*written, options.csv], options.trace)
    if page is not None:
        write_page(page, runs, advice.lines_of)
    if options.png is not None:
        write_picture(options.png, runs, options.steps)
    if options.export is not None:
        write = export if options.export == "kineto" else _write_calls
        ending = f".{options.export}"
        written += [path for run in runs for path in write(run, beside(run, ending))]
    if options.csv is not None and options.csv != Path("-"):
        write_csv(options.csv, runs)
        written.append(options.csv)
    if options.csv == Path("-"):
        sys.stdout.write(csv_text(runs))
    elif options.json:
        _print_json(figures)
    elif only_data:
        print(*(f"wrote {path}" for path in written), sep="\n")
    else:
        _print_tables(runs, figures, written, advice.lines_of)
    if options.open and page is not None:
        _open(page)
    return 0


def _refuse_to_overwrite(outputs: Sequence[Path | None], traces: Sequence[Path]) -> None:
    """What is read, and what is written by the same call."""
    names = [path.resolve() for path in outputs if path is not None and path != Path("-")]
    read = {trace.resolve() for trace in traces}
    for name in names:
        if name in read or (name.parent in read and name.suffix in (".json", ".gz")):
            raise Unsupported(f"{name} is read here; write to another file")
        if names.count(name) > 1:
            raise Unsupported(f"two outputs go to {name}; write each to a file of its own")


def _run_moves(options: argparse.Namespace) -> int:
    (name,) = map(str, options.trace)
    is_written = options.export == "chakra"
    for other in ("png", "steps", "csv", *(() if is_written else ("export",)), "json"):
        if getattr(options, other):
            raise Unsupported(f"--{other} is for a trace, and {name} is an algorithm")
    for one in ("world", "collective"):
        if len(getattr(options, one) or [0]) > 1:
            raise Unsupported(f"--{one}: a page steps through one; write one")
    (collective,), (world,) = options.collective or [None], options.world or [None]
    plan = moves.asked(name, collective, world, drawn=not is_written)
    own = name if is_own(name) else ""
    called = name.rpartition(":")[2] if names_code(name) else Path(name).stem
    if is_written:
        return _write_graphs(options, plan, called)
    if options.sizes is not None:
        raise Unsupported("--sizes is for --export chakra")
    print(describe(plan), end="")
    if not can_be_followed(plan):
        print(f"no page: {plan.chunks} chunks on {plan.world} ranks are more than one can follow")
        return 0
    page = options.html or Path(f"{called}.html")
    write_moves_page(page, plan, own)
    print(f"wrote {page}")
    if options.open:
        _open(page)
    return 0


def _write_graphs(options: argparse.Namespace, plan: Schedule, called: str) -> int:
    (size, *more) = options.sizes or (1 << 20,)
    if more or options.html or options.open:
        raise Unsupported("--export chakra writes files for one of --sizes, and no page")
    written = chakra.write(plan, size, Path(f"{called}.chakra"))
    print(f"wrote {written[0].with_suffix('').with_suffix('')}.RANK.et for {plan.world} ranks")
    return 0


def _write_calls(run: Run, folder: Path) -> list[Path]:
    """The operations of all ranks together, for the analyser of torch's flight recorder."""
    calls = {
        rank.rank: [
            Called(0, event.operation, event.name, "", event.bytes, event.begin_ns, event.end_ns)
            for event in rank.operations
            if event.world in (0, run.world_size)
        ]
        for rank in run.ranks
    }
    return write_dumps(folder, calls, {0: range(run.world_size)})


def _refuse_what_is_of_algorithms(options: argparse.Namespace) -> None:
    known = ", ".join(moves.algorithms())
    for name in ("world", "collective", "sizes"):
        if getattr(options, name) is not None:
            raise Unsupported(f"--{name} is for an algorithm, not for a trace: {known}")
    if options.export == "chakra":
        raise Unsupported(f"--export chakra is for an algorithm, not for a trace: {known}")
    for given in map(str, options.trace):
        if names_code(given) and place_of(given).endswith(".py") and not os.path.exists(given):
            raise Unsupported(f"{given} is an algorithm of your own, which is shown by itself")
    first = options.trace[0]
    if len(options.trace) == 1 and not first.suffix and not os.path.exists(first):
        raise Unsupported(f"there is no file {first}, and no algorithm of that name: {known}")


def _refuse_what_would_do_nothing(options: argparse.Namespace, only_data: bool) -> None:
    if options.steps is not None and options.png is None:
        raise Unsupported("--steps is for a picture: add --png FILE")
    if options.open and only_data and options.html is None:
        raise Unsupported("--open needs a page: add --html FILE")
    if options.json and options.csv == Path("-"):
        raise Unsupported("--json and --csv - both print: leave one out")


def _open(page: Path) -> None:
    import webbrowser

    webbrowser.open(page.resolve().as_uri())


def beside(run: Run, ending: str) -> Path:
    """Where something made of a run lies unless told otherwise: beside its trace."""
    return run.path.with_name(run.name + ending)


def _print_json(figures: Sequence[RunFigures]) -> None:
    json.dump([entry.as_json() for entry in figures], sys.stdout, indent=1)
    print()


def _print_tables(
    runs: Sequence[Run],
    figures: Sequence[RunFigures],
    written: Sequence[Path],
    advice_lines: Callable[[Run], Sequence[str]],
) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120
    for trace, numbers in zip(runs, figures, strict=True):
        headline = f"{trace.name}: {numbers.headline}"
        console.print(headline, style="bold", markup=False, soft_wrap=True)
        if trace.about:
            console.print(trace.about, markup=False, soft_wrap=True)
        if trace.error:
            console.print(f"it ended with {trace.error}", style="red", markup=False, soft_wrap=True)
        for line in (line for model in trace.models for line in model.get("compiled", ())):
            console.print(line, markup=False, soft_wrap=True)
        console.print()
        print_tables(console, trace, numbers)
        for line in (*(said := advice_lines(trace)), *[""] * bool(said)):
            console.print(line, markup=False, soft_wrap=True)
    for path in written:
        console.print(f"wrote {path}", markup=False, soft_wrap=True)
