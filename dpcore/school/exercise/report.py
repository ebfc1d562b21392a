"""A verdict in words, and as the JSON that Gradescope reads."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from dpcore._version import __version__
from dpcore.school.exercise.judging import Result, Verdict

STATE = {True: "holds", False: "FAILS", None: "-"}


def words(verdict: Verdict) -> str:
    """For the terminal."""
    exercise = verdict.exercise
    lines = [f"exercise {exercise.number}, {exercise.title}: {verdict.file}", ""]
    for result in verdict.results:
        lines += _wrapped(result.says, f"  {STATE[result.holds]:<7}")
        if result.why:
            lines += _wrapped(result.why, " " * 11)
    if verdict.measured:
        lines.append("")
    for name, value in verdict.measured.items():
        lines += _wrapped(f"{name}: {value}", "  ")
    for rank, text in sorted(verdict.printed.items()):
        lines += ["", f"rank {rank} printed:", textwrap.indent(text.rstrip(), "  ")]
    found = f"{verdict.held} of {len(verdict.results)} hold ({verdict.seconds:.1f} s)"
    return "\n".join([*lines, "", found])


def _wrapped(text: str, begin: str) -> list[str]:
    return textwrap.wrap(
        text, 98, initial_indent=begin, subsequent_indent=" " * len(begin), break_on_hyphens=False
    )


def for_gradescope(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """A point for each check. ``extra_data`` has what Gradescope does not ask for."""
    tests = [
        _test(verdict, number, result)
        for verdict in verdicts
        for number, result in enumerate(verdict.results, 1)
    ]
    return {
        "score": sum(test["score"] for test in tests),
        "max_score": len(tests),
        "execution_time": round(sum(verdict.seconds for verdict in verdicts), 2),
        "output": "\n\n".join(words(verdict) for verdict in verdicts),
        "tests": tests,
        "extra_data": {
            "dpcore": __version__,
            "passed": all(verdict.passed for verdict in verdicts),
            "exercises": [
                {
                    "exercise": verdict.exercise.number,
                    "name": verdict.exercise.name,
                    "file": str(verdict.file),
                    "sha256": verdict.sha256,
                    "seed": verdict.seed,
                    "passed": verdict.passed,
                    "held": verdict.held,
                    "checks": len(verdict.results),
                    "seconds": round(verdict.seconds, 2),
                    "measured": verdict.measured,
                }
                for verdict in verdicts
            ],
        },
    }


def _test(verdict: Verdict, number: int, result: Result) -> dict[str, Any]:
    return {
        "name": f"{verdict.exercise.title}: {result.says}",
        "number": f"{verdict.exercise.number}.{number}",
        "score": int(result.holds is True),
        "max_score": 1,
        "status": "passed" if result.holds else "failed",
        "output": result.why,
        "extra_data": {"check": result.name, "judged": result.holds is not None},
    }
