"""The arguments that scripts share."""

from __future__ import annotations

import argparse
from pathlib import Path

from dpcore.tools.compare.collectives.contenders import PEERS
from dpcore.tools.compare.collectives.loop import Pace
from dpcore.tools.compare.collectives.options import Options, chosen_peers
from dpcore.tools.sizes import HELP as SIZES_HELP
from dpcore.tools.sizes import parse_sizes


def script_parser(description: str | None) -> argparse.ArgumentParser:
    """With the script's docstring as its help, line by line as it is written."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def parser(
    description: str, sizes: str, quick_sizes: str, worlds: str = "2", rounds: int = 7
) -> argparse.ArgumentParser:
    result = script_parser(description)
    add = result.add_argument
    add("--sizes", metavar="SIZES", help=f"{SIZES_HELP} (default: {sizes})")
    add("--world", default=worlds, metavar="N,...", help=f"ranks, 2,4 (default {worlds})")
    add(
        "--peers", default=",".join(PEERS), metavar="NAMES",
        help=f"of {','.join(PEERS)}, or none (default: all; a missing one is reported)",
    )  # fmt: skip
    add("--rounds", type=int, metavar="N", help=f"rounds of every contender (default {rounds})")
    add("--quick", action="store_true", help=f"3 short rounds of fewer sizes ({quick_sizes})")
    add("--json", type=Path, metavar="FILE", help="append one JSON line per cell and contender")
    add("--plot", type=Path, metavar="FILE.png", help="bandwidth and latency as a picture")
    add(
        "--huge-pages", action="store_true",
        help="ordinary memory of all contenders on huge pages (default: as torch allocates it)",
    )  # fmt: skip
    result.set_defaults(default_sizes=sizes, quick_sizes=quick_sizes, default_rounds=rounds)
    return result


def options_of(made: argparse.ArgumentParser, arguments: argparse.Namespace) -> Options:
    try:
        standard = arguments.quick_sizes if arguments.quick else arguments.default_sizes
        worlds = tuple(int(n) for n in arguments.world.split(","))
        sizes = parse_sizes(arguments.sizes or standard)
        peers = chosen_peers(arguments.peers)
    except ValueError as error:
        made.error(str(error))
    if min(worlds) < 2:
        made.error("--world: a collective needs at least 2 ranks")
    rounds = arguments.rounds or (3 if arguments.quick else arguments.default_rounds)
    if rounds < 1:
        made.error("--rounds: at least 1")
    pace = Pace(rounds=rounds)
    if arguments.quick:
        pace = Pace(rounds=rounds, round_seconds=0.01, most_seconds=3.0)
    return Options(worlds, sizes, peers, pace, arguments.json, arguments.plot, arguments.huge_pages)
