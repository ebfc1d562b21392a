"""Which backends move tensors of the CPU, and how fast? `python -m benchmarks.backends`"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.harness.options import options_of, parser
from dpcore.tools import argument_types as types
from dpcore.tools.compare.collectives.cells import collectives_of
from dpcore.tools.compare.collectives.contenders import OURS, Contender, peer
from dpcore.tools.compare.collectives.loop import Measurement
from dpcore.tools.compare.collectives.session import Run, exit_status, run, start
from dpcore.tools.compare.collectives.summary import summarise
from dpcore.tools.compare.collectives.table import microseconds
from dpcore.tools.ratios import Estimate, ends_of, estimate
from dpcore.tools.sizes import size_text

DESCRIPTION = """\
The backends that torch has for tensors of the CPU, or could have, side by side in one run: dpcore
(ordinary tensors, and in its arena), Gloo, Open MPI, MPICH. A table per collective and number of
ranks, with a row per size and backend: time, algorithm bandwidth, bus bandwidth, each with the
interval that holds the true median with a confidence of 95%, or the range of fewer than 6
rounds.

UCC takes no part: neither Debian nor PyPI has it, and the wheels of torch are built without it.
"""
WITHOUT = "UCC: not in Debian 12 or PyPI, and torch's wheels are built without it"


def main() -> int:
    made = parser(DESCRIPTION, "8:64M:8x", "8:8M:64x", worlds="2,4,8", rounds=9)
    types.add(made, "--collective", "all_reduce,all_gather,reduce_scatter,broadcast")
    made.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables here as well")
    arguments = made.parse_args()
    options = options_of(made, arguments)
    contenders = (*OURS, *map(peer, options.peers))
    runs = run(contenders, collectives_of(arguments.collective), options)
    if arguments.markdown is not None:
        arguments.markdown.write_text("\n".join(markdown(runs)) + "\n", encoding="utf-8")
    return exit_status(runs)


def markdown(runs: Sequence[Run]) -> Iterator[str]:
    """The tables of a whole run."""

    def kind(of: Run) -> tuple[int, str]:
        return of[0].cell.world, of[0].cell.collective

    for (world, collective), group in itertools.groupby(runs, kind):
        runs_of_kind = list(group)
        rounds = {len(result.rounds) for of in runs_of_kind for result in of if result.rounds}
        in_brackets = " or ".join(map(ends_of, sorted(rounds)))
        yield f"### {collective}, {world} ranks"
        yield ""
        rates = "algorithm bandwidth, GB/s | bus bandwidth, GB/s"
        yield f"| size | backend | time, us ({in_brackets}) | {rates} |"
        yield "|---:|---|---:|---:|---:|"
        for of_size in runs_of_kind:
            yield from _rows(of_size)
        yield ""
    yield f"Without {WITHOUT}."


def _rows(results: Run) -> Iterator[str]:
    known = [figures.median_s for figures in summarise(results) if figures is not None]
    for result, figures in zip(results, summarise(results), strict=True):
        name = _name_of(result.contender)
        if figures is None:
            yield f"| {size_text(result.cell.bytes)} | {name} | n/a: {result.missing} | | |"
            continue
        of = estimate(result.rounds)
        time = f"{microseconds(of.median)} ({microseconds(of.low)} to {microseconds(of.high)})"
        time = f"**{time}**" if figures.median_s == min(known) else time
        rates = [_rates(result, factor, of) for factor in (1.0, _bus_factor(result))]
        yield f"| {size_text(result.cell.bytes)} | {name} | {time} | {rates[0]} | {rates[1]} |"


def _rates(result: Measurement, factor: float, of: Estimate) -> str:
    moved = result.cell.bytes * factor / 1e9
    return f"{moved / of.median:.3f} ({moved / of.high:.3f} to {moved / of.low:.3f})"


def _bus_factor(result: Measurement) -> float:
    return result.cell.kind.bus_factor(result.cell.world)


def _name_of(contender: Contender) -> str:
    return {"dpcore arena": "dpcore, in its arena", "dpcore plain": "dpcore"}.get(
        contender.name, contender.name
    )


if __name__ == "__main__":
    start(main)
