"""The arguments of `dpcore exercise`; importing this loads neither torch nor numpy."""

from __future__ import annotations

import argparse
from pathlib import Path

from dpcore.tools import argument_types as types

EXAMPLES = """\
examples:
  dpcore exercise list                   what there is, and what you have begun
  dpcore exercise start 1                writes my_exercises/01_all_reduce/all_reduce.py
  dpcore exercise hint 1                 a hint; `hint 1 2` is the next one
  dpcore exercise check 1                runs it on ranks of its own and says what holds
  dpcore exercise check 1 mine.py        the same for a file that lies elsewhere
  dpcore exercise check                  all that you have begun
  dpcore exercise check 1 --json         for Gradescope and GitHub Classroom
  pytest my_exercises/01_all_reduce      the same checks, a test each
  dpcore exercise check 14 --json > report.json             the assessment, with a report
  dpcore exercise check --verify report.json assessment.py  runs it again: is the report true?

An exercise is a file with a task in its first lines and gaps to fill. The check compares values
with those of one process, and looks at behaviour in what dpcore's core has recorded: which
operations ran, with how many bytes, and when. It ends what hangs and says where it hung. The exit
status is 0 when all holds, 1 when something does not, and 2 when there is nothing to check. With
--verify it is 0 when the verdict is that of the report, whichever it is, and 1 when it is not.
docs/exercises.md has the rest.
"""

USUAL = Path("my_exercises")  # not "exercises", where a clone has the solutions


def add_arguments(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "action",
        nargs="?",
        default="list",
        choices=["list", "start", "hint", "check", "solution"],
        help="what to do (default: list)",
    )
    made.add_argument(
        "exercise", nargs="?", metavar="EXERCISE", help="its number or its name, such as 8 or ring"
    )
    made.add_argument(
        "rest", nargs="?", metavar="FILE", help="for check: your file; for hint: which one"
    )
    made.add_argument(
        "--folder",
        type=Path,
        default=USUAL,
        metavar="FOLDER",
        help="where your files are (default: my_exercises)",
    )
    made.add_argument(
        "--again", action="store_true", help="for start: replace your file by a new one"
    )
    types.add(made, "--json", said="for list and check")
    made.add_argument(
        "--verify",
        nargs=2,
        type=Path,
        metavar=("REPORT", "FILE"),
        help="for check: whether a report that --json has written tells the truth about this file",
    )
