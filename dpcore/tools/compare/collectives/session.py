"""One run of a script: starts contenders, goes through the cells, shows and keeps the figures."""

from __future__ import annotations

import itertools
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from rich.console import Console

from dpcore.tools.compare.collectives import table
from dpcore.tools.compare.collectives.cells import cells_of
from dpcore.tools.compare.collectives.contenders import Contender
from dpcore.tools.compare.collectives.interleave import Field
from dpcore.tools.compare.collectives.leftovers import private_folder
from dpcore.tools.compare.collectives.loop import Measurement
from dpcore.tools.compare.collectives.options import Options
from dpcore.tools.compare.collectives.summary import records, total_wrong
from dpcore.tools.compare.collectives.wires import LOOPBACK, wire
from dpcore.tools.hosts import end_in_order_on_signals
from dpcore.tools.progress import shown
from dpcore.tools.records import append, run_facts
from dpcore.tools.sizes import size_text

Run = list[Measurement]  # one cell, all contenders
AWAKE_LIMIT = 0.05  # cores; more means that an idle group disturbed the others


def run(
    contenders: Sequence[Contender],
    collectives: Sequence[str],
    options: Options,
    link: str = LOOPBACK.name,
    quiet: bool = False,
) -> list[Run]:
    """Everything asked for. What is missing is reported; see `exit_status`."""
    end_in_order_on_signals()
    console = Console(highlight=False, stderr=quiet)
    runs: list[Run] = []
    cells = {world: cells_of(collectives, options.sizes, world) for world in options.worlds}
    turns = len(contenders) * (options.pace.rounds + 2)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
    with (
        private_folder() as folder,
        shown(console, turns * sum(map(len, cells.values()))) as progress,
    ):
        for world, of_world in cells.items():
            starting = f"starting {world} ranks of each contender"
            (progress.at if progress.is_drawn else progress.say)(starting)
            with (
                wire(link, world) as between,
                Field(contenders, world, folder, options.huge_pages, between) as field,
            ):
                for group, reason in field.absent.items():
                    progress.say(f"# without {group}: {reason}")
                facts = run_facts(field.versions(), options.settings() | {"link": link})
                for _, group_of in itertools.groupby(of_world, lambda c: c.collective):
                    for number, cell in enumerate(group_of):
                        progress.at(f"{cell.collective} {size_text(cell.bytes)}, {world} ranks")
                        run = field.measure(cell, options.pace, progress.advance)
                        runs.append(run)
                        if number == 0:
                            for text in table.heading(cell, options.pace.rounds):
                                progress.say(text)
                        for text, style in table.lines(run):
                            progress.say(text, style)
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
    """1 where an element was wrong or dpcore failed; a peer that is missing is not an error."""
    wrong = sum(total_wrong(run) for run in runs)
    if wrong:
        print(f"{wrong} elements were wrong", file=sys.stderr)
    ours = [result for run in runs for result in run if result.contender.role == "ours"]
    failed = [result for result in ours if result.missing and not result.unsupported]
    if failed:
        print(f"{failed[0].contender.name} failed: {failed[0].missing}", file=sys.stderr)
    elif not ours:
        print("dpcore took no part", file=sys.stderr)
    return 1 if wrong or failed or not ours else 0
