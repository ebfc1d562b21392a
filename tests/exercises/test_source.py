"""Task and solution are cut from one source; what is marked wrongly is refused with its line."""

import pytest

from dpcore.school.exercise import catalogue, source

WHOLE = '''"""A title (5 minutes)

What to do.
"""


def add(a, b):
    #: solution
    return a + b
    #: instead
    #| total = ...  # a number
    #|
    #| raise NotImplementedError("add them")
    #: end


def twice(a):
    #: solution
    return 2 * a
    #: end


#: hint
#| Both are numbers.
#: hint
#| There is an operator
#| for it.
#: end
'''


def test_the_task_has_gaps_and_the_solution_has_none():
    parts = source.cut(WHOLE)
    head = WHOLE.partition("def add")[0]
    assert parts.solution == (
        f"{head}def add(a, b):\n    return a + b\n\n\ndef twice(a):\n    return 2 * a\n"
    )
    assert parts.task == (
        f"{head}def add(a, b):\n    total = ...  # a number\n\n"
        '    raise NotImplementedError("add them")\n\n\n'
        'def twice(a):\n    raise NotImplementedError("not written yet")\n'
    )
    assert parts.hints == ["Both are numbers.", "There is an operator\nfor it."]
    assert source.about(parts.task) == ("A title", 5)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("#: end\n", ":1: '#: end' can't stand here"),
        ("#: solution\n#: solution\n", ":2: '#: solution' can't stand here"),
        ("#: instead\n", ":1: '#: instead' can't stand here"),
        ("#: solved\n", ":1: '#: solved' can't stand here"),
        ("#: solution\n#: instead\nx = 1\n#: end\n", ":3: a line here begins with '#|'"),
        ("x = 1\n#: solution\n", "'#: end' is missing"),
    ],
)
def test_what_is_marked_wrongly_is_refused(text, says):
    with pytest.raises(ValueError) as refusal:
        source.cut(text)
    assert says in str(refusal.value)


def test_an_exercise_says_how_long_it_takes():
    with pytest.raises(ValueError, match="20 minutes"):
        source.about('"""A title"""\n')


@pytest.mark.parametrize("exercise", catalogue.exercises(), ids=lambda e: e.name)
def test_every_exercise_is_whole(exercise):
    parts = exercise.parts
    for text in (parts.task, parts.solution):
        compile(text, exercise.name, "exec")
        assert not [line for line in text.splitlines() if source.MARK.match(line)]
        assert max(map(len, text.splitlines())) <= 100
    assert parts.task != parts.solution
    assert "NotImplementedError" not in parts.solution
    assert 2 <= len(parts.hints) <= 10
    assert exercise.title and 5 <= exercise.minutes <= 120
    assert [catalogue.find(name) for name in (exercise.name, exercise.place.name)] == [exercise] * 2
