"""Writes into docs/reference what a reader of the clone needs: signatures and first sentences.

python tools/reference.py            # says which pages are not up to date
python tools/reference.py --write    # and makes them so

A block ``{api}`` names classes and functions at the beginnings of its lines. What is indented
below a name, and what stands in its parentheses, comes from the code and is written by this
program; the site (tools/site/api.py) shows the whole docstrings in the same place. Needs griffe:
``make docs`` installs it.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools" / "site"))
import api  # noqa: E402
import snippets  # noqa: E402

WIDTH = 100
_CALL = " " * 8  # of what does not fit the first line of a call


def rendered(page: Path) -> str:
    def block(match: re.Match[str]) -> str:
        entries = ["\n".join(outline(name, made)) for name, made in api.named(match[1])]
        return "```{api}\n" + "\n\n".join(entries) + "\n```"

    return api.BLOCK.sub(block, page.read_text(encoding="utf-8"))


def outline(path: str, constructed: bool) -> Iterator[str]:
    """A name with its signature and first sentence, and below a class its methods."""
    thing = api.found(str(ROOT), path)
    if thing.is_class:
        made = thing.all_members["__init__"] if constructed else None
        yield from _wrapped(f"{path}({_parameters(made)})" if made else path, "", _CALL)
    elif thing.is_function:
        yield from _wrapped(f"{path}({_parameters(thing)})", "", _CALL)
    else:
        yield path
    yield from _wrapped(_first_sentence(thing), "    ")
    if thing.is_class:
        for member in api.members(thing):
            name = f".{member.name}"
            call = f"{name}({_parameters(member)})" if member.is_function else name
            yield from _wrapped(call, "    ", _CALL)
            yield from _wrapped(_first_sentence(member), "        ")


def _parameters(function: Any) -> str:
    """Without types, which the site has."""
    shown, star = [], False
    for parameter in function.parameters:
        kind, name = parameter.kind.value, parameter.name
        if name == "self" or (name == "cls" and not shown):
            continue
        if kind.startswith("variadic"):
            star = star or kind == "variadic positional"
            shown.append(("*" if kind == "variadic positional" else "**") + name)
            continue
        if kind == "keyword-only" and not star:
            star = True
            shown.append("*")
        shown.append(name if parameter.default is None else f"{name}={parameter.default}")
    return ", ".join(shown)


def _first_sentence(thing: Any) -> str:
    text = thing.docstring.value.strip() if thing.docstring else ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    ends = re.search(r"[.!?](?=\s+[A-Z`\"])|\.$|:$", paragraph)
    return (paragraph[: ends.end()] if ends else paragraph).replace("``", "`")


def _wrapped(text: str, indent: str, further: str = "") -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=indent + further,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def pages() -> list[Path]:
    return sorted((ROOT / "docs" / "reference").glob("*.md"))


if __name__ == "__main__":
    sys.exit(snippets.look_or_write(sys.argv[1:], __doc__, pages(), rendered))
