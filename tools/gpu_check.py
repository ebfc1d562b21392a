"""Build, tests and figures on a machine with a GPU, within a given time: what ``make gpu-check``
runs.

    python tools/gpu_check.py --build --out build/gpu.json --seconds 580

Such a machine is often there for minutes, and the first thing that hangs must not hide the rest. So
every file of tests has a process of its own, with a limit for each test; whatever hangs or crashes
is named, with the end of what it printed, and the file goes on behind it. First comes the build;
then the simplest tests, alone; then those with one process, side by side; then those that start
many, one file after the other; then the figures; then compute-sanitizer with the time that is
left. What was found is in the file at any moment.

Exit status: 0 when all that this machine has room for was run and is right; 1 when something
failed, hung, had no time or could not be run for want of a package; 2 when only targets were
missed. Tests that are skipped, and compute-sanitizer where there is none, are in the file and do no
harm.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools import gpu_machine  # noqa: E402
from tools.gpu_machine import SANITIZER, SANITIZER_TOOLS  # noqa: E402
from tools.gpu_tests import File, run_side_by_side, run_until  # noqa: E402

# (files, until which part of the time behind the build). Those of one row run side by side; of the
# last five the ranks are processes, which would take turns on the GPU with those of another file.
STAGES: list[tuple[list[str], float]] = [
    (["tests/cuda/test_first.py"], 0.08),
    (
        [
            "tests/test_cuda_probe.py",
            "tests/cuda/test_kernels.py",
            "tests/cuda/test_nccl.py",
            "tests/cuda/test_device_trace.py",
            "tests/cuda/test_cupy.py",
        ],
        0.21,
    ),
    (["tests/cuda/test_mapped.py"], 0.41),
    (["tests/cuda/test_data_parallel.py"], 0.47),
    (["tests/cuda/test_features.py"], 0.54),
    (["tests/cuda/test_across_steps.py"], 0.60),
    (["tests/cuda/test_torch_backend.py"], 0.65),
]
STAGE_SECONDS = 30  # at least, whatever those before have taken: libraries alone take ten
FIGURES_UNTIL = 0.86
FIGURES_UNTIL_ALONE = 0.97  # where there is no compute-sanitizer
LAST = "tests/cuda/test_sanitizer.py"
LEAST_SECONDS = 20  # of figures, and of each tool of compute-sanitizer

Found = dict[str, Any]


def run_figures(path: Path, ends_at: float) -> str:
    """Empty, or why there are not all of them."""
    seconds = ends_at - time.monotonic()
    if seconds < LEAST_SECONDS:
        return "no time was left for figures"
    command = [sys.executable, "-X", "faulthandler", "-m", "benchmarks.gpu"]
    command += ["--out", str(path), "--seconds", str(int(seconds) - 10)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    }
    status = run_until(command, environment, ends_at)
    if status is None:
        return "figures were cut off: what was being measured hung, or took too long"
    return "" if status == 0 else f"figures ended with status {status}"


def run_sanitizer(folder: Path, ends_at: float) -> tuple[Found, Found]:
    """What became of it, and its tests if there were any. Each tool has a third of the time."""
    path = gpu_machine.find_tool(SANITIZER)
    if path is None:
        what = f"not found: {SANITIZER} is neither in PATH nor in $CUDA_HOME/bin"
        return {"path": None, "outcome": what}, {}
    if not gpu_machine.is_there("pytest"):
        return {"path": path, "outcome": "not run: its tests need pytest"}, {}
    seconds = int((ends_at - time.monotonic()) / len(SANITIZER_TOOLS)) - 2
    if seconds < LEAST_SECONDS:
        return {"path": path, "outcome": f"no time was left: {seconds} s for each tool"}, {}
    told = {"DPCORE_SANITIZER_SECONDS": str(seconds)}
    file = File(LAST, folder, ends_at, seconds + 5, told)
    run_side_by_side([file])
    found = file.summary()
    seen = {"passed": found["passed"], "failed": len(found["failed"])}
    seen |= {"hung or crashed": len(found["hung_or_crashed"])}
    seen |= {f"skipped ({why})": count for why, count in found["skipped"].items()}
    what = ", ".join(f"{count} {how}" for how, count in seen.items() if count)
    return {"path": path, "outcome": what, "seconds_each": seconds}, found


def missed(row: Found) -> str:
    """A row that does not reach its target, as a sentence; empty for any other, and for one that
    is a failure itself."""
    if row.get("reached", True) or "wrong" in row:
        return ""
    measure, whose, bound = "of_copy", "a copy's rate", "at least"
    if "target_of_torch" in row:
        measure, whose, bound = "of_torch", "torch's time", "at most"
    name = f"{row['section']}: {row.get('contender', row['what'])}"
    target = row[f"target_{measure}"]
    return f"missed: {name} has {row[measure]:.3f} of {whose}, the target is {bound} {target}"


def problems_in(found: Found) -> list[str]:
    tests = found["tests"].values()
    bad = [name for of in tests for name in (*of["failed"], *of["hung_or_crashed"])]
    bad += [f"{name}: its time was over" for name, of in found["tests"].items() if of["cut_off"]]
    if (outcome := found["compute_sanitizer"]["outcome"]).startswith("no time"):
        bad.append(f"{SANITIZER}: {outcome}")
    if found["missing"]["needed"]:
        bad.append(f"needed: {found['missing']['install']}")
    return [*bad, *found["failures"].values()]


def verdict(found: Found) -> int:
    """The exit status; says why it is not 0."""
    problems = problems_in(found)
    misses = [sentence for row in found.get("results", []) if (sentence := missed(row))]
    for line in (*problems, *misses):
        print(line, file=sys.stderr)
    return 1 if problems else 2 if misses else 0


class Check:
    """The file with what was found, written anew with every bit of it."""

    def __init__(self, out: Path, folder: Path) -> None:
        self.out, self.folder = out, folder
        self.figures = folder / "figures.json"
        self.figures.unlink(missing_ok=True)
        needed, helpful = gpu_machine.lacking()
        install = gpu_machine.install_line(needed + helpful)
        self.found: Found = {
            "driver_release": gpu_machine.driver_release(),
            "missing": {"needed": needed, "helpful": helpful, "install": install},
            "compute_sanitizer": {"path": None, "outcome": "not tried"},
            "failures": {},
            "tests": {},
        }
        if install:
            print(f"missing here: {install}", file=sys.stderr, flush=True)

    def save(self) -> Found:
        measured = json.loads(self.figures.read_text()) if self.figures.is_file() else {}
        failures = measured.get("failures", {}) | self.found["failures"]
        found: Found = measured | self.found | {"failures": failures}
        part = self.out.with_suffix(".part")
        part.write_text(json.dumps(found, indent=1) + "\n")
        part.replace(self.out)
        return found

    def build(self) -> bool:
        began = time.monotonic()
        problem = gpu_machine.build(self.out.with_suffix(".log"))
        self.found["build_seconds"] = round(time.monotonic() - began, 1)
        if problem:
            self.found["failures"]["build"] = problem
        self.save()
        return not problem

    def run_tests(self, names: list[str], ends_at: float) -> None:
        if not gpu_machine.is_there("pytest"):
            return
        files = [File(name, self.folder, ends_at) for name in names]
        run_side_by_side(files)
        self.found["tests"] |= {file.name: file.summary() for file in files}
        self.save()

    def run_all(self, begins_at: float, ends_at: float) -> None:
        def at(part: float) -> float:
            return begins_at + part * (ends_at - begins_at)

        for names, until in STAGES:
            self.run_tests(names, max(at(until), time.monotonic() + STAGE_SECONDS))
        has_sanitizer = gpu_machine.find_tool(SANITIZER) is not None
        until = FIGURES_UNTIL if has_sanitizer else FIGURES_UNTIL_ALONE
        if problem := run_figures(self.figures, at(until)):
            self.found["failures"]["figures"] = problem
        self.save()
        self.found["compute_sanitizer"], tests = run_sanitizer(self.folder, ends_at)
        print(f"{SANITIZER}: {self.found['compute_sanitizer']['outcome']}", flush=True)
        if tests:
            self.found["tests"][LAST] = tests


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu.json")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "gpu-tests", help="of logs")
    parser.add_argument("--seconds", type=float, default=580, help="for all of it")
    parser.add_argument("--build", action="store_true", help="compile first, for this GPU")
    parser.add_argument("--files", nargs="*", help="only these files of tests, and no figures")
    options = parser.parse_args()
    ends_at = time.monotonic() + options.seconds
    # What is ended for its stacks leaves nothing else.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    options.folder.mkdir(parents=True, exist_ok=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    check = Check(options.out, options.folder)
    if not options.build or check.build():
        if options.files is None:
            check.run_all(time.monotonic(), ends_at)
        else:
            check.run_tests(options.files, ends_at)
    return verdict(check.save())


if __name__ == "__main__":
    sys.exit(main())
