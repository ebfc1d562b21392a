"""Writes where the fields of black boxes lie, as the compiler has it, for `dpcore inspect`.

python tools/control_layout.py            # says whether the file is up to date
python tools/control_layout.py --write    # and makes it so
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

FILE = Path(__file__).resolve().parent.parent / "dpcore/tools/diagnose/control_layout.json"


def text() -> str:
    from dpcore import _C

    return json.dumps(_C.control_layout(), indent=1) + "\n"


def main(arguments: list[str]) -> int:
    wanted = text()
    if FILE.exists() and FILE.read_text() == wanted:
        print(f"{FILE.name} is up to date")
        return 0
    if arguments != ["--write"]:
        print(f"{FILE.name} is not up to date: python tools/control_layout.py --write")
        return 1
    FILE.write_text(wanted)
    print(f"{FILE.name} written")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
