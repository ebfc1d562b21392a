"""Runs what failed in the last test run once more, each test in a process of its own.

    python tools/test_again.py

A shared machine of two cores can take a processor away for seconds, and among thousands of tests
with real processes and deadlines one then fails that is right. A test that is wrong fails twice. So
up to three get a second run, by themselves; which ones needed it is printed last, since each of
them is either too tight or has found a race, and is to be looked into in both cases
(docs/decisions/0017-a-second-run-in-ci.md).
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
CACHE = ROOT / ".pytest_cache" / "v"
MOST = 3
TESTS_FAILED = 1  # what pytest exits with


def main() -> int:
    # Cut short (Ctrl-C, pytest.exit, a crash), a run has names of failed tests, too.
    failed = sorted(_kept("cache/lastfailed") or [])
    if _kept("dpcore/exitstatus") != TESTS_FAILED or not failed:
        print("the run was not one that ended with failed tests: nothing to run again")
        return 1
    if len(failed) > MOST:
        print(f"{len(failed)} tests failed, more than {MOST}: that is no accident")
        return 1
    again = [name for name in failed if _fails(name)]
    for name in failed:
        print(f"{'failed twice' if name in again else 'FLAKY, passed in its second run'}: {name}")
    return 1 if again else 0


def _kept(name: str) -> Any:
    path = CACHE / name
    return json.loads(path.read_text()) if path.exists() else None


def _fails(name: str) -> bool:
    # Without the cache, in which the list is kept.
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", name]
    return subprocess.run(command, cwd=ROOT, check=False).returncode != 0


if __name__ == "__main__":
    sys.exit(main())
