"""One source for task and solution: a file that runs, with marked parts.

    #: solution            what the task leaves out
    total = a + b
    #: instead             what it has there; each line is a comment that begins with #|
    #| raise NotImplementedError("add them up")
    #: end

    #: hint                at the end of the file: the hints, in the order in which they are given
    #| Both are tensors.
    #: hint
    #| There is an operator for it.
    #: end

Where nothing stands between ``instead`` and ``end``, the gap raises ``NotImplementedError``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MARK = re.compile(r"\s*#: *(\w+)\s*$")
INSTEAD = re.compile(r"(\s*)#\|(?: (.*))?$")

# Which mark may follow in which state, and the state that it leads to.
_NEXT = {
    ("both", "solution"): "solution",
    ("solution", "instead"): "instead",
    ("solution", "end"): "both",
    ("instead", "end"): "both",
    ("both", "hint"): "hint",
    ("hint", "hint"): "hint",
    ("hint", "end"): "both",
}


@dataclass(frozen=True)
class Parts:
    """What a source is cut into."""

    task: str
    solution: str
    hints: list[str]


def cut(text: str, name: str = "source") -> Parts:
    """Task, solution and hints of a source.

    >>> parts = cut("#: solution\\nx = 1\\n#: instead\\n#| x = ...\\n#: end\\n")
    >>> parts.task, parts.solution
    ('x = ...\\n', 'x = 1\\n')
    """
    task: list[str] = []
    solution: list[str] = []
    hints: list[list[str]] = []
    state, replaced, indent = "both", False, ""
    for number, line in enumerate(text.splitlines(), 1):
        mark = MARK.match(line)
        if mark:
            before, state = state, _NEXT.get((state, mark[1]), "")
            if not state:
                raise ValueError(f"{name}:{number}: '#: {mark[1]}' can't stand here")
            if mark[1] == "solution":
                replaced, indent = False, line[: line.index("#")]
            elif mark[1] == "hint":
                hints.append([])
            elif before in ("solution", "instead") and state == "both" and not replaced:
                task.append(f'{indent}raise NotImplementedError("not written yet")')
            continue
        if state == "both":
            task.append(line)
            solution.append(line)
        elif state == "solution":
            solution.append(line)
        else:
            found = INSTEAD.match(line)
            if not found:
                raise ValueError(f"{name}:{number}: a line here begins with '#|'")
            if state == "hint":
                hints[-1].append(found[2] or "")
            else:
                replaced = True
                task.append((found[1] + found[2]) if found[2] else "")
    if state != "both":
        raise ValueError(f"{name}: '#: end' is missing")
    return Parts(_whole(task), _whole(solution), ["\n".join(hint) for hint in hints])


def _whole(lines: list[str]) -> str:
    return "\n".join(lines).rstrip() + "\n"


def about(text: str) -> tuple[str, int]:
    """Title and minutes: the first line of a source is ``\"""Title (20 minutes)``."""
    found = re.match(r'"""(.+?) \((\d+) minutes\)', text)
    if not found:
        raise ValueError('an exercise begins with """Title (20 minutes)')
    return found[1], int(found[2])
