"""The command line: ``dpcore bench`` and ``dpcore inspect``, also as ``python -m dpcore``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from dpcore import __version__
from dpcore.errors import Error

_BENCH_EXAMPLES = """\
examples:
  dpcore bench                                         all_reduce on 2 ranks, 8 B to 64 MiB
  dpcore bench --world 4 --sizes 1K:16M:4 --algorithm auto,ring,two_shot
  dpcore bench --collective all_gather,reduce_scatter --dtype bfloat16 --plain
  dpcore bench --json | jq .busbw
  dpcore bench --calibrate                             once per machine: see Communicator.explain
  torchrun --nproc-per-node 4 -m dpcore bench          on the ranks that a launcher started

The columns are those of nccl-tests: size is the larger side of the operation, algbw = size / time,
busbw = algbw times the share of the bytes that must cross every rank's link (for all_reduce
2(n-1)/n). The time is that of the slowest rank, #wrong the elements that differ from the result
that is known in advance, over all ranks. The exit status is 1 when there are any.
"""

_INSPECT_EXAMPLES = """\
examples:
  dpcore inspect 4711                           what rank in process 4711 does, or did last
  dpcore inspect $(pgrep -f train.py)           all ranks of a job on this host
  dpcore inspect --json 4711 | jq .in_flight

The process is not stopped, asked or slowed down: its black box lies in memory that can be read
from outside, also while it hangs. The ranks that have entered fewer operations than the others
are the ones to look at. send and recv are not in the black box.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except (Error, OSError, ValueError) as problem:
        print(f"dpcore {options.command}: {problem}", file=sys.stderr)
        return 1
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dpcore", description="Collective communication that you can read and see."
    )
    parser.add_argument("--version", action="version", version=f"dpcore {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    _add_bench(commands)
    _add_inspect(commands)
    return parser


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    bench = commands.add_parser(
        "bench",
        help="measure collectives on this machine",
        description="Measures dpcore's collectives on ranks of this machine.",
        epilog=_BENCH_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    bench.set_defaults(run=_bench)
    bench.add_argument(
        "--collective",
        default="all_reduce",
        metavar="NAMES",
        help="one or several with commas, or 'all' (default: all_reduce)",
    )
    bench.add_argument(
        "--world", type=int, metavar="N", help="ranks to start (default: 2; a launcher's if any)"
    )
    bench.add_argument(
        "--sizes",
        default="8:64M:4",
        metavar="SIZES",
        help="FROM:TO:FACTOR, or a list with commas; K, M, G are powers of 1024 (default: 8:64M:4)",
    )
    bench.add_argument("--dtype", default="float32", help="type of the elements (default: float32)")
    bench.add_argument("--op", default="sum", help="sum, mean, prod, min, max (default: sum)")
    bench.add_argument(
        "--algorithm",
        default="auto",
        metavar="NAMES",
        help="one or several with commas, measured one after the other (default: auto)",
    )
    bench.add_argument(
        "--plain", action="store_true", help="ordinary tensors instead of tensors in the arena"
    )
    bench.add_argument(
        "--seconds", type=float, default=0.2, metavar="S", help="to measure each row (default: 0.2)"
    )
    bench.add_argument("--json", action="store_true", help="one JSON object per line, no table")
    bench.add_argument(
        "--calibrate",
        action="store_true",
        help="measure what algorithms are chosen by (memory, loopback; behind a launcher on "
        "several hosts, the network), and keep it in the user's cache",
    )


def _add_inspect(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    inspect = commands.add_parser(
        "inspect",
        help="show what a running, or hanging, rank does",
        description="Shows the black box of dpcore processes of this host from outside.",
        epilog=_INSPECT_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    inspect.set_defaults(run=_inspect)
    inspect.add_argument("pid", type=int, nargs="+", help="process number of a rank")
    inspect.add_argument("--json", action="store_true", help="one JSON object per communicator")


def _bench(options: argparse.Namespace) -> int:
    from dpcore import bench, calibrate

    if options.calibrate:
        return calibrate.run(options.json, options.seconds)
    plan = bench.Plan(
        collectives=bench.parse_collectives(options.collective),
        sizes=bench.parse_sizes(options.sizes),
        dtype=options.dtype,
        op=options.op,
        algorithms=tuple(options.algorithm.split(",")),
        plain=options.plain,
        seconds=options.seconds,
        json=options.json,
    )
    return bench.run(plan, options.world)


def _inspect(options: argparse.Namespace) -> int:
    from dpcore import black_box

    return black_box.show(options.pid, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
