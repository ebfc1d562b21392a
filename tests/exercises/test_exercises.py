"""Every solution passes its check, and no mutant does: not the task either, which is the first."""

import os

import pytest

from dpcore.school.exercise import catalogue, judging, report
from tests.exercises import other_ways
from tests.exercises.mutants import MUTANTS

FULL = os.environ.get("DPCORE_TEST_FULL") == "1"
REPEATS = int(os.environ.get("DPCORE_TEST_REPEATS", "1"))
WITH_TIMES = {"per_parameter_ddp", "bucketed_ddp", "launch_schedule"}  # a bound on a time
EXERCISES = catalogue.exercises()


def marked(exercise, value=None):
    marks = [pytest.mark.alone] if exercise.name in WITH_TIMES else []
    return pytest.param(value or exercise, marks=marks, id=exercise.name)


def written(exercise, text, tmp_path):
    file = tmp_path / f"{exercise.name}.py"
    file.write_text(text)
    return file


@pytest.mark.parametrize("repeat", range(REPEATS))
@pytest.mark.parametrize("exercise", [marked(exercise) for exercise in EXERCISES])
def test_the_solution_passes(exercise, repeat, tmp_path):
    verdict = judging.judge(exercise, written(exercise, exercise.parts.solution, tmp_path))
    assert verdict.passed, report.words(verdict)
    assert not verdict.printed


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_the_task_fails_and_says_why(exercise, tmp_path):
    first = () if FULL else {next(iter(judging.checks_of(exercise)))}
    verdict = judging.judge(exercise, written(exercise, exercise.parts.task, tmp_path), first)
    assert verdict.results[0].holds is False, report.words(verdict)
    if exercise.name not in ("refactoring", "assessment", "find_the_mistake"):  # which run
        assert "not written yet" in verdict.results[0].why
        assert not any(result.holds for result in verdict.results), report.words(verdict)


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(
            mutant,
            id=f"{mutant.exercise}-{mutant.name}",
            marks=[pytest.mark.alone] if mutant.exercise in WITH_TIMES else [],
        )
        for mutant in MUTANTS
        if mutant.is_quick or FULL
    ],
)
def test_a_mutant_is_noticed(mutant, tmp_path):
    exercise = catalogue.find(mutant.exercise)
    file = written(exercise, mutant.made_from(exercise.parts.solution), tmp_path)
    verdict = judging.judge(exercise, file, {mutant.noticed})
    assert [result.holds for result in verdict.results] == [False], report.words(verdict)
    assert mutant.says in verdict.results[0].why, report.words(verdict)


@pytest.mark.skipif(not FULL, reason="make exercises")
@pytest.mark.parametrize(
    ("name", "text"),
    [pytest.param(name, text, id=f"{name}-{way}") for name, way, text in other_ways.read()],
)
def test_what_is_right_in_another_way_passes(name, text, tmp_path):
    exercise = catalogue.find(name)
    verdict = judging.judge(exercise, written(exercise, text, tmp_path))
    assert verdict.passed, report.words(verdict)


def test_mutants_fit_their_solutions():
    """Also those that are only run by `make exercises`."""
    assert len({(mutant.exercise, mutant.name) for mutant in MUTANTS}) == len(MUTANTS)
    assert len(MUTANTS) >= 24
    for mutant in MUTANTS:
        exercise = catalogue.find(mutant.exercise)
        assert mutant.made_from(exercise.parts.solution) != exercise.parts.solution
        assert mutant.noticed in judging.checks_of(exercise), mutant.name
    assert {mutant.exercise for mutant in MUTANTS} == {exercise.name for exercise in EXERCISES}
