"""Tests and figures on a machine with a GPU, within a given time: what ``make gpu-check`` runs.

    python tools/gpu_check.py --out build/gpu.json --seconds 420

Such a machine is often there for minutes, and the first thing that hangs must not hide the rest. So
every file of tests has a process of its own, with a limit for each test; whatever hangs or crashes
is named, with the end of what it printed, and the file goes on behind it. First come the simple
ones, alone; then those that start many processes, side by side; then the figures; then
compute-sanitizer with the time that is left. What was found is in the file at any moment.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.cuda.report import lines_of  # noqa: E402

# (files, until which part of the time). Those of one row run side by side.
STAGES: list[tuple[list[str], float]] = [
    (["tests/cuda/test_first.py"], 0.15),
    (["tests/test_cuda_probe.py"], 0.2),
    (["tests/cuda/test_kernels.py"], 0.3),
    (["tests/cuda/test_nccl.py"], 0.4),
    (["tests/cuda/test_device_trace.py"], 0.45),
    (
        [
            "tests/cuda/test_mapped.py",
            "tests/cuda/test_data_parallel.py",
            "tests/cuda/test_torch_backend.py",
        ],
        0.7,
    ),
]
FIGURES_UNTIL = 0.97
LAST = "tests/cuda/test_sanitizer.py"
TEST_LIMIT = 75  # seconds; communicators in tests give up sooner, and say for whom they waited
SANITIZER_LIMIT = 150
PRINTED = 6000  # characters, of a process that hung or crashed


class File:
    """One file of tests, until all of it was tried or its time is over."""

    def __init__(self, name: str, folder: Path, ends_at: float, limit: int = TEST_LIMIT) -> None:
        self.name, self.ends_at, self.limit = name, ends_at, limit
        stem = Path(name).stem
        self.report = folder / f"{stem}.jsonl"
        self.log = folder / f"{stem}.log"
        for path in (self.report, self.log):
            path.unlink(missing_ok=True)
        self.unfinished: dict[str, str] = {}  # tests that hung or crashed, and what was printed
        self.cut_off = False
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-X", "faulthandler", "-m", "pytest", self.name]
        command += ["-p", "tests.cuda.report", "-p", "no:cacheprovider"]
        command += [f"--timeout={self.limit}", "--timeout-method=thread"]
        environment = os.environ | {
            "DPCORE_GPU_REPORT": str(self.report),
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "PYTHONUNBUFFERED": "1",
        }
        with self.log.open("ab") as log:
            return subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def _states(self) -> dict[str, dict[str, Any]]:
        """The last line of each test; a failure stays one."""
        states: dict[str, dict[str, Any]] = {}
        for line in lines_of(self.report):
            if (
                line["state"] != "finished"
                and states.get(line["test"], {}).get("state") != "failed"
            ):
                states[line["test"]] = line
        return states

    def is_done(self) -> bool:
        """Looks, and goes on behind a test that did not come back."""
        code = self.process.poll()
        if code is None:
            if time.monotonic() < self.ends_at:
                return False
            self.cut_off = True
            _end(self.process)
        lines = lines_of(self.report)
        if lines and lines[-1]["state"] == "finished" and not self.cut_off:
            return True
        open_ones = [t for t, line in self._states().items() if line["state"] == "started"]
        new = [test for test in open_ones if test not in self.unfinished]
        for test in new:
            self.unfinished[test] = self.log.read_text(errors="replace")[-PRINTED:]
        if self.cut_off or not new:  # nothing began: it would end in the same way again
            if not lines:
                self.unfinished[self.name] = self.log.read_text(errors="replace")[-PRINTED:]
            return True
        self.process = self._start()
        return False

    def summary(self) -> dict[str, Any]:
        states = self._states()
        of = {
            state: [line for line in states.values() if line["state"] == state]
            for state in ("passed", "failed", "skipped")
        }
        facts = {
            line["test"]: {k: v for k, v in line.items() if k not in ("test", "state", "seconds")}
            for line in of["passed"]
        }
        return {
            "passed": len(of["passed"]),
            "failed": {line["test"]: line.get("why", "") for line in of["failed"]},
            "hung_or_crashed": self.unfinished,
            "skipped": dict(Counter(line["why"] for line in of["skipped"])),
            "seconds": {line["test"]: line["seconds"] for line in of["passed"]},
            "facts": {test: found for test, found in facts.items() if found},
            "cut_off": self.cut_off,
        }


def _end(process: subprocess.Popen[bytes]) -> None:
    """With all that it has started, which is a session of its own."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=3)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_side_by_side(files: Sequence[File]) -> None:
    waiting = list(files)
    while waiting:
        waiting = [file for file in waiting if not file.is_done()]
        time.sleep(0.1)
    for file in files:
        found = file.summary()
        print(
            f"{file.name}: {found['passed']} passed, {len(found['failed'])} failed, "
            f"{len(found['hung_or_crashed'])} hung or crashed"
            + (", cut off" if file.cut_off else ""),
            flush=True,
        )


def run_figures(path: Path, ends_at: float) -> str:
    """Empty, or why there are not all of them."""
    seconds = ends_at - time.monotonic()
    if seconds < 20:
        return "no time was left for figures"
    command = [sys.executable, "-X", "faulthandler", "-m", "benchmarks.gpu"]
    command += ["--out", str(path), "--seconds", str(int(seconds) - 10)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    }
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        _end(process)
        return "figures were cut off: what was being measured hung, or took too long"
    return "" if process.returncode == 0 else f"figures ended with status {process.returncode}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu.json")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "gpu-tests", help="of logs")
    parser.add_argument("--seconds", type=float, default=420, help="for all of it")
    parser.add_argument("--files", nargs="*", help="only these files of tests, and no figures")
    options = parser.parse_args()
    began = time.monotonic()
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    figures = folder / "figures.json"
    figures.unlink(missing_ok=True)
    tests: dict[str, Any] = {}
    problem = ""

    def at(part: float) -> float:
        return began + part * float(options.seconds)

    def save() -> dict[str, Any]:
        measured = json.loads(figures.read_text()) if figures.is_file() else {}
        if problem:
            measured.setdefault("failures", {})["figures"] = problem
        found: dict[str, Any] = measured | {"tests": tests}
        options.out.write_text(json.dumps(found, indent=1) + "\n")
        return found

    stages = STAGES if options.files is None else [(list(options.files), 1.0)]
    for names, until in stages:
        files = [File(name, folder, at(until)) for name in names]
        run_side_by_side(files)
        tests |= {file.name: file.summary() for file in files}
        save()
    if options.files is None:
        problem = run_figures(figures, at(FIGURES_UNTIL))
        save()
        limit = int(min(at(1.0) - time.monotonic(), SANITIZER_LIMIT))
        if limit > 20 and shutil.which("compute-sanitizer"):
            last = File(LAST, folder, at(1.0), limit)
            run_side_by_side([last])
            tests[LAST] = last.summary()
    found = save()
    bad = [name for of in tests.values() for name in (*of["failed"], *of["hung_or_crashed"])]
    for name in (*bad, *found.get("failures", {}).values()):
        print(name, file=sys.stderr)
    return 1 if bad or found.get("failures") else 0


if __name__ == "__main__":
    sys.exit(main())
