"""docs/mistakes.md shows the museum as it is."""

import json
import re
from pathlib import Path

from tests.mistakes.museum import EXHIBITS
from tests.mistakes.right import PROGRAMS

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "mistakes.md").read_text()


def rows():
    return re.findall(r"^\| \[`(\w+)`\]\((\S+)\): (.+?) \| ", TEXT, re.MULTILINE)


def test_every_row_is_a_program_and_every_program_a_row():
    assert {name: address for name, address, _ in rows()} == {
        name: exhibit.address for name, exhibit in EXHIBITS.items()
    }
    for name, _, what in rows():
        assert what == EXHIBITS[name].what


def test_what_cannot_be_told_is_told_to_the_reader():
    """By what it is or what to do, one of which has words of the remedy."""
    section = TEXT.split("## What leaves no trace")[1].split("## The museum")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(lines) == 8
    for words in (
        "set_epoch",
        "samplers",
        "clipped",
        "metric",
        "tokens",
        "gathered",
        "units",
        "average",
    ):
        assert any(words in line for line in lines), words


def test_the_number_of_right_programs():
    assert f"[{len(PROGRAMS)} of them](../tests/mistakes/right/README.md)" in TEXT


def test_what_torch_says_was_seen():
    path = ROOT / "benchmarks" / "results" / "mistakes.jsonl"
    seen = [json.loads(line) for line in path.read_text().splitlines()]
    assert {line["mistake"] for line in seen if line["who"] == "torch DDP"} == set(EXHIBITS)
