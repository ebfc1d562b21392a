"""docs/teach.md: minutes add up, there is time for each exercise, and commands exist."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from dpcore.__main__ import _parser
from dpcore.school.exercise import catalogue

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "teach.md").read_text()
ANSWERS = (ROOT / "docs" / "answers.md").read_text()
MINUTES = {exercise.number: exercise.minutes for exercise in catalogue.exercises()}
CLASS = PAGE.split("## 90 minutes")[1].split("\n## ")[0]
COURSES = re.findall(
    r"^### ([A-D]): [^\n]*\((\d+) minutes\)\n(.*?)(?=^##)", PAGE, re.MULTILINE | re.DOTALL
)


def rows(text):
    """The cells of each row of a table that has a number of minutes."""
    found = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("| ")
    ]
    return [row for row in found if row[1].isdigit()]


def test_the_class_takes_ninety_minutes_without_a_gap():
    now = 0
    for begin, minutes, *_ in rows(CLASS):
        hours, _, rest = begin.partition(":")
        assert 60 * int(hours) + int(rest) == now
        now += int(minutes)
    assert now == 90


@pytest.mark.parametrize(("course", "minutes", "text"), COURSES, ids=[c[0] for c in COURSES])
def test_the_sections_of_a_course_take_as_long_as_it_says(course, minutes, text):
    assert sum(int(row[1]) for row in rows(text)) == int(minutes)


def test_there_are_four_courses_and_time_for_each_exercise():
    assert [course[0] for course in COURSES] == ["A", "B", "C", "D"]
    for row in [*rows(CLASS), *(row for _, _, text in COURSES for row in rows(text))]:
        for number in re.findall(r"exercise (\d+)", row[-1]):
            assert MINUTES[int(number)] <= int(row[1]), row


def test_commands_in_the_text_exist():
    commands = re.findall(r"`(dpcore [^`]+|python [^`]+)`", PAGE)
    assert len(commands) >= 5
    for command in commands:
        program, *words = shlex.split(command)
        if program == "dpcore":
            _parser().parse_args(words)
        elif words[0] == "-m":
            assert importlib.util.find_spec(words[1]) is not None, command
        else:
            assert (ROOT / words[0]).exists(), command


def test_ten_questions_of_students_and_an_answer_for_each_of_the_quiz():
    asked = PAGE.split("## What students ask")[1].split("## A quiz")[0]
    assert len(re.findall(r"^\*\*[^*]+\*\*", asked, re.MULTILINE)) == 10
    questions = PAGE.split("## A quiz")[1]
    numbers = [int(number) for number in re.findall(r"^(\d+)\. ", questions, re.MULTILINE)]
    assert numbers == list(range(1, 21))
    assert [int(n) for n in re.findall(r"^(\d+)\. ", ANSWERS, re.MULTILINE)] == numbers
