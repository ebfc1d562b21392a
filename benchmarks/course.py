"""Runs the demonstrations of examples/course one after the other. `make course`

python -m benchmarks.course                     # all, figures in build/course
python -m benchmarks.course accuracy layerwise  # these
python -m benchmarks.course --keep              # also into benchmarks/results and docs
python -m benchmarks.course --write             # writes docs/course.md from kept results
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.figures import load, source
from dpcore.tools.records import ROOT, append, run_facts

DEMONSTRATIONS = (
    *("throughput", "critical_batch", "accuracy", "layerwise", "batch_norm", "local_updates"),
    *("all_reduce_ways", "strategies", "speed_up"),
)
FOLDER = ROOT / "examples" / "course"
RESULTS = ROOT / "benchmarks" / "results" / "course.jsonl"
PICTURES = ROOT / "docs" / "images" / "course"
PAGE = ROOT / "docs" / "course.md"
BLOCK = re.compile(r"(<!-- course: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
TIMES = re.compile(r"(<!-- times of the course -->\n).*?(<!-- end -->)", re.DOTALL)


def run(name: str, out: Path, quick: bool) -> dict[str, Any] | None:
    """What it found, or None when it failed; then it has said why."""
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--json", "--out", str(out)]
    done = subprocess.run([*command, *(["--quick"] if quick else [])], stdout=subprocess.PIPE)
    if done.returncode != 0:
        return None
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def table(rows: list[Mapping[str, str]]) -> str:
    """In Markdown."""
    numbers = [name for name in rows[0] if rows[0][name][:1].isdigit()]
    lines = [
        list(rows[0]),
        ["---:" if name in numbers else "---" for name in rows[0]],
        *(list(row.values()) for row in rows),
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def rendered(page: str) -> str:
    """The page with what the newest kept run of each demonstration has found."""
    kept = load("course") if RESULTS.exists() else []
    newest = {record["demonstration"]: record for record in kept}

    def block(match: re.Match[str]) -> str:
        if match[2] not in newest:
            return match[0]
        record = newest[match[2]]
        said = "\n\n".join(record["said"])
        origin = source("course", [record], "../", f"{record['seconds']:.0f} seconds")
        picture = f"![{match[2].replace('_', ' ')}](images/course/{match[2]}.png)"
        return f"{match[1]}{picture}\n\n{table(record['rows'])}\n\n{said}\n\n{origin}\n{match[3]}"

    page = BLOCK.sub(block, page)
    kept_times = {name: newest[name]["seconds"] for name in DEMONSTRATIONS if name in newest}
    return TIMES.sub(lambda match: f"{match[1]}{times(kept_times)}\n{match[2]}", page)


def times(seconds: Mapping[str, float]) -> str:
    """Of each demonstration, and of all."""
    rows = [{"demonstration": f"`{name}.py`", "seconds": f"{s:.0f}"} for name, s in seconds.items()]
    all_of_them = {"demonstration": "all", "seconds": f"{sum(seconds.values()):.0f}"}
    return table([*rows, all_of_them])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(DEMONSTRATIONS))
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that they run")
    parser.add_argument("--keep", action="store_true", help="commit-ready results and pictures")
    parser.add_argument("--write", action="store_true", help="write docs/course.md, run nothing")
    chosen = parser.parse_args()
    if unknown := sorted(set(chosen.names) - set(DEMONSTRATIONS)):
        parser.error(f"{', '.join(unknown)}: choose from {', '.join(DEMONSTRATIONS)}")
    if chosen.keep and chosen.quick:
        parser.error("--keep with --quick: what small sizes show is not worth keeping")
    if not chosen.write:
        failed = run_all(chosen.names or DEMONSTRATIONS, chosen.quick, chosen.keep)
        if failed:
            print(f"failed: {', '.join(failed)}", file=sys.stderr)
            return 1
    if chosen.write or chosen.keep:
        PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


def run_all(names: tuple[str, ...] | list[str], quick: bool, keep: bool) -> list[str]:
    """The names of those that failed."""
    import torch

    folder = ROOT / "build" / "course"
    folder.mkdir(parents=True, exist_ok=True)
    failed, begin = [], time.perf_counter()
    for number, name in enumerate(names):
        print(f"[{number + 1}/{len(names)}] {name}", flush=True)
        picture = folder / f"{name}.png"
        found = run(name, picture, quick)
        if found is None:
            failed.append(name)
            continue
        print(*(f"    {sentence}" for sentence in found["said"]), sep="\n")
        print(f"    {found['seconds']:.0f} s", flush=True)
        if keep:
            PICTURES.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(picture, PICTURES / picture.name)
            facts = run_facts({"": {"torch": torch.__version__}}, {"demonstration": name})
            append(RESULTS, [facts | found])
    print(f"{time.perf_counter() - begin:.0f} s for {len(names)}, the figures are in {folder}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
