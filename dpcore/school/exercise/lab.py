"""Runs a body of a check on ranks of its own and says in words why it did not come to its end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpcore.errors import Error
from dpcore.school.exercise.on_rank import Failed, Job, run

MEMORY = 1 << 30  # bytes of a rank, of which torch takes a fifth
SECONDS = 12.0  # of a rank, where it has a processor for itself
PATIENCE = 7.0  # of an operation: ranks that wait for each other for longer never meet
_SLOWEST = 5.0  # times as long on a machine that is busy with other work
WORDS_PRINTED = 2000

# What the fork server imports once, instead of every rank.
_IN_ADVANCE = ("dpcore.ddp.data_parallel", "dpcore.school.exercise.training")

# Settings of the caller's shell that would change what is measured.
_NEUTRAL = dict.fromkeys(("DPCORE_TRACE", "DPCORE_SCHEDULE", "DPCORE_LINK"), "")
_NEUTRAL["DPCORE_ALGORITHM"] = "auto"


class Wrong(Exception):
    """What does not hold, in a sentence or two for the student."""


class NotSeen(Exception):
    """There is nothing to judge, since the run that would show it has failed already."""


def _end_sessions(folder: Path) -> None:
    """Ends what the ranks have started and left behind."""
    for path in folder.glob("session.*"):
        with contextlib.suppress(ProcessLookupError, PermissionError, ValueError):
            os.killpg(int(path.read_text()), signal.SIGKILL)


def slowness() -> float:
    """How much longer a limit has to be because other work keeps the processors busy.

    >>> 1.0 <= slowness() <= 5.0
    True
    """
    waiting = os.getloadavg()[0] / len(os.sched_getaffinity(0))
    return min(max(1.0, waiting), _SLOWEST)


class Lab:
    """The student's file and the runs of it that were made so far."""

    def __init__(self, check: Path, file: Path, seed: int = 0) -> None:
        self._check, self._file = check, file
        self.seed = seed  # for what a check draws, such as data; no rank is told
        self.measured: dict[str, Any] = {}  # for the report, beside what holds
        self._runs: dict[Any, list[Any] | None] = {}
        self._gave_up = ""
        self.printed: dict[int, str] = {}

    def ranks(
        self, body: str, world: int, *args: Any, link: str = "", alone: bool = False
    ) -> list[Any]:
        """What the function ``body`` of the check gives on every rank. Runs once for equal
        arguments. ``alone``: without the student's code, for what is expected."""
        key = (body, world, repr(args), link, alone)
        if self._gave_up and key not in self._runs and not alone:
            raise NotSeen(self._gave_up)
        if key not in self._runs:
            self._runs[key] = None
            self._runs[key] = self._run(body, world, args, link, alone)
        found = self._runs[key]
        if found is None:
            raise NotSeen("the run that would show it has failed, see above")
        return found

    def _run(self, body: str, world: int, args: Sequence[Any], link: str, alone: bool) -> list[Any]:
        from dpcore.comm.launch.spawn import run_processes

        options = {"link": link} if link else {}
        file = "" if alone else str(self._file.resolve())
        with tempfile.TemporaryDirectory(prefix="dpcore-exercise-") as folder:
            check = str(self._check)
            slow = slowness()
            seconds, patience = SECONDS * slow, PATIENCE * slow
            job = Job(check, body, file, tuple(args), seconds, MEMORY, folder)
            outcomes = run_processes(
                run, world, (job,), timeout=patience, options=options, environment=_NEUTRAL,
                deadline=seconds + 5, grace=seconds - patience + 1, preload=_IN_ADVANCE,
            )  # fmt: skip
            _end_sessions(Path(folder))
            if not alone:
                self._keep_printed(Path(folder))
            failed = [o for o in outcomes if o.error is not None or not o.reported]
            if failed:
                if alone:
                    raise Error(f"the ranks of the check itself failed: {failed[0].error}")
                raise Wrong(self._words(failed, Path(folder), seconds))
        return [outcome.result for outcome in outcomes]

    def _keep_printed(self, folder: Path) -> None:
        for path in folder.glob("printed.*"):
            text = path.read_text(encoding="utf-8", errors="replace")
            if text.strip():
                self.printed[int(path.suffix[1:])] = text[-WORDS_PRINTED:]

    def _words(self, failed: Sequence[Any], folder: Path, seconds: float) -> str:
        """The first cause: a rank that ran on for ever, else the first error."""
        for outcome in failed:
            stack = folder / f"stacks.{outcome.rank}"
            text = stack.read_text() if stack.exists() else ""
            if "Timeout" in text:
                self._gave_up = "not run, since an earlier run did not end"
                return f"rank {outcome.rank} was still {self._where(text)} after {seconds:.0f} s"
        first = min(failed, key=lambda outcome: outcome.failed_at)
        error, who = first.error, f"rank {first.rank}"
        if error is None:
            return f"{who} ended before its work was done: the code has left the process"
        if not isinstance(error, Failed):
            return f"{error}" if who in str(error) else f"{who}: {error}"
        where = f" ({self._file.name}, {error.place})" if error.place else ""
        if error.kind == "NotImplementedError":
            return f"not written yet{where}: {error.message}"
        closed = re.match(r"import of (\S+) halted", error.message)
        if closed:
            return f"{closed[1]} is closed in this exercise: write it yourself{where}"
        if error.kind == "Shortcut":
            return f"{error.message}{where}"
        if error.kind == "Timeout":
            self._gave_up = "not run, since the ranks of an earlier run waited for each other"
            what = error.message.partition(". Look at what the late rank does")[0]
            return f"the ranks wait for each other{where}: {what}"
        if error.kind == "MemoryError" or "can't allocate memory" in error.message:
            return f"{who} asked for more than {MEMORY >> 20} MiB{where}"
        return _of_an_error(error, who, where, self._file.name)

    def _where(self, stacks: str) -> str:
        frames = re.findall(r'File "(.+)", line (\d+) in (\S+)', stacks)
        for path, line, function in frames:
            if Path(path).name == self._file.name:
                return f"in {function} ({self._file.name}, line {line})"
        return "running"


def _of_an_error(error: Failed, who: str, where: str, file: str) -> str:
    step = f" in step {error.step}" if error.step else ""
    if not error.place:
        missing = re.match(r"module 'dpcore_exercise_\w+' has no attribute '(\w+)'", error.message)
        if missing:
            return f"there is no {missing[1]} in {file}, which the task has"
        said = f"{who}{step}: what came from {file} did not fit, {error.kind}: {error.message}"
        return f"{said}. The check was at `{error.code}`" if error.code else said
    said = f"{who} raised {error.kind}{step}{where}: {error.message}"
    if error.code:
        said += f". The line is `{error.code}`"
    if "'NoneType'" in error.message and ".grad" in error.code:
        said += ". A gradient is None until backward has made it, so it was used too early"
    if error.step > 1 and "(your own)" not in error.kind:
        said += f". Step {error.step - 1} went well: what does it leave behind for the next one?"
    return said
