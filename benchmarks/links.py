"""Does TCP fill a slow link? Is an emulated one like it? `python -m benchmarks.links`"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dpcore.tools.ratios import in_turn, of_slowest_rank
from dpcore.tools.records import keep, run_facts
from dpcore.tools.sizes import parse_sizes

DESCRIPTION = """\
Two network namespaces, joined by a link that the kernel shapes (tc tbf).

filling    one message of dpcore from one side to the other, beside the same bytes through one raw
           TCP stream, in turns. Target: at least 0.98 of the stream's goodput at 1 Gbit/s.
emulating  an all-reduce over the shaped link, beside the same one in one namespace behind
           link="<rate>,<latency>" (link.h), in turns. Target: within 10% of each other.

Needs the rights of root. What is shaped is what leaves a host; the latency of the emulated link is
what a small all-reduce takes on the real one.
"""

# Both ranks of a pair run this, told by the environment where they are. One line of output per
# round of rank 0: the seconds of every size.
RANK = """
import json, os, socket, sys, time, warnings
warnings.simplefilter("ignore")
import torch, dpcore as dp
torch.set_num_threads(1)
settings = json.loads(os.environ["LINKS_SETTINGS"])
comm = dp.init(timeout=120, **settings["init"])
def stream_line():
    if not settings["stream"]:
        return None
    if comm.rank == 1:
        listener = socket.create_server((settings["stream"], 0))
        port = torch.tensor([listener.getsockname()[1]])
        comm.broadcast(port, 1)
        return listener.accept()[0]
    port = torch.zeros(1, dtype=torch.int64)
    comm.broadcast(port, 1)
    return socket.create_connection((settings["stream"], int(port)))
line = stream_line()
def raw(buffer):
    view = memoryview(buffer.numpy()).cast("B")
    if comm.rank == 0:
        line.sendall(view)
        line.recv(1)
    else:
        have = 0
        while have < len(view):
            have += line.recv_into(view[have:])
        line.sendall(b"!")
def message(buffer):
    done = torch.zeros(1, dtype=torch.uint8)
    if comm.rank == 0:
        comm.send(buffer, 1)
        comm.recv(done, 1)
    else:
        comm.recv(buffer, 0)
        comm.send(done, 0)
def all_reduce(buffer):
    comm.all_reduce(buffer, "mean", algorithm="two_shot")
