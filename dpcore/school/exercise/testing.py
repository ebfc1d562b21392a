"""The face for pytest: a test for each check, of one run of the student's file."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from dpcore.school.exercise import catalogue, judging


class Tested:
    """An exercise whose file lies beside a test file."""

    def __init__(self, exercise: catalogue.Exercise, folder: Path) -> None:
        self._exercise = exercise
        self._file = folder / f"{exercise.name}.py"

    def names(self) -> list[str]:
        return list(judging.checks_of(self._exercise))

    @cached_property
    def _results(self) -> dict[str, judging.Result]:
        if not self._file.is_file():
            number = self._exercise.number
            raise AssertionError(
                f"there is no {self._file.name} here: dpcore exercise start {number} writes it"
            )
        return {result.name: result for result in judging.judge(self._exercise, self._file).results}

    def test(self, name: str) -> None:
        """Raises what does not hold."""
        result = self._results[name]
        if not result.holds:
            raise AssertionError(f"{result.says}\n\n{result.why}") from None


def exercise_of(test_file: str) -> Tested:
    """For the test file in a folder such as exercises/02_ring."""
    path = Path(test_file)
    return Tested(catalogue.beside(path), path.resolve().parent)
