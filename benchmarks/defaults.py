"""Is `DataParallel(model)` the best choice, without an argument? `python -m benchmarks.defaults`

Beside the default stand dpcore with every schedule and size of buckets that one might ask for, and
torch DDP over Gloo with its default and other sizes, gradients as views of its buckets. A cell is
PLACE/MODEL/THREADS:

    host2/mlp/1              two ranks of this host, each with one thread of torch
    host4/gpt2/all           four ranks without OMP_NUM_THREADS: torch DDP has as many threads in
                             each as torch takes by itself, dpcore what dp.init() leaves of them
    host8/many/1             eight, for machines with a core for each
    1gbit/transformer/all    two hosts (network namespaces) with one rank each; the kernel shapes
                             what leaves them. Needs root.

A step is zero_grad, forward and backward, of the slowest rank. Everybody takes turns in the same
processes, short ones, and the default has one before and after every other's: the ratio default /
contender is that of neighbours, since the speed of a machine changes within seconds. Its 95%
interval is made of order statistics; fewer than 6 rounds have a range only. Contenders whose
gradients don't fit in memory together take part in several runs, each with the default. The default
may settle first; if its layout changes later, that is reported.
"""

from __future__ import annotations

import fnmatch
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.beside_default import DEFAULT, OF_TORCH, OURS, details, summary
from benchmarks.harness.options import script_parser
from dpcore.tools import hosts as namespaces
from dpcore.tools.compare.training.models import MODELS
from dpcore.tools.compare.training.start import RAW_PORT, run_job, shaped_hosts
from dpcore.tools.compare.training.worker import Job, turns
from dpcore.tools.hosts import burst_of
from dpcore.tools.ratios import of_slowest_rank, paired
from dpcore.tools.records import ROOT, keep, load, run_facts

HOSTS = {"host2": 2, "host4": 4, "host8": 8}
RATES = ("100mbit", "1gbit", "10gbit")
THREADS = {"1": 1, "all": 0}
CELLS = tuple("/".join(parts) for parts in product((*HOSTS, *RATES), MODELS, THREADS))
USUAL = "host2,host4,*bit/transformer/*,*bit/many/1"
MEMORY_SHARE = 0.6  # of what is free, for gradients


@dataclass(frozen=True)
class Cell:
    place: str
    model: str
    threads: str

    @property
    def world(self) -> int:
        return HOSTS.get(self.place, 2)

    @property
    def name(self) -> str:
        return f"{self.place}/{self.model}/{self.threads}"


def chosen_cells(patterns: str) -> list[Cell]:
    """Those that one of the patterns matches; it may leave out the end."""
    wanted = patterns.split(",")
    found = [
        name
        for name in CELLS
        if any(fnmatch.fnmatchcase(name, wish + end) for wish in wanted for end in ("", "/*"))
    ]
    return [Cell(*name.split("/")) for name in found]


