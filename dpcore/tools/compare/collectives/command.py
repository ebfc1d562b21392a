"""``dpcore compare all_reduce``: the collectives of dpcore beside Gloo, Open MPI and MPICH."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

from dpcore.tools import argument_types as types
from dpcore.tools.compare.collectives.cells import COLLECTIVES
from dpcore.tools.compare.collectives.contenders import BOUNDS, OURS, by_algorithm, peer
from dpcore.tools.compare.collectives.loop import Pace
from dpcore.tools.compare.collectives.options import Options, chosen_peers, prove_own
from dpcore.tools.compare.collectives.report import draw_all
from dpcore.tools.compare.collectives.session import exit_status
from dpcore.tools.compare.collectives.session import run as measure
from dpcore.tools.sizes import parse_sizes


def run(options: argparse.Namespace) -> int:
    """The exit status: 1 when an element was wrong."""
    names = list(COLLECTIVES) if options.what == "all" else [options.what]
    folder: Path = options.out or Path("compare") / options.what
    kept = folder / "compare.jsonl"
    seconds, most = (0.01, 2.0) if options.quick else (0.02, 4.0)
    pace = Pace(types.rounds_of(options), options.seconds or seconds, most_seconds=most)
    wanted = Options(
        worlds=tuple(options.world or [2]),
        sizes=options.sizes or parse_sizes(types.QUICK_SIZES if options.quick else types.SIZES),
        peers=chosen_peers(options.peers),
        pace=pace,
        json=kept,
        plot=folder / "compare.png" if find_spec("matplotlib") else None,
        huge_pages=options.huge_pages,
    )
    kept.unlink(missing_ok=True)
    algorithms = options.algorithm or []
    prove_own(algorithms, names, wanted.worlds)
    contenders = (*OURS, *map(by_algorithm, algorithms), *map(peer, wanted.peers), *BOUNDS)
    runs = measure(contenders, names, wanted, quiet=options.json)
    pictures = draw_all(wanted.plot, runs)
    if options.json:
        print(kept.read_text(encoding="utf-8"), end="")
    else:
        drawn = f"; {', '.join(map(str, pictures))}" if pictures else ""
        print(f"{kept} has all figures{drawn}")
        if wanted.plot is None:
            print("for a picture as well: pip install matplotlib")
    return exit_status(runs)
