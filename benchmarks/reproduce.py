"""Do the README's claims hold on this machine? `python -m benchmarks.reproduce`

Each claim is a ratio of two contenders' times in the committed results, with its interval: a
training step of dpcore over torch DDP with the best of its bucket sizes, and an all-reduce of
dpcore in its arena over each library that is here. Both are measured anew, in turn in one run, and
the same ratio says what becomes of the claim:

holds       the same contender is ahead, or none is, as before
open        the new interval includes 1, or rounds were too few for one, so nothing can be said
fails       the other contender is ahead

Cells over shaped links need root. The exit status is 1 if a claim fails. It takes ten minutes on
two cores, which should have nothing else to do; `--quick` is for trying it out, and leaves most
claims open.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.defaults import Cell, measured
from benchmarks.first_screen import CELLS, CONTENDERS, SECONDS
from benchmarks.harness.beside_default import best_of_torch, newest
from benchmarks.harness.figures import load, run_of
from benchmarks.harness.first_screen_tables import MODELS, PLACES
from benchmarks.harness.options import options_of, parser, script_parser
from dpcore.tools.compare.collectives.contenders import ARENA, PEERS, peer
from dpcore.tools.compare.collectives.session import run
from dpcore.tools.hosts import why_not
from dpcore.tools.ratios import Estimate, paired
from dpcore.tools.records import load as records_of
from dpcore.tools.sizes import size_text

_SIZES = (8, 32 * 1024, 1024 * 1024, 16 * 1024 * 1024)


@dataclass(frozen=True)
class Claim:
    """``ratio``: dpcore's time over the other contender's; below 1, dpcore is faster."""

    what: str
    ratio: Estimate


def verdict(claimed: Estimate, found: Estimate) -> str:
    """
    >>> def of(low, high): return Estimate((low + high) / 2, low, high, 9, 0.95)
    >>> verdict(of(0.6, 0.8), of(0.7, 0.9)), verdict(of(0.6, 0.8), of(0.9, 1.1))
    ('holds', 'open')
    >>> verdict(of(0.6, 0.8), of(1.1, 1.2)), verdict(of(0.9, 1.1), of(0.95, 1.2))
    ('fails', 'holds')
    >>> verdict(of(0.9, 1.1), of(0.6, 0.8)), verdict(of(0.9, 1.1), of(1.3, 1.4))
    ('holds', 'fails')
    >>> verdict(of(0.6, 0.8), Estimate(1.3, 1.2, 1.4, 2, None))
    'open'
    """
    if not found.confidence:
        return "open"
    if claimed.low <= 1 <= claimed.high:  # that dpcore is not slower
        return "fails" if found.low > 1 else "holds"
    if found.low <= 1 <= found.high:
        return "open"
    return "holds" if (found.high < 1) == (claimed.high < 1) else "fails"


def claims_of_steps(records: Sequence[dict[str, Any]]) -> Iterator[Claim]:
    """Each cell of the README's table."""
    for name, cell in newest([record for record in records if "cell" in record]).items():
        best = best_of_torch(cell)
        if best is not None:
            place, model, _ = name.split("/")
            yield Claim(f"a step, {PLACES[place]}, {MODELS[model]}", Estimate(**best["ratio"]))


def claims_of_all_reduce(records: Sequence[dict[str, Any]]) -> Iterator[Claim]:
    """Each library at some of the README's sizes, on two ranks."""
    times = {
        (record["bytes"], record["contender"]): record["rounds_s"]
        for record in records
        if record["collective"] == "all_reduce" and record["world"] == 2 and record.get("rounds_s")
    }
    for size in _SIZES:
        for name in (peer(one).name for one in PEERS):
            if (size, name) in times and (size, ARENA.name) in times:
                ratio = paired(times[size, ARENA.name], times[size, name])
                yield Claim(f"all-reduce of {size_text(size)}, {name}", ratio)


def judged(claimed: Sequence[Claim], found: Sequence[Claim]) -> tuple[list[str], int]:
    """A line for each claim, and how many fail."""
    by_name = {claim.what: claim for claim in found}
    lines, failed = [], 0
    for claim in claimed:
        again = by_name.get(claim.what)
        said = verdict(claim.ratio, again.ratio) if again else "not tried"
        failed += said == "fails"
        here = _text(again.ratio) if again else "-"
        lines.append(f"{said:10} {claim.what:44} {_text(claim.ratio):>28} {here:>28}")
    return lines, failed


def _text(ratio: Estimate) -> str:
    return f"{ratio.median:.3g} ({ratio.low:.3g} - {ratio.high:.3g})"


def steps_here(quick: bool) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    links = why_not()
    for name, rounds in CELLS.items():
        cell = Cell(*name.split("/"))
        if links and not cell.place.startswith("host"):
            print(f"{name}: a shaped link {links}", flush=True)
            continue
        pace = argparse.Namespace(rounds=2 if quick else rounds, seconds=SECONDS)
        print(f"measuring {name}", flush=True)
        found += measured(cell, CONTENDERS, pace)
    return found


def all_reduces_here(quick: bool) -> list[dict[str, Any]]:
    sizes = ",".join(map(str, _SIZES))
    made = parser("", sizes, sizes)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "all_reduce.jsonl"
        asked = ["--records", str(file), *(["--quick"] if quick else [])]
        options = options_of(made, made.parse_args(asked))
        run((ARENA, *map(peer, options.peers)), ["all_reduce"], options)
        return records_of(file) if file.exists() else []


def main() -> int:
    made = script_parser(__doc__)
    made.add_argument("--quick", action="store_true", help="few rounds, which show little")
    made.add_argument("--only", choices=["steps", "all_reduce"], help="one of the two tables")
    options = made.parse_args()
    failed = 0
    for name, known, claims_of, measure in (
        ("all_reduce", "all_reduce", claims_of_all_reduce, all_reduces_here),
        ("steps", "first_screen", claims_of_steps, steps_here),
    ):
        if options.only in (None, name):
            committed = load(known)
            lines, wrong = judged([*claims_of(committed)], [*claims_of(measure(options.quick))])
            failed += wrong
            print(f"\ndpcore's time over the other's: claimed {run_of(committed[-1])}, and here")
            print("\n".join(lines), flush=True)
    print(f"\n{failed or 'no'} claim{'s' if failed != 1 else ''} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