def portions(others: Sequence[str], fit: int) -> list[list[str]]:
    """As few runs as possible, of equal length, each with the default and at most `fit` others."""
    runs = -(-len(others) // max(1, fit))
    return [list(others[run::runs]) for run in range(runs)]


def that_fit(cell: Cell) -> int:
    """How many contenders beside the default: each keeps all gradients; weights are shared."""
    gradients = sum(p.numel() * p.element_size() for p in MODELS[cell.model]()[0].parameters())
    facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(facts["MemAvailable"].split()[0]) << 10
    return int(free * MEMORY_SHARE / cell.world / gradients) - 2


def neighbours(times: Sequence[float], others: Sequence[str]) -> dict[str, list[float]]:
    """By contender what the default took beside it, round by round: in two rounds its turn before,
    in the next two the one after. A mean of both would hold a slow step twice as often as the
    contender's one turn."""
    found: dict[str, list[float]] = {name: [] for name in others}
    for number, begin in enumerate(range(0, len(times), len(others) + 1)):
        for at, name in enumerate(turns([DEFAULT, *others], number)[1::2], begin):
            found[name].append(times[at + number // 2 % 2])
    return found


def means(values: Sequence[float], of: int) -> list[float]:
    return [statistics.mean(values[at : at + of]) for at in range(0, len(values), of)]


def of_turns(steps: Sequence[float], in_turn: int) -> list[float]:
    """The mean step of each turn. The first one finds its memory out of the caches, that of
    the default less so, and does not count where there are more."""
    counted = [step for at, step in enumerate(steps) if in_turn == 1 or at % in_turn]
    return means(counted, max(1, in_turn - 1))


def records(cell: Cell, result: dict[str, Any], steps: int) -> Iterator[dict[str, Any]]:
    """One per contender of a run, the default first."""
    taken = {
        name: of_turns(of_slowest_rank(of_ranks), steps)
        for name, of_ranks in result["seconds"].items()
    }
    others = [name for name in taken if name != DEFAULT]
    beside = neighbours(taken[DEFAULT], others)
    taken[DEFAULT] = means(taken[DEFAULT], len(others) + 1)
    for name, times in taken.items():
        line = {
            "cell": cell.name, "world": cell.world, "model": cell.model,
            "threads": result["threads"][name], "contender": name, "steps": steps,
            "step_s": statistics.median(times), "rounds_s": times,
        }  # fmt: skip
        if result["raw"][0]:
            line["goodput_bytes_per_s"] = statistics.median(
                map(min, zip(*result["raw"], strict=True))
            )
        if result["choices"][name][0]:
            line["choice"], after = result["choices"][name]
            line["settled"] = all(line["choice"][k] == after[k] for k in after if k != "said")
        if name != DEFAULT:
            line["default_s"] = statistics.median(beside[name])
            line["default_rounds_s"] = beside[name]
            line["ratio"] = asdict(paired(beside[name], times))
        yield line


def measured(cell: Cell, others: Sequence[str], options: Any) -> list[dict[str, Any]]:
    """The records of one run."""
    job = Job(
        cell.model, [DEFAULT, *others], options.rounds, steps=1, folder="", world=cell.world,
        seconds=options.seconds, optimizer="", threads=THREADS[cell.threads], around=True,
    )  # fmt: skip
    if cell.place in HOSTS:
        result = run_job(job, lambda _: None)
    else:
        job.init["transport"] = "tcp"
        with shaped_hosts(cell.place, burst_of(cell.place)) as hosts:
            result = run_job(Job(**{**asdict(job), "raw_port": RAW_PORT}), lambda _: None, hosts)
    return list(records(cell, result, result["steps"]))


def main() -> int:
    made = script_parser(__doc__)
    add = made.add_argument
    add("--cells", default=USUAL, help="patterns of PLACE/MODEL/THREADS (default: %(default)s)")
    add("--list", action="store_true", help="the cells that --cells means, and end")
    add("--contenders", default=",".join((*OURS, *OF_TORCH)), help="of %(default)s")
    add("--rounds", type=int, default=60, help="in which all take turns (default: %(default)s)")
    add("--seconds", type=float, default=0.05, help="of a turn of the default; at least one step")
    add("--quick", action="store_true", help="3 short rounds of one small cell")
    add("--records", type=Path, default=ROOT / "benchmarks/results/defaults.jsonl")
    add("--table", action="store_true", help="measure nothing: the table of what --records holds")
    options = made.parse_args()
    if options.table:
        print(summary(load(options.records)))
        return 0
    if options.quick:
        options.cells, options.rounds, options.seconds = "host2/many/1", 3, 0.05
    others = options.contenders.split(",")
    cells = chosen_cells(options.cells)
    if unknown := [name for name in others if name not in (*OURS, *OF_TORCH)]:
        made.error(
            f"no contender {', '.join(unknown)}; choose from {', '.join((*OURS, *OF_TORCH))}"
        )
    if not cells:
        made.error(f"no cell matches {options.cells}; see --list --cells '*'")
    if options.list:
        print("\n".join(cell.name for cell in cells))
        return 0
    if reason := namespaces.why_not():
        print(f"defaults: cells between hosts are left out: {reason}", file=sys.stderr)
        cells = [cell for cell in cells if cell.place in HOSTS]
        if not cells:
            return 1
    os.environ.pop("OMP_NUM_THREADS", None)  # "all" means what torch does by itself
    settings = {"rounds": options.rounds, "seconds": options.seconds}
    facts = run_facts({"": {"torch": torch.__version__}}, settings)
    told: list[dict[str, Any]] = []
    for cell in cells:
        for portion in portions(others, that_fit(cell)):
            lines = measured(cell, portion, options)
            print(details(cell.name, lines), "\n", flush=True)
            keep(options.records, facts, lines)
            told += lines
    print(summary(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
