"""How long does an urgent all-reduce take behind large ones? `python -m benchmarks.priorities`

Bulk all-reduces are in flight, then an urgent one is called with priority=1000 and waited for:

    alone    the urgent one and nothing else
    behind   the urgent one after the bulk ones, with its priority
    patient  the same without a priority
    limit    alone, and two segments of 256 KiB at the rate of a NIC
    bulk     all of it with the priority, over all of it without

The NICs are emulated ones and shaped ones (benchmarks/harness/networks.py). Medians over the
rounds, of the slowest rank.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.networks import Network, add_kinds, networks_of
from benchmarks.harness.options import script_parser
from dpcore.tools.ratios import in_turn, of_slowest_rank
from dpcore.tools.records import keep, run_facts
from dpcore.tools.sizes import size_text

SEGMENT_BYTES = 256 << 10
PRIORITY = 1000
BULK = ((6, 3 << 20), (14, 1 << 20), (40, 1 << 20))
URGENT_BYTES = (64 << 10, 1 << 20)
UNDER_WAY_SECONDS = 0.003  # the bulk operations are, when the urgent one is called


def measure(comm: Any, rounds: int) -> list[dict[str, list[float]]]:
    """Seconds of every round, by what was measured; an entry for each of the cases."""
    torch.set_num_threads(1)
    return [
        one_case(comm, count, nbytes, urgent_bytes, rounds)
        for count, nbytes in BULK
        for urgent_bytes in URGENT_BYTES
    ]


def one_case(
    comm: Any, count: int, nbytes: int, urgent_bytes: int, rounds: int
) -> dict[str, list[float]]:
    bulk = [torch.ones(nbytes // 4) for _ in range(count)]
    urgent = torch.ones(urgent_bytes // 4)
    names = ("alone", "behind", "patient", "all_behind", "all_patient")
    found: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(rounds + 1):  # the first makes what the later ones use
        turns = (("alone", PRIORITY), ("behind", PRIORITY), ("patient", 0))
        for name, priority in in_turn(turns, round_):
            comm.barrier()
            begin = time.perf_counter()
            works = []
            if name != "alone":
                works = [comm.all_reduce(tensor, "mean", async_op=True) for tensor in bulk]
                time.sleep(UNDER_WAY_SECONDS)
            called = time.perf_counter()
            comm.all_reduce(urgent, "mean", priority=priority)
            done = time.perf_counter()
            for work in works:
                work.wait()
            if round_ > 0:
                found[name].append(done - called)
                if name != "alone":
                    found[f"all_{name}"].append(time.perf_counter() - begin)
    return found


def cases(network: Network, rounds: int) -> Iterator[dict[str, Any]]:
    of_ranks, rate = network.run(measure, rounds=rounds)
    settings = [(count, size, urgent) for count, size in BULK for urgent in URGENT_BYTES]
    for case, (count, nbytes, urgent_bytes) in enumerate(settings):
        rounds_s = {
            name: of_slowest_rank(r[case][name] for r in of_ranks) for name in of_ranks[0][case]
        }
        seconds = {name: statistics.median(times) for name, times in rounds_s.items()}
        yield {
            "question": network.kind, "link": network.link, "world": network.world,
            "bytes_per_s": rate,
            "bulk_operations": count, "bulk_bytes": nbytes, "urgent_bytes": urgent_bytes,
            "alone_s": seconds["alone"], "behind_s": seconds["behind"],
            "patient_s": seconds["patient"],
            "limit_s": seconds["alone"] + 2 * SEGMENT_BYTES / rate,
            "bulk_ratio": seconds["all_behind"] / seconds["all_patient"], "rounds_s": rounds_s,
        }  # fmt: skip


def main() -> int:
    made = script_parser(__doc__)
    add_kinds(made)
    add = made.add_argument
    add("--link", default="1gbit,50us", help="emulated (default: %(default)s)")
    add("--rate", default="1gbit", help="of shaped hosts (default: %(default)s)")
    add("--world", default="2,4", help="ranks (default: %(default)s)")
    add("--rounds", type=int, default=7)
    add("--quick", action="store_true", help="two ranks, 2 rounds")
    add("--records", type=Path, help="append one JSON line per case")
    options = made.parse_args()
    if options.quick:
        options.world, options.rounds = "2", 2
    worlds = [int(n) for n in options.world.split(",")]
    networks = networks_of(
        options.questions,
        [(options.link, world) for world in worlds],
        [(options.rate, world) for world in worlds],
    )
    facts = run_facts({"": {"torch": torch.__version__}}, {"rounds": options.rounds})
    print(f"{'':10}{'link':12}{'ranks':>5}{'bulk':>12}{'urgent':>9}", end="")
    print("".join(f"{name:>9}" for name in ("alone", "behind", "limit", "patient", "bulk")), "(ms)")
    for network in networks:
        lines = list(cases(network, options.rounds))
        for line in lines:
            bulk = f"{line['bulk_operations']} x {size_text(line['bulk_bytes'])}"
            print(f"{network.kind:10}{network.link:12}{network.world:>5}{bulk:>12}", end="")
            print(f"{size_text(line['urgent_bytes']):>9}", end="")
            for name in ("alone_s", "behind_s", "limit_s", "patient_s"):
                print(f"{line[name] * 1e3:>9.2f}", end="")
            print(f"{line['bulk_ratio']:>9.3f}", flush=True)
        keep(options.records, facts, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
