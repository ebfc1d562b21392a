"""Does a report tell the truth? The file that it is about is checked once more.

A report is what ``dpcore exercise check --json`` has written. It has the file's SHA-256 and the
seed of what the assessor has drawn, so the same checks can be made with the same data. Whoever
writes a report can choose a seed and write a file that passes with this seed only. Therefore a file
that has passed has to pass with a seed that is drawn now, too.

What was measured, such as steps, may differ by rounding on another machine. It is not part of the
verdict, and where it differs both are shown.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpcore.base.checked_json import Unreadable, read_json
from dpcore.school.exercise import catalogue, judging
from dpcore.school.exercise.catalogue import Exercise


@dataclass(frozen=True)
class Claim:
    """What a report says about one file."""

    exercise: Exercise
    sha256: str
    seed: int
    passed: bool
    holds: dict[str, bool]  # by the names of the checks
    score_is_sum: bool  # of the points of the tests, one for each that has passed
    measured: dict[str, Any]


class NotThisFile(Exception):
    """The report is about another file."""


def claim(report: Path, file: Path) -> Claim:
    """What the report says about this file."""
    what = "a report of `dpcore exercise check --json`"
    try:
        content = read_json(report, what)
    except FileNotFoundError:
        raise Unreadable(f"there is no {report}") from None
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    try:
        return _claim(content, found, f"{report} is not about {file}")
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as problem:
        raise Unreadable(f"{report} is not {what}: {type(problem).__name__}: {problem}") from None


def _claim(report: Any, sha256: str, what: str) -> Claim:
    entries = {entry["sha256"]: entry for entry in report["extra_data"]["exercises"]}
    if sha256 not in entries:
        others = ", ".join(sorted(str(known)[:12] for known in entries)) or "none"
        raise NotThisFile(f"{what}, whose SHA-256 is {sha256[:12]}...; it names {others}...")
    entry = entries[sha256]
    seed = int(entry["seed"])
    if not 0 <= seed < 1 << judging.SEED_BITS:
        raise ValueError(f"no seed is {seed}")
    exercise = catalogue.find(str(entry["exercise"]))
    holds = {
        str(test["extra_data"]["check"]): test["status"] == "passed"
        for test in report["tests"]
        if str(test["number"]).partition(".")[0] == str(exercise.number)
    }
    points = [int(test["status"] == "passed") for test in report["tests"]]
    score_is_sum = (
        [test["score"] for test in report["tests"]] == points
        and (report["score"], report["max_score"]) == (sum(points), len(points))
        and entry["held"] == sum(holds.values())
    )
    measured = dict(entry["measured"])
    return Claim(exercise, sha256, seed, entry["passed"] is True, holds, score_is_sum, measured)


def contradictions(told: Claim, file: Path) -> tuple[judging.Verdict, list[str]]:
    """The verdict of now, and in what it is not the report's."""
    again = judging.judge(told.exercise, file, seed=told.seed)
    if again.sha256 != told.sha256:
        return again, [f"{file} was changed while it was checked"]
    found = differences(told, again)
    if told.passed and not found:
        other = judging.judge(told.exercise, file)
        failed = [result for result in other.results if not result.holds]
        found = [
            f"with another seed, {other.seed}, it does not pass: {result.says} {result.why}"
            for result in failed[:1]
        ]
    return again, found


def differences(told: Claim, again: judging.Verdict) -> list[str]:
    """In what a report and a verdict differ."""
    now = {result.name: result.holds is True for result in again.results}
    if set(now) != set(told.holds):
        return ["the checks of the report are not those that there are now"]
    words = {True: "holds", False: "fails"}
    says = {result.name: result.says for result in again.results}
    found = [
        f"the report says that this {words[told.holds[name]]}, and it {words[now[name]]}: {what}"
        for name, what in says.items()
        if told.holds[name] != now[name]
    ]
    if told.passed != all(told.holds.values()):
        found.append("the report contradicts itself about whether the file has passed")
    if not told.score_is_sum:
        found.append("the report's score is not the sum of its points")
    return found


def measured_now(told: Claim, again: judging.Verdict) -> list[str]:
    """What was measured, where it is not what the report says."""
    found = []
    for name in sorted({*told.measured, *again.measured}):
        now, then = again.measured.get(name, "none"), told.measured.get(name, "none")
        if now != then:
            is_long = isinstance(now, list) or isinstance(then, list)
            differ = "not those of the report" if is_long else f"{now}, and {then} by the report"
            found.append(f"{name}: {differ}")
    return found
