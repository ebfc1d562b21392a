"""The lines that docs/tour.md names are there, and are about as many as it says."""

import ast
import importlib.util
import re
import shlex
from pathlib import Path

from dpcore.__main__ import _parser

ROOT = Path(__file__).resolve().parent.parent
TOUR = (ROOT / "docs" / "tour.md").read_text()
STOP = re.compile(r"^### \d+\. .*?(?=^##|\Z)", re.MULTILINE | re.DOTALL)
# A file and what to read of it: "* [`name`](../path): all of it", or names in backticks.
READ = re.compile(r"^\* \[`[^`]+`\]\(\.\./(\S+)\): ((?:.+\n)(?:  .+\n)*)", re.MULTILINE)


def of_python(text, name):
    """The numbers of the lines of a definition."""
    nodes = [ast.parse(text)]
    for part in name.split("."):
        nodes = [node for node in nodes[-1].body if getattr(node, "name", "") == part]
        assert nodes, name
    return range(nodes[-1].lineno, nodes[-1].end_lineno + 1)


def of_cpp(text, name):
    """The numbers of the lines of a definition outside of classes, whose last line is a brace."""
    lines = text.splitlines()
    kind = rf"(?:class|struct)(?: alignas\(\d+\))? {re.escape(name)}\b"
    first = re.compile(rf"(?:{kind}|(?:\S.* )?{re.escape(name)}\()")
    begins = [i for i, line in enumerate(lines) if first.match(line) and line[-1] != ";"]
    assert len(begins) == 1, (name, begins)
    end = next(i for i in range(begins[0], len(lines)) if lines[i].startswith("}"))
    return range(begins[0] + 1, end + 2)


def lines_to_read(path, what):
    text = (ROOT / path).read_text()
    count = len(text.splitlines())
    if what.strip() == "all of it":
        return set(range(1, count + 1))
    names = re.findall(r"`([^`]+)`", what)
    assert names and not re.sub(r"`[^`]+`|[,\s]", "", what), what
    find = of_python if path.endswith(".py") else of_cpp
    head = re.match(r"(?://.*\n)*", text)[0].count("\n")
    return set(range(1, head + 1)).union(*(find(text, name) for name in names))


def test_each_stop_asks_and_answers():
    stops = STOP.findall(TOUR)
    assert [int(stop.split(".")[0].removeprefix("### ")) for stop in stops] == list(range(1, 11))
    for stop in stops:
        assert stop.index("**Question.**") < stop.index("\n* [") < stop.index("<details>"), stop
        assert len(READ.findall(stop)) == len(re.findall(r"^\* ", stop, re.MULTILINE)), stop


def test_it_is_about_as_long_as_it_says():
    lines = set()
    for stop in STOP.findall(TOUR):
        for path, what in READ.findall(stop):
            lines |= {(path, line) for line in lines_to_read(path, what)}
    assert 1400 <= len(lines) <= 1600, len(lines)


def test_the_three_questions_are_answered_by_at_most_three_files():
    part = TOUR.split("## Three questions to try")[1].split("\n## ")[0]
    questions = re.split(r"^\*\*.+\?\*\*$", part, flags=re.MULTILINE)[1:]
    assert len(questions) == 3
    for question in questions:
        named = READ.findall(question)
        assert 1 <= len(named) <= 3
        assert all(lines_to_read(path, what) for path, what in named)


def test_each_row_of_what_it_is_for_ends_with_a_command():
    rows = re.findall(r"^\|(.+)\|$", TOUR.split("## What it is for")[1].split("\n## ")[0], re.M)[2:]
    assert len(rows) >= 8
    for row in rows:
        command = re.fullmatch(r" `([^`]+)` ", row.split("|")[-1])
        assert command, row
        words = shlex.split(command[1])
        if words[0] == "dpcore":
            _parser().parse_args(words[1:])
        elif words[1] == "-m":
            assert importlib.util.find_spec(words[2]) is not None, command
        else:
            assert (ROOT / words[-1]).exists(), command
