"""How near is an all-reduce over many NICs to what they can carry? `python -m benchmarks.incast`

    bound = 2 (N-1)/N of the bytes at the rate of a NIC, and two latencies

The NICs are emulated ones and shaped ones (benchmarks/harness/networks.py). Printed is the step
over the bound: medians over the rounds, of the slowest rank. "auto" is the choice of the cost
model, and stands beside all algorithms.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.networks import Network, add_kinds, networks_of
from benchmarks.harness.options import script_parser
from dpcore.base.link import parse_speed
from dpcore.tools import argument_types as types
from dpcore.tools.ratios import in_turn, of_slowest_rank
from dpcore.tools.records import keep, run_facts
from dpcore.tools.sizes import parse_sizes, size_text

ALGORITHMS = ("auto", "two_shot", "ring", "halving_doubling")
MOST_SECONDS = 12.0  # that the rounds of one cell should take
LEAST_ROUNDS = 3  # however long they take: a median of two is a mean


def measure(
    comm: Any, sizes: Sequence[int], algorithms: Sequence[str], rounds: Sequence[int]
) -> list[list[list[float]]]:
    """Seconds of every round, by size and algorithm; the algorithms take turns, once more than they
    count, since the first round makes what the later ones use."""
    torch.set_num_threads(1)
    found = []
    for nbytes, times in zip(sizes, rounds, strict=True):
        tensor = torch.ones(nbytes // 4)
        of_size: dict[str, list[float]] = {algorithm: [] for algorithm in algorithms}
        for round_ in range(-1, times):
            for algorithm in in_turn(algorithms, round_ + 1):
                comm.barrier()
                begin = time.perf_counter()
                comm.all_reduce(tensor, "mean", algorithm=algorithm)
                if round_ >= 0:
                    of_size[algorithm].append(time.perf_counter() - begin)
        assert tensor.min() == tensor.max() == 1
        found.append(list(of_size.values()))
    return found


def bound_of(world: int, nbytes: int, rate: float, latency: float) -> float:
    return 2 * (world - 1) / world * nbytes / rate + 2 * latency


def cells(network: Network, sizes: Sequence[int], rounds: int) -> Iterator[dict[str, Any]]:
    """A record per size and algorithm."""
    speed, world = parse_speed(network.link), network.world
    rate, latency = speed.bytes_per_second, speed.latency
    most = MOST_SECONDS / len(ALGORITHMS)
    times = [
        max(LEAST_ROUNDS, min(rounds, round(most / bound_of(world, size, rate, latency))))
        for size in sizes
    ]
    of_ranks, rate = network.run(measure, sizes=sizes, algorithms=ALGORITHMS, rounds=times)
    for s, nbytes in enumerate(sizes):
        bound = bound_of(world, nbytes, rate, latency)
        for a, algorithm in enumerate(ALGORITHMS):
            rounds_s = of_slowest_rank(r[s][a] for r in of_ranks)
            seconds = statistics.median(rounds_s)
            yield {
                "question": network.kind, "link": network.link, "world": world, "bytes": nbytes,
                "algorithm": algorithm, "bytes_per_s": rate, "bound_s": bound,
                "median_s": seconds, "of_bound": seconds / bound, "rounds_s": rounds_s,
            }  # fmt: skip


def main() -> int:
    made = script_parser(__doc__)
    add_kinds(made)
    add = made.add_argument
    types.add(made, "--link", "20mbit,100us,100mbit,100us")
    add("--rates", default="100mbit,1gbit", help="of shaped hosts (default: %(default)s)")
    add("--world", default="4,8,16", help="emulated ranks (default: %(default)s)")
    add("--hosts", type=int, default=4, help="shaped ones (default: %(default)s)")
    add("--sizes", default="256K,1M,4M,16M", help="default: %(default)s")
    add("--rounds", type=int, default=5, help="at most, from 3 on; fewer where they take long")
    add("--quick", action="store_true", help="one link, few ranks, small sizes, 3 rounds")
    add("--records", type=Path, help="append one JSON line per size and algorithm")
    options = made.parse_args()
    if options.quick:
        options.link, options.rates, options.world = ["100mbit,100us"], "1gbit", "4"
        options.sizes, options.rounds = "256K,1M", LEAST_ROUNDS
    sizes = parse_sizes(options.sizes)
    networks = networks_of(
        options.questions,
        [(link, int(n)) for link in options.link for n in options.world.split(",")],
        [(rate, options.hosts) for rate in options.rates.split(",")],
    )
    facts = run_facts({"": {"torch": torch.__version__}}, {"rounds": options.rounds})
    print(f"{'':10}{'link':15}{'ranks':>5}{'size':>9}{'bound ms':>10}", end="")
    print("".join(f"{name:>18}" for name in ALGORITHMS))
    for network in networks:
        lines = list(cells(network, sizes, options.rounds))
        for first in range(0, len(lines), len(ALGORITHMS)):
            row = lines[first : first + len(ALGORITHMS)]
            head = f"{network.kind:10}{network.link:15}{network.world:>5}"
            head += f"{size_text(row[0]['bytes']):>9}"
            ratios = "".join(f"{line['of_bound']:>18.3f}" for line in row)
            print(f"{head}{row[0]['bound_s'] * 1e3:>10.1f}{ratios}", flush=True)
        keep(options.records, facts, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
