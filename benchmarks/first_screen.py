"""The README's figures, all from one run: `python -m benchmarks.first_screen`

First its three commands, whose output is kept as it was printed. Then a step of its models on a
host and over shaped links: torch DDP with its default buckets and with others,
`DataParallel(model)` without an argument, and computing alone, in turn (`benchmarks.defaults` says
how). Links need root.

It takes ten minutes on two cores, which should have nothing else to do. `--quick` is for
trying it out: few rounds, which show nothing.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.defaults import Cell, measured
from benchmarks.harness.beside_default import details
from benchmarks.harness.options import script_parser
from dpcore.tools.compare.training.ranks import ALONE
from dpcore.tools.records import ROOT, keep, run_facts

CELLS = {  # rounds: a step over the slowest link takes 1.7 seconds
    "host2/mlp/1": 24, "host2/transformer/1": 30, "host2/many/1": 40,
    "1gbit/transformer/1": 20, "1gbit/many/1": 30, "100mbit/transformer/1": 8,
}  # fmt: skip
CONTENDERS = (ALONE, "torch", "torch 1", "torch 4", "torch 100")
SECONDS = 0.05  # of a turn
RESULTS = ROOT / "benchmarks/results/first_screen.jsonl"


def commands() -> list[str]:
    """The README's first ones, each of which is followed by what it prints."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"^## Three commands\n.*?^```bash\n(.*?)^```", text, re.M | re.S)
    assert found is not None
    return [line.partition("  #")[0].strip() for line in found[1].splitlines()]


def files_of_a_reader(folder: Path) -> None:
    """The script of the README, and the model that `dpcore compare --example` prints."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    script = re.search(r"^```python\n(.*?)^```", text, re.M | re.S)
    assert script is not None
    (folder / "train.py").write_text(script[1], encoding="utf-8")
    example = subprocess.run(
        [sys.executable, "-m", "dpcore", "compare", "--example"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    (folder / "my.py").write_text(example.stdout, encoding="utf-8")


def printed_by(command: str, folder: Path) -> str:
    """What a reader sees after typing it, in an environment that is activated."""
    own = Path(sys.executable).parent
    shell = f"PATH={own}:$PATH COLUMNS=100 OMP_NUM_THREADS=1; export PATH COLUMNS OMP_NUM_THREADS"
    run = subprocess.run(
        ["bash", "-c", f"{shell}; {command}"],
        cwd=folder, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return run.stdout


def main() -> int:
    made = script_parser(__doc__)
    made.add_argument("--records", type=Path, default=RESULTS, metavar="FILE")
    made.add_argument("--quick", action="store_true", help="two rounds of each cell")
    options = made.parse_args()
    cells = dict.fromkeys(CELLS, 2) if options.quick else CELLS
    facts = run_facts({"": {"torch": torch.__version__}}, {"rounds": cells, "seconds": SECONDS})
    records: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        files_of_a_reader(Path(folder))
        for command in commands():
            records.append({"command": command, "printed": printed_by(command, Path(folder))})
            print(f"$ {command}\n{records[-1]['printed']}", flush=True)
    for name, rounds in cells.items():
        pace = argparse.Namespace(rounds=rounds, seconds=SECONDS)
        lines = measured(Cell(*name.split("/")), CONTENDERS, pace)
        print(details(name, lines), "\n", flush=True)
        records += lines
    options.records.unlink(missing_ok=True)  # the page shows one run
    keep(options.records, facts, records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
