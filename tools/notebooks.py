"""Makes a notebook of each page of docs/learn: python tools/notebooks.py [folder]

Text becomes text, Python a cell, and each command of a terminal a line that begins with "!". They
run in the repository, which a first cell looks for. Pages are the source: edit those.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "learn"
FENCE = re.compile(r"^```(bash|python)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
SHOWN = re.compile(r"<!-- code: .*?<!-- end -->", re.DOTALL)
FIRST = """\
# Programs and commands of this notebook run in the repository, with the Python of this notebook.
import os
import sys

if not os.path.isdir("docs/learn"):
    os.chdir({root!r})
os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]"""


def pages() -> list[Path]:
    """In their order."""
    return sorted(PAGES.glob("*.md"), key=lambda path: int(path.name.partition("-")[0]))


def cells(page: Path, folder: Path) -> list[tuple[str, str]]:
    """("markdown" or "code", text) of each, for a notebook that lies in ``folder``."""
    text = page.read_text(encoding="utf-8")
    shown = {f"\0{number}\0": found for number, found in enumerate(SHOWN.findall(text))}
    for mark, found in shown.items():
        text = text.replace(found, mark)
    made: list[tuple[str, str]] = []
    here = 0
    for match in FENCE.finditer(text):
        made.append(("markdown", text[here : match.start()]))
        kind, code = match.groups()
        lines = "".join(f"!{line}\n" for line in code.splitlines() if line.strip())
        made.append(("code", lines if kind == "bash" else code))
        here = match.end()
    made.append(("markdown", text[here:]))
    for number, (kind, found) in enumerate(made):
        for mark, code in shown.items():
            found = found.replace(mark, code)
        if kind == "markdown":
            found = _links(re.sub(r"<!-- .*? -->\n?", "", found), page, folder)
        made[number] = kind, found.strip("\n")
    first = ("code", FIRST.format(root=os.path.relpath(ROOT, folder)))
    return [made[0], first, *(cell for cell in made[1:] if cell[1])]


def _links(text: str, page: Path, folder: Path) -> str:
    """Pages lead to notebooks, everything else to where it is in the repository."""

    def there(match: re.Match[str]) -> str:
        address, mark, anchor = match[1].partition("#")
        target = (page.parent / address).resolve()
        if "://" in address or not address:
            return match[0]
        if target.parent == PAGES:
            return f"]({target.stem}.ipynb{mark}{anchor})"
        return f"]({os.path.relpath(target, folder)}{mark}{anchor})"

    return re.sub(r"\]\(([^)\s]+)\)", there, text)


def notebook(page: Path, folder: Path) -> dict[str, Any]:
    """As nbformat 4.5 has it."""
    made: list[dict[str, Any]] = []
    for number, (kind, text) in enumerate(cells(page, folder)):
        cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}}
        cell["source"] = text.splitlines(keepends=True)
        made.append(cell | ({"execution_count": None, "outputs": []} if kind == "code" else {}))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": made, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def script(made: dict[str, Any], runs: Callable[[str], bool]) -> str:
    """What a kernel would run, as a program; of the commands those that ``runs`` says."""
    lines = ["import subprocess"]
    for cell in made["cells"]:
        if cell["cell_type"] == "code":
            for line in "".join(cell["source"]).splitlines():
                if not line.startswith("!"):
                    lines.append(line)
                elif runs(line[1:]):
                    lines.append(f"subprocess.run({line[1:]!r}, shell=True, check=True)")
            lines.append("sys.stdout.flush()")
    return "\n".join(lines) + "\n"


def write(folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for page in pages():
        written.append(folder / f"{page.stem}.ipynb")
        text = json.dumps(notebook(page, folder), indent=1, ensure_ascii=False)
        written[-1].write_text(text + "\n", encoding="utf-8")
    return written


if __name__ == "__main__":
    where = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "notebooks").resolve()
    made = write(where)
    print(f"{len(made)} notebooks, begin with {made[0]}")
