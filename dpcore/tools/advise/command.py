"""``dpcore advise run.json``: reads what happened, and says what to change."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from dpcore.base.link import parse_speed
from dpcore.base.user_code import check_file, names_code
from dpcore.errors import Unsupported
from dpcore.tools.advise.advice import Advice, advice_on
from dpcore.tools.advise.own_model import STACKS, record
from dpcore.tools.show.reading import read_runs


def run(options: argparse.Namespace) -> int:
    """Reads and prints; the exit status."""
    expected = parse_speed(options.expect).bytes_per_second if options.expect else 0.0
    given: list[Path] = options.run
    code = [path for path in given if _is_code(path)]
    if code and len(given) > 1:
        raise Unsupported(f"{code[0]} is a model, which is recorded and advised on by itself")
    if not code:
        for name in ("world", "stack"):
            if getattr(options, name):
                raise Unsupported(f"--{name} is for a model, such as my.py:make, and not for files")
    found = list(_of_model(str(code[0]), options, expected) if code else _of_files(given, expected))
    if options.json:
        json.dump(
            [{"run": name, **advice.as_json()} for name, advice in found], sys.stdout, indent=1
        )
        print()
        return 0
    for number, (name, advice) in enumerate(found):
        if number:
            print()
        if len(found) > 1 or code:
            print(f"{name}: {advice.headline}")
        else:
            print(advice.headline)
        print(*advice.lines(), sep="\n")
    return 0


def _of_files(paths: Sequence[Path], expected: float) -> Iterator[tuple[str, Advice]]:
    for run in read_runs(paths):
        yield run.name, advice_on(run, [run.path], expected)


def _of_model(
    name: str, options: argparse.Namespace, expected: float
) -> Iterator[tuple[str, Advice]]:
    check_file(name)
    worlds = options.world or [2]
    for stack in options.stack or [STACKS[0]]:
        for world in worlds:
            with tempfile.TemporaryDirectory() as place:
                folder = Path(place) / "run"
                folder.mkdir()
                files = record(name, stack, world, folder)
                (made,) = read_runs([folder])
                yield f"{name} by {stack}", advice_on(made, files, expected)


def _is_code(path: Path) -> bool:
    return names_code(str(path)) and (path.suffix == ".py" or not os.path.exists(path))
