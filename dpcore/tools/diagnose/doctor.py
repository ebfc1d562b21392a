"""``dpcore doctor``: what this machine has for dpcore, what works, and what to do about the rest.

The findings are made by ``doctor_checks``, one function each; a check that fails in a way nobody
thought of is a finding, too. As soon as the core is loaded, two ranks are started, and a process
that tries the GPUs if there is a driver. They work while the checks look around, and get what is
left of ten seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from dpcore._version import __version__
from dpcore.tools.diagnose.finding import Finding

BUDGET_SECONDS = 10.0  # for everything, from the first look to the last line
_FOR_PRINTING = 0.5
_LEAST_SECONDS = 2.0  # of the ranks, where torch alone took the whole budget
_ELEMENTS = 250_000
_SIGNS = {"ok": ("✓", "green"), "missing": ("·", "yellow"), "trouble": ("✗", "bold red")}


class Child:
    """A process that answers with what ``body`` returns. Forked while this one has no thread yet
    and has not called CUDA: another interpreter would import torch once more, which takes longer
    than all checks together."""

    def __init__(self, body: Callable[..., dict[str, Any]], *arguments: Any) -> None:
        self._pipe, writes = os.pipe()
        self.process = os.fork()
        if self.process:
            os.close(writes)
            return
        try:
            os.write(writes, json.dumps(body(*arguments)).encode())
        except BaseException as problem:
            os.write(writes, json.dumps({"error": f"{type(problem).__name__}: {problem}"}).encode())
        finally:
            os._exit(0)  # nothing of the parent's is to be cleaned up here

    def answer(self, deadline: float) -> dict[str, Any] | None:
        """Waits for it, until the deadline: None means no answer."""
        ready, _, _ = select.select([self._pipe], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return None
        said = os.read(self._pipe, 1 << 16)
        return dict(json.loads(said)) if said else {"error": "the process died"}

    def end(self) -> None:
        os.close(self._pipe)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process, signal.SIGKILL)  # what has answered is on its way out
        os.waitpid(self.process, 0)


class SelfTest:
    """Two ranks as processes."""

    def __init__(self, body: Callable[[int, float], Any], deadline: float) -> None:
        self._deadline = deadline
        self._seconds = deadline - time.monotonic()
        self.ranks = [Child(body, rank, self._seconds) for rank in range(2)]

    def finding(self) -> Finding:
        """Waits for the ranks, not for ever."""
        answers = [rank.answer(self._deadline) for rank in self.ranks]
        for rank in self.ranks:
            rank.end()
        if any(answer is None for answer in answers):
            return Finding(
                "self-test",
                "trouble",
                f"two ranks had not finished after {self._seconds:.1f} s",
                "run dpcore doctor again when the machine is less busy; if they are late again, "
                "please open an issue",
            )
        return _judged([answer for answer in answers if answer is not None])


def _judged(answers: Sequence[dict[str, Any]]) -> Finding:
    errors = [answer["error"] for answer in answers if "error" in answer]
    if errors:
        advice = "a check above says what is missing; if none does: make test, and an issue"
        return Finding("self-test", "trouble", errors[0], advice)
    if not all(answer["right"] for answer in answers):
        advice = "do not train with this build; make test finds what is wrong with it"
        return Finding("self-test", "trouble", "two ranks got a wrong sum", advice)
    seconds = min(answer["seconds"] for answer in answers)
    text = f"two ranks added {_ELEMENTS * 4 // 1_000_000} MB in mapped memory"
    details = {"seconds": seconds}
    return Finding("self-test", "ok", f"{text} in {seconds * 1e3:.2f} ms", details=details)


def add_two_numbers(rank: int, seconds: float) -> dict[str, Any]:
    """What each rank does: sums in mapped memory, checked, and the time of the fastest."""
    from dpcore.comm.launch.session import finalize, init

    name = f"doctor-{os.getppid()}"
    comm = init(rank=rank, world_size=2, init_method=name, transport="shm", timeout=seconds)
    values = comm.empty(_ELEMENTS)
    best, right = float("inf"), True
    for _ in range(5):
        values.fill_(rank + 1.0)
        comm.barrier()
        begin = time.perf_counter()
        comm.all_reduce(values)
        best = min(best, time.perf_counter() - begin)
        right = right and bool((values == 3.0).all())
    finalize()
    return {"right": right, "seconds": best}


def examine(begin: float) -> list[Finding]:
    """All findings, since ``begin`` of the monotonic clock; the self-test comes last."""
    from dpcore.tools.diagnose import doctor_gpu
    from dpcore.tools.diagnose.doctor_checks import CHECKS, compiled_core

    core = _tried(compiled_core)
    works = core.state == "ok"
    deadline = max(begin + BUDGET_SECONDS - _FOR_PRINTING, time.monotonic() + _LEAST_SECONDS)
    has_driver = doctor_gpu.driver_release() is not None
    gpus = Child(doctor_gpu.try_gpus) if works and has_driver else None
    test = SelfTest(add_two_numbers, deadline) if works else None
    findings = [core, *(_tried(check) for check in CHECKS)]
    answer = None
    if gpus is not None:
        answer = gpus.answer(deadline) or {"error": "no answer in time"}
        gpus.end()
    findings.append(_tried(doctor_gpu.cuda, answer))
    if test is not None:
        findings.append(test.finding())
    return findings


def _tried(check: Callable[..., Finding], *arguments: Any) -> Finding:
    try:
        return check(*arguments)
    except Exception as problem:
        topic = check.__name__.replace("_", " ")
        advice = "nothing else depends on this check; open an issue with the line above"
        return Finding(topic, "missing", f"{type(problem).__name__}: {problem}", advice)


def run(options: argparse.Namespace) -> int:
    """Prints the findings; 1 when dpcore does not work here."""
    begin = time.monotonic()
    findings = examine(begin)
    seconds = time.monotonic() - begin
    works = all(finding.state != "trouble" for finding in findings)
    if options.json:
        content = {
            "version": __version__,
            "works": works,
            "seconds": round(seconds, 2),
            "budget": BUDGET_SECONDS,
            "findings": [asdict(finding) for finding in findings],
        }
        json.dump(content, sys.stdout, indent=1)
        print()
    else:
        _print(findings, works, seconds)
    return 0 if works else 1


def _print(findings: Sequence[Finding], works: bool, seconds: float) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 110
    table = Table(box=None, show_header=False, padding=(0, 1))
    for finding in findings:
        sign, style = _SIGNS[finding.state]
        text = Text(finding.text)
        if finding.advice:
            text.append(f"\n→ {finding.advice}", style="dim")
        table.add_row(Text(sign, style=style), Text(finding.topic, style="bold"), text)
    console.print(table)
    verdict = "dpcore works here" if works else "dpcore does not work here"
    console.print(f"{verdict} (version {__version__}, checked in {seconds:.1f} s)", style="bold")
