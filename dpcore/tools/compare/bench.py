"""``dpcore bench``: times of dpcore's collectives, in the columns of nccl-tests.

The loop, the checks and the records are those of ``dpcore compare``. Its ranks are other processes
that are told what to do; here all ranks run this program, on a host or under a launcher.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dpcore._version import __version__
from dpcore.comm.launch.identity import is_launched
from dpcore.errors import Unsupported
from dpcore.tools.argument_types import SIZES
from dpcore.tools.compare.collectives import loop, table
from dpcore.tools.compare.collectives.cells import BYTES, OPS, cells_of, collectives_of
from dpcore.tools.compare.collectives.contenders import ARENA, PLAIN, tuning
from dpcore.tools.compare.collectives.loop import Measurement, Pace
from dpcore.tools.compare.collectives.options import prove_own
from dpcore.tools.compare.collectives.summary import records, summarise, total_wrong
from dpcore.tools.records import ROOT, run_facts
from dpcore.tools.sizes import parse_sizes

if TYPE_CHECKING:
    from dpcore.comm.communicators.native import Communicator

_DEFAULTS: dict[str, Any] = {
    "collective": ["all_reduce"],
    "sizes": parse_sizes(SIZES),
    "dtype": "float32",
    "op": "sum",
    "algorithm": ["auto"],
}
_TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True)
class Plan:
    """What to measure; travels to the ranks."""

    collectives: tuple[str, ...]
    sizes: tuple[int, ...]
    dtype: str = "float32"
    op: str = "sum"
    algorithms: tuple[str, ...] = ("auto",)
    plain: bool = False
    seconds: float = 0.2
    json: bool = False

    def __post_init__(self) -> None:
        for name, value, known in (("dtype", self.dtype, BYTES), ("op", self.op, OPS)):
            if value not in known:
                raise Unsupported(f"--{name} {value!r}: choose from {', '.join(known)}")


def run(options: argparse.Namespace) -> int:
    """Measures and prints; the exit status. Under a launcher on its ranks, else on own ones."""
    given = {name: getattr(options, name) for name in _DEFAULTS}
    given = {name: value for name, value in given.items() if value is not None}
    if options.reproduce:
        return _reproduce([*given, *(["world"] if options.world else [])])
    asked = _DEFAULTS | given
    plan = Plan(
        collectives=collectives_of(asked["collective"]),
        sizes=asked["sizes"],
        dtype=asked["dtype"],
        op=asked["op"],
        algorithms=tuple(asked["algorithm"]),
        plain=options.plain,
        seconds=options.seconds,
        json=options.json,
    )
    # Before numpy is loaded: it would ask for huge pages, which a tensor of torch does not have.
    os.environ.setdefault("NUMPY_MADVISE_HUGEPAGE", "0")
    worlds: list[int] | None = options.world
    if not is_launched():
        from dpcore.comm.launch.spawn import spawn

        prove_own(plan.algorithms, plan.collectives, worlds or [2])
        wrongs = [
            spawn(lambda comm: measure(comm, plan), ranks, timeout=_TIMEOUT_SECONDS)
            for ranks in worlds or [2]
        ]
        return int(any(map(any, wrongs)))
    from dpcore.comm.launch.session import finalize, init

    comm = init(timeout=_TIMEOUT_SECONDS)
    if worlds not in (None, [comm.world_size]):
        asked_for = ",".join(map(str, worlds or ()))
        raise Unsupported(f"--world {asked_for}, but the launcher started {comm.world_size} ranks")
    prove_own(plan.algorithms, plan.collectives, [comm.world_size])
    wrong = measure(comm, plan)
    finalize()
    return int(wrong > 0)


def _reproduce(given: list[str]) -> int:
    """Lets the repository measure what its README claims."""
    if given:
        raise Unsupported(f"--reproduce measures what README claims: leave out --{given[0]}")
    if not (ROOT / "benchmarks" / "reproduce.py").exists():
        raise Unsupported(
            "--reproduce: the claims and what measures them are in the repository and not in an "
            "installed package: clone it, type `make build` there, and run this in the clone"
        )
    return subprocess.call([sys.executable, "-m", "benchmarks.reproduce"], cwd=ROOT)


class OwnRanks:
    """The ranks of a communicator, one of which runs this; all of them ask the same."""

    def __init__(self, comm: Communicator) -> None:
        from dpcore.tools.compare.collectives.workers.native import DpcoreBackend

        self._comm = comm
        self._prepared: dict[str, Any] = {}
        self.backend = DpcoreBackend(comm)

    def ask(self, command: dict[str, Any], seconds: float) -> list[dict[str, Any]]:
        import numpy as np

        from dpcore.tools.compare.collectives.workers.serve import obey

        reply = obey(command, self.backend, self._prepared)
        if command["do"] == "release":
            return [reply]
        ((name, value),) = reply.items()
        of_ranks = np.empty(self._comm.world_size)
        self._comm.all_gather(of_ranks, np.array([math.nan if value is None else float(value)]))
        return [{name: None if math.isnan(number) else number} for number in of_ranks.tolist()]


def measurements(comm: Communicator, plan: Plan) -> Iterator[Measurement]:
    """Measures one cell after the other, the same ones on every rank."""
    ranks = OwnRanks(comm)
    pace = Pace(rounds=1, round_seconds=plan.seconds)
    what = plan.collectives, plan.sizes, comm.world_size, plan.dtype, plan.op, plan.algorithms
    for cell in cells_of(*what):
        result = Measurement(cell, PLAIN if plan.plain else ARENA)
        loop.prepare(ranks, result)
        loop.calibrate(ranks, result, pace)
        loop.one_round(ranks, result, pace)
        result.facts = loop.release(ranks)
        yield result


def measure(comm: Communicator, plan: Plan) -> int:
    """Runs on every rank; rank 0 prints. Returns the number of wrong elements of all ranks."""
    if comm.rank > 0:
        return total_wrong(list(measurements(comm, plan)))
    from rich.console import Console

    from dpcore.base.machine import machine

    console = Console(highlight=False, quiet=plan.json)

    def say(text: str, style: str = "") -> None:
        console.print(text, style=style or None, markup=False, soft_wrap=True)

    here = machine()
    say(
        f"# dpcore {__version__}: {comm.world_size} ranks on {here['processors']} processors "
        f"({here['processor']})"
    )
    memory = "ordinary tensors" if plan.plain else "tensors in the arena"
    say(f"# {memory}, in place where the collective is, time of the slowest rank")
    facts = run_facts(
        {"dpcore": {"dpcore": __version__}},
        {"rounds": 1, "round_seconds": plan.seconds, "tuning": tuning()},
    )
    done: list[Measurement] = []
    for result in measurements(comm, plan):
        if plan.json:
            print(json.dumps(records(facts, [result])[0]), flush=True)
        elif not done or done[-1].cell.collective != result.cell.collective:
            for text in table.heading(result.cell, 1, table.BENCH):
                say(text, "bold" if result.cell.collective in text else "")
        for text, style in table.lines([result], table.BENCH):
            say(text, style)
        done.append(result)
    wrong = total_wrong(done)
    bandwidths = [figures.busbw for figures in summarise(done) if figures is not None]
    say("#")
    say(f"# wrong elements: {wrong} {'OK' if wrong == 0 else 'FAILED'}")
    say(f"# average bus bandwidth: {sum(bandwidths) / len(bandwidths):.3f} GB/s")
    return wrong
