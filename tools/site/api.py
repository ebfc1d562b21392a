"""The signatures and docstrings of what a block ``{api}`` names, read without importing dpcore.

A name stands at the beginning of a line; what follows it, and lines that are indented, are for
readers of the clone (tools/reference.py) and give way to the whole docstrings here. A class with
parentheses is one that programs construct: its arguments are shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import islice
from typing import Any

import griffe

BLOCK = re.compile(r"^```\{api\}\n(.*?)\n```$", re.MULTILINE | re.DOTALL)
PARAMETER = re.compile(r"(``[^`]+``(?:, ``[^`]+``)*)  +(\S.*)")
PAGE = re.compile(r"\bdocs/([\w/-]+)\.md")


@cache
def package(root: str) -> griffe.Module:
    return griffe.load("dpcore", search_paths=[root], allow_inspection=False, resolve_aliases=True)


def named(block: str) -> Iterator[tuple[str, bool]]:
    """The names of a block, and whether parentheses follow."""
    for line in block.splitlines():
        if line and not line[0].isspace():
            name, opened, _ = line.partition("(")
            yield name, bool(opened)


def found(root: str, path: str) -> Any:
    """What a public name stands for; of functions that are methods of the default communicator,
    the method."""
    thing = package(root)[path.removeprefix("dpcore.")]
    thing = thing.final_target if thing.is_alias else thing
    if thing.is_attribute and thing.annotation is None:
        thing = thing.package["Communicator"].all_members[path.rpartition(".")[2]]
        thing = thing.final_target if thing.is_alias else thing
    return thing


def members(thing: Any) -> list[Any]:
    """The public ones of a class, its own first."""
    every = sorted(thing.all_members.values(), key=lambda member: member.inherited)
    return [member for member in every if shown(member)]


def described(thing: Any, name: str, constructed: bool) -> Iterator[str]:
    """The directives of Sphinx for a function, or for a class and its members."""
    thing = thing.final_target if thing.is_alias else thing
    kind = "method" if thing.parent.is_class else "function"
    lines = text(thing)
    if thing.is_attribute and thing.annotation is None:  # of functions.py: a method as a function
        thing = thing.package["Communicator"].all_members[name].final_target
        lines = islice(text(thing), 1)  # its page has the rest
    if thing.is_class:
        made = thing.all_members["__init__"] if constructed else None
        yield f".. py:class:: {made.signature(name=name, return_type=False) if made else name}"
    elif thing.is_function:
        yield f".. py:{kind}:: {thing.signature(name=name)}"
    else:
        yield f".. py:attribute:: {name}"
        yield f"   :type: {thing.annotation}"
    yield ""
    yield from (f"   {line}" for line in lines)
    yield ""
    if thing.is_class:
        for member in members(thing):
            yield from (f"   {line}" for line in described(member, member.name, False))


def shown(member: Any) -> bool:
    """What is inherited only if it says what it is; attributes without a type are internal."""
    if member.name.startswith("_") or (member.inherited and not member.docstring):
        return False
    return member.is_function or (member.is_attribute and bool(member.annotation))


def text(thing: Any) -> Iterator[str]:
    """The docstring: parameters, which stand before two blanks, become a list of definitions."""
    if thing.docstring is None:
        return
    within = False
    for line in PAGE.sub(r":doc:`/docs/\1`", thing.docstring.value).splitlines():
        parameter = PARAMETER.fullmatch(line)
        if within and not parameter and not line.startswith(" "):
            yield ""
        within = bool(parameter) or (within and line.startswith(" "))
        if parameter:
            yield parameter[1]
            yield f"   {parameter[2]}"
        else:
            yield f"   {line.strip()}" if within else line


def with_docstrings(app: Any, _name: str, source: list[str]) -> None:
    def block(match: re.Match[str]) -> str:
        lines = ["````{eval-rst}"]
        for path, constructed in named(match[1]):
            module, _, bare = path.rpartition(".")
            thing = package(str(app.srcdir))[path.removeprefix("dpcore.")]
            lines += [f".. py:currentmodule:: {module}", ""]
            lines += described(thing, bare, constructed)
        return "\n".join([*lines, "````"])

    source[0] = BLOCK.sub(block, source[0])


def setup(app: Any) -> None:
    app.connect("source-read", with_docstrings)
