"""Solutions with one mistake each, of the kinds that students make, and a few that cheat.

A mutant is made from the solution by edits: each text on the left has to be in it, and becomes the
one on the right. ``noticed`` is the check that has to fail, and ``says`` a part of what it says.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from tests.exercises import (
    mutants_of_assessment,
    mutants_of_buckets,
    mutants_of_ddp,
    mutants_of_hooks,
    mutants_of_messages,
    mutants_of_mistakes,
    mutants_of_moves,
    mutants_of_parts,
    mutants_of_scripts,
    mutants_of_sharing,
    mutants_of_survivors,
    mutants_of_training,
)


class Mutant(NamedTuple):
    exercise: str
    name: str
    noticed: str
    says: str
    edits: tuple[tuple[str, str], ...]
    is_quick: bool  # one of those that every run of the tests looks at

    def made_from(self, solution):
        for old, new in self.edits:
            assert old in solution, f"{self.exercise}, {self.name}: the solution has no {old!r}"
            solution = solution.replace(old, new)
        compile(solution, self.name, "exec")
        return solution


def read(text):
    """The mutants of a text such as those of the modules beside this one.

    ``== exercise | name | noticed | says``, with a ``*`` before the name of a quick one, begins a
    mutant; ``-- `` the text that goes and ``++ `` the one that comes, up to the next such line. A
    short edit is a line ``~ old => new``; these come first.
    """
    found = []
    for part in re.split(r"^== ", text, flags=re.MULTILINE)[1:]:
        head, _, body = part.partition("\n")
        exercise, name, noticed, says = (word.strip() for word in head.split("|"))
        short = re.findall(r"^~ (.*?) =>(?: (.*))?$", body, flags=re.MULTILINE)
        body = re.sub(r"^~ .*\n?", "", body, flags=re.MULTILINE)
        edits = short + [
            (edit.partition("++\n")[0][:-1], edit.partition("++\n")[2].rstrip("\n"))
            for edit in re.split(r"^--\n", body, flags=re.MULTILINE)[1:]
        ]
        found.append(
            Mutant(exercise, name.lstrip("* "), noticed, says, tuple(edits), name.startswith("*"))
        )
    return found


MUTANTS = [
    mutant
    for module in (
        mutants_of_moves,
        mutants_of_ddp,
        mutants_of_training,
        mutants_of_assessment,
        mutants_of_parts,
        mutants_of_messages,
        mutants_of_hooks,
        mutants_of_buckets,
        mutants_of_sharing,
        mutants_of_scripts,
        mutants_of_mistakes,
        mutants_of_survivors,
    )
    for mutant in read(module.TEXT)
]
