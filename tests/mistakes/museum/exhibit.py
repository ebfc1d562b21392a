"""``@mistake``: what is known of a program of the museum, and what dpcore is to say."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

# How loudly dpcore is to tell. "already": it has been an error since before mistakes were looked
# for. "silent": it cannot be told, or it is harmless, and nothing may be said.
GRADES = ("raise", "warn", "note", "already", "silent")

EXHIBITS: dict[str, "Exhibit"] = {}


@dataclass(frozen=True)
class Exhibit:
    name: str
    program: Callable
    address: str
    grade: str
    words: tuple[str, ...]  # regular expressions; one message has all of them
    by: int  # the step in which it is said at the latest; the first is 1
    remedy: str

    @property
    def what(self) -> str:
        """The first sentence of the docstring."""
        return " ".join(inspect.getdoc(self.program).split("\n\n")[0].split())


def mistake(address, grade, *words, by=0, remedy):
    assert grade in GRADES
    assert (by > 0 and words) or grade == "silent"

    def add(program):
        name = program.__name__
        assert name not in EXHIBITS
        EXHIBITS[name] = Exhibit(name, program, address, grade, words, by, remedy)
        return program

    return add
