"""Writes the code that the documents show from the code that runs.

python tools/snippets.py            # says which documents are not up to date
python tools/snippets.py --write    # and makes them so

A document names what it shows, and everything up to the end mark is written by this program:

    <!-- code: dpcore/reference/ladder.py NaiveDDP.finish -->
    <!-- end -->

In Python the name is one of a class, method or function. In C++ it is how its first line begins;
the last is the next closing brace of the same depth.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(<!-- code: (\S+) (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def snippet(path: Path, name: str) -> str:
    text = path.read_text(encoding="utf-8")
    found = _of_python(text, name) if path.suffix == ".py" else _of_cpp(text, name)
    if found is None:
        raise SystemExit(f"{path.relative_to(ROOT)} has no {name!r}")
    return textwrap.dedent(found).strip("\n") + "\n"


def _of_python(text: str, name: str) -> str | None:
    node: ast.AST | None = ast.parse(text)
    for part in name.split("."):
        inner = [
            child for child in ast.iter_child_nodes(node) if getattr(child, "name", "") == part
        ]
        if not inner:
            return None
        node = inner[0]
    assert isinstance(node, (ast.FunctionDef, ast.ClassDef))
    first = min([node.lineno, *(mark.lineno for mark in node.decorator_list)])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])


def _of_cpp(text: str, name: str) -> str | None:
    lines = text.splitlines()
    first = next((i for i, line in enumerate(lines) if line.strip().startswith(name)), None)
    if first is None:
        return None
    depth = re.match(r"\s*", lines[first])
    closing = (depth[0] if depth else "") + "}"
    last = next(i for i in range(first, len(lines)) if lines[i].startswith(closing))
    return "\n".join(lines[first : last + 1])


def rendered(document: Path) -> str:
    def block(match: re.Match[str]) -> str:
        begin, name, what, end = match.groups()
        language = "python" if name.endswith(".py") else "cpp"
        return f"{begin}```{language}\n{snippet(ROOT / name, what)}```\n{end}"

    return BLOCK.sub(block, document.read_text(encoding="utf-8"))


def documents() -> list[Path]:
    return sorted((ROOT / "docs").rglob("*.md"))


def look_or_write(
    arguments: list[str],
    description: str | None,
    pages: list[Path],
    made: Callable[[Path], str],
) -> int:
    """The program of a tool that makes parts of pages: says which are old, or writes them."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true")
    writes = parser.parse_args(arguments).write
    stale = [path for path in pages if made(path) != path.read_text(encoding="utf-8")]
    for path in stale:
        if writes:
            path.write_text(made(path), encoding="utf-8")
        print(f"{path.relative_to(ROOT)} {'written' if writes else 'is not up to date'}")
    return int(bool(stale) and not writes)


if __name__ == "__main__":
    sys.exit(look_or_write(sys.argv[1:], __doc__, documents(), rendered))
