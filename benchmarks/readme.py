"""Writes the figures of README.md from a committed result file.

python -m benchmarks.readme            # says whether README.md is up to date
python -m benchmarks.readme --write    # and makes it so
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results" / "all_reduce.jsonl"
BLOCK = re.compile(r"(<!-- figures: all_reduce -->\n).*?(<!-- end -->)", re.DOTALL)
CONTENDERS = ("dpcore arena", "dpcore plain", "Gloo", "Open MPI", "MPICH")
SIZES = (8, 32768, 1048576, 4194304, 16777216, 67108864, 268435456)


def size_text(size: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


def time_text(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} µs" if seconds < 1e-4 else f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1e-2 else f"{seconds * 1e3:.1f} ms"


def load(path: Path = RESULTS) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def table(records: list[dict[str, Any]], world: int = 2) -> str:
    """Medians of one all-reduce, a row a size, from the records of one run."""
    times = {
        (record["bytes"], record["contender"].lower()): record.get("median_s")
        for record in records
        if record["collective"] == "all_reduce" and record["world"] == world
    }
    lines = [
        "| float32, " + str(world) + " ranks | " + " | ".join(CONTENDERS) + " |",
        "|---:|" + "---:|" * len(CONTENDERS),
    ]
    for size in SIZES:
        row = [time_text(times.get((size, name.lower()))) for name in CONTENDERS]
        if any(cell != "–" for cell in row):
            lines.append(f"| {size_text(size)} | " + " | ".join(row) + " |")
    first = records[0]
    machine = first["machine"]
    lines += [
        "",
        f"Medians of one run on {machine['cores']} cores of an {machine['cpu']}"
        f" ({first['date'][:10]}, commit {first['commit'][:10].rstrip('+')});"
        " the records are in [`benchmarks/results/all_reduce.jsonl`]"
        "(benchmarks/results/all_reduce.jsonl).",
    ]
    return "\n".join(lines) + "\n"


def rendered(readme: str, records: list[dict[str, Any]]) -> str:
    block = table(records)
    return BLOCK.sub(lambda match: match.group(1) + block + match.group(2), readme)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--write", action="store_true", help="change README.md")
    arguments = parser.parse_args()
    old = README.read_text(encoding="utf-8")
    new = rendered(old, load())
    if arguments.write:
        README.write_text(new, encoding="utf-8")
    elif new != old:
        print("README.md is not up to date; run: python -m benchmarks.readme --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
