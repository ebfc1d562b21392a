"""Files of tests in processes of their own, which go on behind whatever hangs or crashes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.cuda.report import lines_of
from tools.gpu_machine import PRINTED, ROOT, is_there

TEST_LIMIT = 75  # seconds; communicators in tests give up sooner, and say for whom they waited
# pytest-timeout acts first, and shows where a test hangs. It can't where Python's lock is held.
PLUGIN_FIRST = 20
START_LIMIT = 60  # until the first test begins: libraries are read from a disk that is cold


class File:
    """One file of tests, until all of it was tried or its time is over."""

    def __init__(
        self,
        name: str,
        folder: Path,
        ends_at: float,
        limit: int = TEST_LIMIT,
        environment: Mapping[str, str] | None = None,
        plugin: bool | None = None,
    ) -> None:
        """``limit``: seconds of a test, by pytest-timeout (``plugin``) where it is installed, and
        by how long nothing was heard of the process."""
        self.name, self.ends_at, self.limit = name, ends_at, limit
        self.environment = dict(environment or {})
        self.plugin = is_there("pytest_timeout") if plugin is None else plugin
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
        if self.plugin:
            command += [f"--timeout={self.limit}", "--timeout-method=thread"]
        else:
            command += ["-p", "no:timeout"]
        environment = os.environ | {
            "DPCORE_GPU_REPORT": str(self.report),
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "PYTHONUNBUFFERED": "1",
            **self.environment,
        }
        self._start_bytes = self._heard_bytes = self._reported_bytes()
        self._heard_at = time.monotonic()
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

    def _reported_bytes(self) -> int:
        return self.report.stat().st_size if self.report.exists() else 0

    def _is_silent(self) -> bool:
        """Whether no test has begun or ended for longer than one may take."""
        size = self._reported_bytes()
        if size != self._heard_bytes:
            self._heard_bytes, self._heard_at = size, time.monotonic()
        patience = self.limit + (PLUGIN_FIRST if self.plugin else 0)
        if size == self._start_bytes:
            patience = max(patience, START_LIMIT)
        return time.monotonic() - self._heard_at > patience

    def is_done(self) -> bool:
        """Looks, and goes on behind a test that did not come back."""
        if self.process.poll() is None:
            self.cut_off = time.monotonic() >= self.ends_at
            if not self.cut_off and not self._is_silent():
                return False
            _end(self.process)
        lines = lines_of(self.report)
        if lines and lines[-1]["state"] == "finished" and not self.cut_off:
            if self.process.returncode < 0:  # of a signal, behind its last test
                self._note(self.name)
            return True
        open_ones = [t for t, line in self._states().items() if line["state"] == "started"]
        new = [test for test in open_ones if test not in self.unfinished]
        for test in new:
            self._note(test)
        if not new:  # between two tests, or before the first: it would end in the same way again
            self._note(self.name)
        if self.cut_off or not new:
            return True
        self.process = self._start()
        return False

    def _note(self, what: str) -> None:
        self.unfinished[what] = self.log.read_text(errors="replace")[-PRINTED:]

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
    """With all that it has started, which is a session of its own. Its stacks are printed."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGABRT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=3)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_side_by_side(files: Sequence[File]) -> None:
    waiting = list(files)
    try:
        while waiting:
            waiting = [file for file in waiting if not file.is_done()]
            time.sleep(0.1)
    finally:
        for file in waiting:
            _end(file.process)
    for file in files:
        found = file.summary()
        print(
            f"{file.name}: {found['passed']} passed, {len(found['failed'])} failed, "
            f"{len(found['hung_or_crashed'])} hung or crashed"
            + (", cut off" if file.cut_off else ""),
            flush=True,
        )


def run_until(command: list[str], environment: Mapping[str, str], ends_at: float) -> int | None:
    """The exit status of a program, or None: it was ended with all that it has started."""
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        return process.wait(timeout=max(0.0, ends_at - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end(process)