calls = {"raw": raw, "message": message, "all_reduce": all_reduce}
buffers = [torch.ones(size // 4) for size in settings["sizes"]]
for command in sys.stdin:
    name = command.strip()
    seconds = []
    for buffer in buffers:
        comm.barrier()
        begin = time.perf_counter()
        calls[name](buffer)
        seconds.append(time.perf_counter() - begin)
    print(json.dumps(seconds), flush=True)
dp.finalize()
"""
PORT = 29544


@dataclass(frozen=True)
class Row:
    """Medians in milliseconds; ``ratio``: what was asked for, over what it is compared with."""

    question: str
    rate: str
    size: int
    here_ms: float
    other_ms: float
    ratio: float
    here_rounds_s: list[float]
    other_rounds_s: list[float]


def row(question: str, rate: str, size: int, here: list[float], other: list[float]) -> Row:
    """Filling is judged by speed, emulating by time."""
    mine, its = statistics.median(here), statistics.median(other)
    ratio = its / mine if question == "filling" else mine / its
    return Row(question, rate, size, mine * 1e3, its * 1e3, ratio, here, other)


class Pair:
    """Two ranks, and the seconds that rank 0 tells of."""

    def __init__(self, made: Any, hosts: tuple[int, int], settings: dict[str, Any]) -> None:
        import subprocess

        self.ranks = []
        for rank, host in enumerate(hosts):
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "LINKS_SETTINGS": json.dumps(settings),
            }
            self.ranks.append(
                made.start(host, RANK, environment, stdin=subprocess.PIPE, stderr=None)
            )

    def seconds(self, name: str) -> list[float]:
        for rank in self.ranks:
            rank.stdin.write(f"{name}\n")
            rank.stdin.flush()
        said = [rank.stdout.readline() for rank in self.ranks]
        if not all(said):
            raise RuntimeError("a rank of the benchmark ended; its error stands above")
        return of_slowest_rank(map(json.loads, said))

    def end(self) -> None:
        for rank in self.ranks:
            rank.stdin.close()
        for rank in self.ranks:
            rank.wait(timeout=30)


def in_turns(calls: list[Callable[[], list[float]]], rounds: int) -> list[list[list[float]]]:
    """The seconds of each, by size and round; the first round only warms up."""
    taken: list[list[list[float]]] = [[] for _ in calls]
    turns = list(zip(calls, taken, strict=True))
    for turn in range(rounds + 1):
        for call, times in in_turn(turns, turn):
            found = call()
            if turn > 0:
                times.append(found)
    return [[list(column) for column in zip(*times, strict=True)] for times in taken]


def filling(made: Any, rate: str, sizes: list[int], rounds: int) -> Iterator[Row]:
    method = f"tcp://{made.address(0)}:{PORT}"
    init = {"transport": "tcp", "init_method": method}
    pair = Pair(made, (0, 1), {"init": init, "sizes": sizes, "stream": made.address(1)})
    try:
        ours, stream = in_turns(
            [lambda: pair.seconds("message"), lambda: pair.seconds("raw")], rounds
        )
    finally:
        pair.end()
    for size, here, other in zip(sizes, ours, stream, strict=True):
        yield row("filling", rate, size, here, other)


def emulating(made: Any, rate: str, sizes: list[int], rounds: int) -> Iterator[Row]:
    method = f"tcp://{made.address(0)}:{PORT}"
    init: dict[str, Any] = {"transport": "tcp", "init_method": method}
    small = 32 << 10
    real = Pair(made, (0, 1), {"init": init, "sizes": [small, *sizes], "stream": ""})
    try:
        # What a small one takes beyond its bytes is the latency of entering and of two steps.
        fastest = min(real.seconds("all_reduce")[0] for _ in range(rounds + 3))
        latency = max(1e-6, (fastest - small / (bits(rate) / 8)) / 3)
        init = {
            "transport": "tcp",
            "init_method": f"tcp://127.0.0.1:{PORT + 1}",
            "link": f"{rate},{latency * 1e6:.1f}us",
        }
        paced = Pair(made, (0, 0), {"init": init, "sizes": [small, *sizes], "stream": ""})
        try:
            there, here = in_turns(
                [lambda: real.seconds("all_reduce"), lambda: paced.seconds("all_reduce")], rounds
            )
        finally:
            paced.end()
    finally:
        real.end()
    for size, emulated, shaped in zip(sizes, here[1:], there[1:], strict=True):
        yield row("emulating", rate, size, emulated, shaped)


def bits(rate: str) -> float:
    """Per second, of "100mbit"."""
    from dpcore.base.link import parse_speed

    return parse_speed(rate).bytes_per_second * 8


def main() -> int:
    made = argparse.ArgumentParser(
        description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--rates", default="100mbit,200mbit,500mbit,1gbit")
    made.add_argument("--sizes", type=parse_sizes, default=parse_sizes("1M,4M,16M"))
    made.add_argument("--rounds", type=int, default=7)
    made.add_argument("--quick", action="store_true", help="one rate, one size, few rounds")
    made.add_argument("--records", type=Path, help="append the rows to this file")
    options = made.parse_args()
    rates, sizes = options.rates.split(","), list(options.sizes)
    if options.quick:
        rates, sizes, options.rounds = ["200mbit"], [1 << 20], 2

    from dpcore.tools import hosts as namespaces

    if reason := namespaces.why_not():
        print(f"benchmarks.links {reason}", file=sys.stderr)
        return 1
    print(f"{'question':<10} {'rate':>8} {'bytes':>10} {'dpcore ms':>10} {'other ms':>10} ratio")
    facts = run_facts({"": {"torch": version("torch")}}, {"rounds": options.rounds})
    for rate in rates:
        with namespaces.hosts(2) as hosts:
            hosts.shape(rate)
            for question in (filling, emulating):
                for found in question(hosts, rate, sizes, options.rounds):
                    print(
                        f"{found.question:<10} {found.rate:>8} {found.size:>10} "
                        f"{found.here_ms:>10.2f} {found.other_ms:>10.2f} {found.ratio:.3f}",
                        flush=True,
                    )
                    keep(options.records, facts, [asdict(found)])
    return 0


if __name__ == "__main__":
    begin = time.monotonic()
    status = main()
    print(f"{time.monotonic() - begin:.0f} s")
    sys.exit(status)
