"""The arguments that scripts share."""

from __future__ import annotations

import argparse
from pathlib import Path

from dpcore.tools import argument_types as types
from dpcore.tools.compare.collectives.contenders import PEERS
from dpcore.tools.compare.collectives.loop import Pace
from dpcore.tools.compare.collectives.options import Options, chosen_peers
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
    types.add(result, "--sizes", said=f"default: {sizes}, with --quick {quick_sizes}")
    types.add(result, "--world", worlds)
    types.add(result, "--peers", ",".join(PEERS), "default: all; a missing one is reported")
    types.add(result, "--rounds", said=f"default: {rounds}, with --quick 3")
    types.add(result, "--quick")
    add("--records", type=Path, metavar="FILE", help="append a line per cell and contender")
    add("--plot", type=Path, metavar="FILE.png", help="bandwidth and latency as a picture")
    add(
        "--huge-pages", action="store_true",
        help="ordinary memory of all contenders on huge pages (default: as torch allocates it)",
    )  # fmt: skip
    result.set_defaults(default_sizes=sizes, quick_sizes=quick_sizes, default_rounds=rounds)
    return result


def options_of(made: argparse.ArgumentParser, arguments: argparse.Namespace) -> Options:
    standard = arguments.quick_sizes if arguments.quick else arguments.default_sizes
    try:
        peers = chosen_peers(arguments.peers)
    except ValueError as error:
        made.error(str(error))
    if min(arguments.world) < 2:
        made.error("--world: a collective needs at least 2 ranks")
    rounds = arguments.rounds or (3 if arguments.quick else arguments.default_rounds)
    pace = Pace(rounds=rounds)
    if arguments.quick:
        pace = Pace(rounds=rounds, round_seconds=0.01, most_seconds=3.0)
    return Options(
        worlds=tuple(arguments.world),
        sizes=arguments.sizes or parse_sizes(standard),
        peers=peers,
        pace=pace,
        json=arguments.records,
        plot=arguments.plot,
        huge_pages=arguments.huge_pages,
    )
