"""Writes the lists of files that one all-reduce enters, as measured, into docs/architecture.md.

python tools/entered_files.py            # says whether they are up to date
python tools/entered_files.py --write    # and makes them so

It builds tests/cpp/entered.cpp with a hook at the start of every function, runs it over mapped
memory and over TCP, and keeps the files that nearly all calls enter in each of some runs, so none
that are entered only where a rank happens to sleep. Both ranks share one processor, so the lists
are the same on every machine; the two ways are measured side by side where there are more.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "architecture.md"
PROGRAM = ROOT / "build" / "cpp" / "entered" / "entered"
BLOCK = re.compile(r"(<!-- entered files -->\n).*?(<!-- end -->)", re.DOTALL)
# Over mapped memory little enough that no rank has to sleep, over TCP enough that every call does:
# on processors of all speeds.
BYTES = {"mapped": 1 << 16, "tcp": 1 << 22}
CALLS = 60  # enough that some find their peer there, and some wait for it
USUAL = 0.9  # of the calls
BY_THE_CLOCK = {"engine/engine_trouble.cpp"}  # whether the 20 ms between two checks end in a call
RUNS = 5  # in some, the two ranks fall into a step in which one sleeps in most calls
WAYS = {"mapped": "over mapped memory", "tcp": "over TCP"}
# From the call down to the kernel, as the picture of the folders has them.
FOLDERS = (
    ".", "operations", "engine", "transport", "group", "network", "collective", "memory",
    "schedule", "reduce", "base",
)  # fmt: skip


_found: dict[str, str] = {}  # for `files_of`: by offset, "" where it is elsewhere


def files_of(offsets: set[str]) -> dict[str, str]:
    """The file of csrc/comm where a function begins, for those that are there."""
    if asked := sorted(offset for offset in offsets if offset not in _found):
        command = ["addr2line", "-e", str(PROGRAM), *asked]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for offset, line in zip(asked, out.splitlines(), strict=True):
            match = re.search(r"csrc/comm/([^:]+)", line)
            _found[offset] = match[1] if match else ""
    return {offset: _found[offset] for offset in offsets if _found[offset]}


@contextlib.contextmanager
def before_others() -> Iterator[None]:
    """For what this thread starts: a rank that has lost its processor to another program for long
    sleeps in every call."""
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def measured(way: str, processor: int) -> tuple[set[str], set[str]]:
    """What calls usually enter, and what they enter besides when a rank is late. In a thread of its
    own, which stays on this processor."""
    os.sched_setaffinity(0, {processor})
    runs = [run(way) for _ in range(RUNS)]
    usual, late = (
        set.intersection(
            *(usually([f for kind, f in calls if (kind == "late") == is_late]) for calls in runs)
        )
        for is_late in (False, True)
    )
    usual -= BY_THE_CLOCK
    return usual, (late | BY_THE_CLOCK) - usual


def run(way: str) -> list[tuple[str, set[str]]]:
    """Call by call: its kind, and the files that it entered."""
    command = [str(PROGRAM), way, str(BYTES[way]), str(CALLS)]
    with before_others():
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    calls: list[tuple[str, set[str]]] = []
    for line in out.split():
        if line.startswith("0x"):
            calls[-1][1].add(line)
        else:
            calls.append((line, set()))
    file_of = files_of(set().union(*(offsets for _, offsets in calls)))
    return [(kind, {file_of[at] for at in offsets & file_of.keys()}) for kind, offsets in calls]


def usually(calls: list[set[str]]) -> set[str]:
    counts = Counter(file for files in calls for file in files)
    return {file for file, count in counts.items() if count >= USUAL * len(calls)}


def text_of(files: set[str]) -> str:
    """`engine.{cpp,h}`, `operation.h`"""
    kinds = defaultdict(list)
    for file in sorted(files):
        path = PurePosixPath(file)
        kinds[path.stem].append(path.suffix[1:])
    return ", ".join(
        f"`{stem}.{suffixes[0]}`" if len(suffixes) == 1 else f"`{stem}.{{{','.join(suffixes)}}}`"
        for stem, suffixes in kinds.items()
    )


def table() -> str:
    jobs = f"-j{len(os.sched_getaffinity(0))}"
    subprocess.run(["make", "-s", jobs, str(PROGRAM.relative_to(ROOT))], cwd=ROOT, check=True)
    processors = sorted(os.sched_getaffinity(0))
    with ThreadPoolExecutor(len(processors)) as pool:  # most of the time, a rank is late
        found = dict(zip(WAYS, pool.map(measured, WAYS, itertools.cycle(processors)), strict=True))
    heads = [f"{name}: {len(found[way][0])} files" for way, name in WAYS.items()]
    lines = [f"| csrc/comm | {' | '.join(heads)} |", "|---|---|---|"]
    seen = {
        str(PurePosixPath(f).parent) for sets in found.values() for files in sets for f in files
    }
    assert seen <= set(FOLDERS), f"name these in FOLDERS: {seen - set(FOLDERS)}"
    for folder in FOLDERS:
        cells = [
            text_of({f for f in found[way][0] if str(PurePosixPath(f).parent) == folder})
            for way in WAYS
        ]
        if any(cells):
            lines.append(f"| {'' if folder == '.' else folder} | {' | '.join(cells)} |")
    late = [text_of(found[way][1]) for way in WAYS]
    lines.append(f"| and when a peer is late, or 20 ms are over | {' | '.join(late)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    old = DOCUMENT.read_text(encoding="utf-8")
    entered = table()
    new = BLOCK.sub(lambda match: match[1] + entered + match[2], old)
    if "--write" in sys.argv[1:]:
        DOCUMENT.write_text(new, encoding="utf-8")
    elif new != old:
        print(f"{DOCUMENT.name} is not up to date; run: python tools/entered_files.py --write")
        print(
            *difflib.unified_diff(
                old.splitlines(), new.splitlines(), "kept", "measured", n=0, lineterm=""
            ),
            sep="\n",
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
