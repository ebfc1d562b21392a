"""Is torch's own sharing of a model as fast over dpcore? `python -m benchmarks.torch_parallel`

Ranks train a small model by each of torch's own ways: tensor and sequence parallel, FSDP2, HSDP,
pipelines, ZeroRedundancyOptimizer, PostLocalSGDOptimizer. The backends "dpcore" and "gloo" take
turns, a few steps each, in the same processes.

    of Gloo   the step's time over Gloo's of the same round: the median, and where it lies with a
              confidence of 95% (the range, of fewer than 6 rounds). Target: at most 1.05, up to the
              upper end.

tests/torch_backend/test_parallel.py trains by the same functions and compares with one process.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.figures import ends
from benchmarks.harness.options import script_parser
from benchmarks.harness.torch_strategies import STRATEGIES, Sizes, batch_of, grid_over
from benchmarks.neighbours import seconds_of, shown
from dpcore.tools.compare.training.ranks import beside_gloo, spawn, steps_in
from dpcore.tools.ratios import of_slowest_rank, paired
from dpcore.tools.records import ROOT, keep, run_facts

OURS, PEER = "dpcore", "gloo"
OF_GLOO_AT_MOST = 1.05
KEPT = "benchmarks/results/torch_parallel.jsonl"
WARM_STEPS = 4
SIZES = Sizes(width=128, words=512, tokens=32, rows=16, microbatches=8, dtype=torch.float32)

Times = dict[str, list[float]]  # seconds of a step, round by round, by backend


@beside_gloo
def measure(
    comm: Any, names: Sequence[str], sizes: Sizes, rounds: int, seconds: float, folder: str
) -> dict[str, tuple[Times, str]]:
    """On a rank: the times of each strategy, and why Gloo refuses it, where it does."""
    torch.set_num_threads(1)
    found = {}
    grids = {who: grid_over(who, comm.world_size) for who in (OURS, PEER)}
    for name in names:
        calls, refused = {}, ""
        for who, grid in grids.items():
            try:
                trainer = STRATEGIES[name](grid, sizes)
            except RuntimeError as problem:  # on all ranks alike
                if who == OURS:
                    raise
                refused = str(problem)
                continue
            calls[who] = partial(trainer.step, *batch_of(sizes, 0))
            for _ in range(WARM_STEPS):
                calls[who]()
        count = steps_in(seconds, calls[OURS], comm)
        times: Times = {who: [] for who in calls}
        for number in range(rounds):
            for who in list(calls)[:: -1 if number % 2 else 1]:
                times[who].append(seconds_of(calls[who], count, comm))
        found[name] = times, refused
    return found


def records(of_ranks: Sequence[dict[str, tuple[Times, str]]]) -> Iterator[dict[str, Any]]:
    """One per strategy."""
    for name, (times, refused) in of_ranks[0].items():
        rounds = {who: of_slowest_rank(found[name][0][who] for found in of_ranks) for who in times}
        line: dict[str, Any] = {"strategy": name, "world": len(of_ranks), "refused": refused}
        line |= {f"{who}_s": statistics.median(of_who) for who, of_who in rounds.items()}
        if PEER in rounds:
            line["of_gloo"] = asdict(paired(rounds[OURS], rounds[PEER]))
        yield line | {"rounds_s": rounds}


def table(lines: Sequence[dict[str, Any]]) -> str:
    text = [f"{'':34}{'dpcore ms':>10}{'Gloo ms':>10}{'of Gloo':>20}"]
    for line in lines:
        row = f"{line['strategy']:34}{line[f'{OURS}_s'] * 1e3:>10.2f}"
        if line["refused"]:
            text.append(f"{row}  Gloo refuses it: {line['refused']}")
            continue
        mark = "*" if line["of_gloo"]["high"] > OF_GLOO_AT_MOST else ""
        row += f"{line[f'{PEER}_s'] * 1e3:>10.2f}{shown(line['of_gloo']):>20}"
        text.append(row.rstrip() + mark)
    return "\n".join(
        [*text, f"in brackets: {ends(lines)}; * the upper end is above {OF_GLOO_AT_MOST}"]
    )


def main() -> int:
    made = script_parser(__doc__)
    add = made.add_argument
    add("--strategies", default="", metavar="WORD", help="those with this word in their name")
    add("--ranks", type=int, default=2, help="an even number (default: %(default)s)")
    add("--rounds", type=int, default=21, help="of each backend (default: %(default)s)")
    add("--seconds", type=float, default=0.15, help="of one backend in a round")
    add("--quick", action="store_true", help="6 short rounds of a tiny model, kept nowhere")
    add("--records", type=Path, help=f"append a line per strategy (default: {KEPT})")
    options = made.parse_args()
    sizes = SIZES
    if options.quick:
        options.rounds, options.seconds, sizes = 6, 0.01, Sizes(dtype=torch.float32)
    names = [name for name in STRATEGIES if options.strategies.lower() in name.lower()]
    if not names:
        made.error(f"--strategies: none has {options.strategies!r} in it: {'; '.join(STRATEGIES)}")
    if options.ranks < 2 or options.ranks % 2:
        made.error(f"--ranks: {options.ranks} is not an even number of at least 2")
    if options.rounds < 1 or options.seconds <= 0:
        made.error("--rounds is a number from 1 on, and --seconds positive")
    settings = {"rounds": options.rounds, "seconds": options.seconds}
    settings |= {name: str(value) for name, value in sizes._asdict().items()}
    facts = run_facts({"": {"torch": torch.__version__}}, settings)
    of_ranks = spawn(measure, options.ranks, names, sizes, options.rounds, options.seconds)
    lines = list(records(of_ranks))
    print(table(lines), flush=True)
    keep(options.records or (None if options.quick else ROOT / KEPT), facts, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
