"""Which exercises there are, and where a student's files of them lie.

In a checkout they are in its folder ``exercises``; a wheel has them in
``dpcore/school/exercise/tasks``.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from dpcore.errors import Unsupported
from dpcore.school.exercise import source

TEST = '''"""`pytest {folder}` does what `dpcore exercise check {number}` does."""

import pytest

from dpcore.school.exercise import testing

EXERCISE = testing.exercise_of(__file__)


@pytest.mark.parametrize("check", EXERCISE.names())
def test(check: str) -> None:
    EXERCISE.test(check)
'''


@dataclass(frozen=True)
class Exercise:
    """One of them, as it was written."""

    place: Path  # its folder, such as exercises/02_ring

    @property
    def number(self) -> int:
        return int(self.place.name.partition("_")[0])

    @property
    def name(self) -> str:
        """As in the name of the student's file."""
        return self.place.name.partition("_")[2]

    @cached_property
    def parts(self) -> source.Parts:
        path = self.place / "source.py"
        return source.cut(path.read_text(encoding="utf-8"), str(path))

    @property
    def title(self) -> str:
        return source.about(self.parts.task)[0]

    @property
    def minutes(self) -> int:
        return source.about(self.parts.task)[1]

    @property
    def check(self) -> Path:
        return self.place / "check.py"

    def file_in(self, folder: Path) -> Path:
        """The student's, in a folder of exercises."""
        return folder / self.place.name / f"{self.name}.py"

    def test_in(self, folder: Path) -> Path:
        return folder / self.place.name / f"test_{self.place.name}.py"

    def test_text(self) -> str:
        return TEST.format(folder=f"my_exercises/{self.place.name}", number=self.number)


def home() -> Path:
    here = Path(__file__).resolve().parent
    packed = here / "tasks"
    return packed if packed.is_dir() else here.parents[2] / "exercises"


def exercises() -> list[Exercise]:
    found = [path.parent for path in home().glob("[0-9][0-9]_*/source.py")]
    if not found:
        raise FileNotFoundError(f"there are no exercises in {home()}")
    return [Exercise(place) for place in sorted(found)]


def find(wanted: str) -> Exercise:
    """By its number, its name or its folder: "7", "buckets" or "07_buckets"."""
    known = exercises()
    for exercise in known:
        names = (str(exercise.number), exercise.name, exercise.place.name)
        if wanted.strip("/") in (*names, f"{exercise.number:02}"):
            return exercise
    near = difflib.get_close_matches(wanted, [exercise.name for exercise in known], 1)
    advice = f"is it {near[0]}?" if near else f"they are numbered 1 to {known[-1].number}"
    raise Unsupported(f"there is no exercise {wanted!r}; {advice} (dpcore exercise list)")


def beside(test_file: Path) -> Exercise:
    """The exercise of a folder such as exercises/02_ring, wherever that lies."""
    name = test_file.resolve().parent.name
    if not re.fullmatch(r"\d\d_\w+", name):
        raise Unsupported(f"{test_file} is not in a folder of an exercise, such as 02_ring")
    return find(name)
