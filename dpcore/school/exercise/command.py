"""``dpcore exercise``: lists, starts and checks exercises."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

from dpcore.base.files import write_whole
from dpcore.school.exercise import catalogue
from dpcore.school.exercise.arguments import USUAL
from dpcore.school.exercise.catalogue import Exercise


def run(options: argparse.Namespace) -> int:
    actions = {"list": _list, "start": _start, "hint": _hint, "check": _check, "solution": _show}
    if options.json and options.action not in ("list", "check"):
        return _refuse(f"--json goes with list and check, not with {options.action}")
    if options.verify and options.action not in ("list", "check"):  # list: none was given
        return _refuse(f"--verify goes with check, not with {options.action}")
    if options.rest and options.action not in ("check", "hint"):
        return _refuse(
            f"{options.action} {options.exercise} takes no {options.rest}: "
            "--folder says where your files are"
        )
    return _verify(options) if options.verify else actions[options.action](options)


def _refuse(problem: str) -> int:
    print(f"dpcore exercise: {problem}", file=sys.stderr)
    return 2


def _wanted(options: argparse.Namespace) -> Exercise:
    if options.exercise is None:
        known = catalogue.exercises()
        raise ValueError(
            f"{options.action}: which one? dpcore exercise {options.action} 1 to {len(known)}; "
            "dpcore exercise list says what they are"
        )
    return catalogue.find(options.exercise)


def _list(options: argparse.Namespace) -> int:
    known = catalogue.exercises()
    begun = {exercise: exercise.file_in(options.folder).is_file() for exercise in known}
    if options.json:
        print(
            json.dumps(
                [
                    {
                        "exercise": exercise.number,
                        "name": exercise.name,
                        "title": exercise.title,
                        "minutes": exercise.minutes,
                        "file": str(exercise.file_in(options.folder)),
                        "begun": begun[exercise],
                    }
                    for exercise in known
                ],
                indent=1,
            )
        )
        return 0
    for exercise in known:
        state = str(exercise.file_in(options.folder)) if begun[exercise] else ""
        line = f"{exercise.number:3}  {exercise.title:<44} {exercise.minutes:3} min  {state}"
        print(line.rstrip())
    if not any(begun.values()):
        print("\nBegin with `dpcore exercise start 1`.")
    return 0


def _start(options: argparse.Namespace) -> int:
    exercise = _wanted(options)
    file, test = exercise.file_in(options.folder), exercise.test_in(options.folder)
    if (file.parent / "source.py").exists():
        return _refuse(
            f"{file.parent} has the solution, in source.py: --folder names another folder for your "
            f"files (without it, they go to {USUAL})"
        )
    if file.exists() and not options.again:
        return _refuse(
            f"{file} is there already, with what you have written. --again replaces it by a new one"
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, exercise.parts.task)
    if not test.exists():
        write_whole(test, exercise.test_text())
    print(f"{file}: {exercise.title}, about {exercise.minutes} minutes")
    print("Its first lines are the task. When you have written it, or to see what is asked for:")
    where = "" if options.folder == USUAL else f" --folder {shlex.quote(str(options.folder))}"
    print(f"  dpcore exercise check {exercise.number}{where}")
    return 0


def _hint(options: argparse.Namespace) -> int:
    exercise = _wanted(options)
    hints = exercise.parts.hints
    wanted = options.rest or "1"
    if not wanted.isdigit() or not 1 <= int(wanted) <= len(hints):
        return _refuse(f"hint {exercise.number}: the hints are numbered 1 to {len(hints)}")
    number = int(wanted)
    print(hints[number - 1])
    left = len(hints) - number
    if left:
        print(f"\n({left} more: dpcore exercise hint {exercise.number} {number + 1})")
    return 0


def _show(options: argparse.Namespace) -> int:
    print(_wanted(options).parts.solution, end="")
    return 0


def _check(options: argparse.Namespace) -> int:
    from dpcore.school.exercise import judging, report  # for Linux; the other actions work anywhere

    if options.exercise is None:
        chosen = [
            (exercise, exercise.file_in(options.folder))
            for exercise in catalogue.exercises()
            if exercise.file_in(options.folder).is_file()
        ]
        if not chosen:
            return _refuse(f"nothing was started in {options.folder}: dpcore exercise start 1")
    else:
        exercise = catalogue.find(options.exercise)
        file = _file_of(exercise, options)
        if not file.is_file():
            return _refuse(
                f"there is no {file}: dpcore exercise start {exercise.number} writes it, "
                f"and dpcore exercise check {exercise.number} FILE checks another one"
            )
        chosen = [(exercise, file)]
    verdicts = []
    for exercise, file in chosen:
        verdicts.append(judging.judge(exercise, file))
        if not options.json:
            print("\n" * (len(verdicts) > 1) + report.words(verdicts[-1]), flush=True)
    passed = all(verdict.passed for verdict in verdicts)
    if options.json:
        print(json.dumps(report.for_gradescope(verdicts), indent=1))
    elif options.exercise is not None:
        print(_what_next(chosen[0][0], passed, options))
    return int(not passed)


def _what_next(exercise: Exercise, passed: bool, options: argparse.Namespace) -> str:
    """A hint for an exercise that fails, and the next exercise after one that holds."""
    if not passed:
        return f"Stuck? dpcore exercise hint {exercise.number}"
    later = (one for one in catalogue.exercises() if one.number > exercise.number)
    following = next((one for one in later if not one.file_in(options.folder).is_file()), None)
    if following is None:
        return "The list of all: dpcore exercise list"
    return f"Next, {following.title}: dpcore exercise start {following.number}"


def _verify(options: argparse.Namespace) -> int:
    from dpcore.school.exercise import report, verifying

    path, file = options.verify
    if not file.is_file():
        return _refuse(f"there is no {file}: --verify takes the report, and the file it is about")
    try:
        told = verifying.claim(path, file)
    except verifying.NotThisFile as problem:
        print(f"dpcore exercise: {problem}", file=sys.stderr)
        return 1
    except ValueError as problem:
        return _refuse(str(problem))
    if options.exercise and catalogue.find(options.exercise) != told.exercise:
        return _refuse(
            f"{path} is about exercise {told.exercise.number}, and not {options.exercise}"
        )
    verdict, found = verifying.contradictions(told, file)
    if options.json:
        again = report.for_gradescope([verdict])
        again["extra_data"] |= {"verified": not found, "contradictions": found}
        print(json.dumps(again, indent=1))
        return int(bool(found))
    state = "passed" if told.passed else "failed"
    print(f"exercise {told.exercise.number}, {told.exercise.title}: {file}, {state} by the report")
    for line in [*found, *verifying.measured_now(told, verdict)]:
        print(f"  {line}")
    print("the report is not true" if found else f"the same verdict: {state}")
    return int(bool(found))


def _file_of(exercise: Exercise, options: argparse.Namespace) -> Path:
    """The file that was named, else where ``start`` wrote it, else one of that name right here."""
    if options.rest:
        return Path(options.rest)
    usual = exercise.file_in(options.folder)
    here = Path(usual.name)
    return here if here.is_file() and not usual.is_file() else usual
