"""``dpcore doctor``: what this machine has for dpcore, what works, and what to do about the rest.

The findings are made by ``doctor_checks``, one function each; a check that fails in a way nobody
thought of is a finding, too. Two ranks are started as soon as the core is loaded and add numbers
while the checks look around.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dpcore._version import __version__

_SELF_TEST_SECONDS = 8.0
_ELEMENTS = 250_000
_SIGNS = {"ok": ("✓", "green"), "missing": ("·", "yellow"), "trouble": ("✗", "bold red")}


@dataclass(frozen=True)
class Finding:
    """What a check has found. ``state``: ok; missing (something optional is not there); trouble
    (dpcore does not work without it). ``advice``: what to do, empty when ok."""

    topic: str
    state: str
    text: str
    advice: str = ""
    details: Any = None


Check = Callable[[], Finding]


class SelfTest:
    """Two ranks as processes, forked while this one has no thread yet: another interpreter would
    import torch once more, which takes longer than all checks together."""

    def __init__(self, body: Callable[[int], Any]) -> None:
        self._deadline = time.monotonic() + _SELF_TEST_SECONDS
        self._ranks = [_start(body, rank) for rank in range(2)]

    def finding(self) -> Finding:
        """Waits for the ranks, not for ever."""
        answers = [self._answer(pipe) for _, pipe in self._ranks]
        for process, pipe in self._ranks:
            os.close(pipe)
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)  # what has answered is on its way out
            os.waitpid(process, 0)
        if any(answer is None for answer in answers):
            return Finding(
                "self-test",
                "trouble",
                f"two ranks were not done after {_SELF_TEST_SECONDS:.0f} s",
                "on a machine that is not just busy this is worth an issue",
            )
        return _judged([json.loads(answer) for answer in answers if answer is not None])

    def _answer(self, pipe: int) -> bytes | None:
        ready, _, _ = select.select([pipe], [], [], max(0.0, self._deadline - time.monotonic()))
        return os.read(pipe, 1 << 16) or b'{"error": "the rank died"}' if ready else None


def _start(body: Callable[[int], Any], rank: int) -> tuple[int, int]:
    """A forked process that writes what ``body`` returns into a pipe: its number and the pipe."""
    reads, writes = os.pipe()
    process = os.fork()
    if process:
        os.close(writes)
        return process, reads
    try:
        os.write(writes, json.dumps(body(rank)).encode())
    except BaseException as problem:
        os.write(writes, json.dumps({"error": f"{type(problem).__name__}: {problem}"}).encode())
    finally:
        os._exit(0)  # nothing of the parent's is to be cleaned up here


def _judged(answers: Sequence[dict[str, Any]]) -> Finding:
    errors = [answer["error"] for answer in answers if "error" in answer]
    if errors:
        advice = "a check above says what is missing; if none does, this is worth an issue"
        return Finding("self-test", "trouble", errors[0], advice)
    if not all(answer["right"] for answer in answers):
        advice = "do not train with this build; make test finds what is wrong with it"
        return Finding("self-test", "trouble", "two ranks got a wrong sum", advice)
    seconds = min(answer["seconds"] for answer in answers)
    text = f"two ranks added {_ELEMENTS * 4 // 1_000_000} MB in mapped memory"
    details = {"seconds": seconds}
    return Finding("self-test", "ok", f"{text} in {seconds * 1e3:.2f} ms", details=details)


def add_two_numbers(rank: int) -> dict[str, Any]:
    """What each rank does: sums in mapped memory, checked, and the time of the fastest."""
    import dpcore

    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(os.getppid()))
    comm = dpcore.init(rank=rank, world_size=2, timeout=_SELF_TEST_SECONDS)
    values = comm.empty(_ELEMENTS)
    best, right = float("inf"), True
    for _ in range(5):
        values.fill_(rank + 1.0)
        comm.barrier()
        begin = time.perf_counter()
        comm.all_reduce(values)
        best = min(best, time.perf_counter() - begin)
        right = right and bool((values == 3.0).all())
    dpcore.finalize()
    return {"right": right, "seconds": best}


def examine() -> list[Finding]:
    """All findings; the self-test comes last."""
    from dpcore.doctor_checks import CHECKS, compiled_core

    core = _tried(compiled_core)
    test = SelfTest(add_two_numbers) if core.state == "ok" else None
    findings = [core, *(_tried(check) for check in CHECKS)]
    if test is not None:
        findings.append(test.finding())
    return findings


def _tried(check: Check) -> Finding:
    try:
        return check()
    except Exception as problem:
        topic = check.__name__.replace("_", " ")
        return Finding(
            topic, "missing", f"{type(problem).__name__}: {problem}", "look at it by hand"
        )


def show(*, as_json: bool) -> int:
    """Prints the findings; 1 when dpcore does not work here."""
    begin = time.monotonic()
    findings = examine()
    seconds = time.monotonic() - begin
    works = all(finding.state != "trouble" for finding in findings)
    if as_json:
        content = {
            "version": __version__,
            "works": works,
            "seconds": round(seconds, 2),
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
    console.print(f"{verdict} (version {__version__}, looked for {seconds:.1f} s)", style="bold")
