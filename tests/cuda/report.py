"""A pytest plugin: one line of JSON for each test as it begins and as it ends, so that what was
seen is known also when the process hangs or crashes later. A second run goes on behind the first.

    DPCORE_GPU_REPORT=FILE python -m pytest -p tests.cuda.report tests/cuda/test_mapped.py
"""

import json
import os
from pathlib import Path

REPORT = Path(os.environ.get("DPCORE_GPU_REPORT", os.devnull))
LONGEST = 6000  # characters of why a test failed: the end, where the error is


def _write(test, state, **facts):
    with REPORT.open("a") as file:
        file.write(json.dumps({"test": test, "state": state, **facts}) + "\n")


def lines_of(path):
    """What was reported so far, without a line that was being written when its process ended."""
    found = []
    text = path.read_text() if path.is_file() else ""
    for line in text.splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def pytest_configure(config):
    # Known to pytest-timeout alone, which may be missing.
    config.addinivalue_line("markers", "timeout(seconds): how long a test may take")


def pytest_collection_modifyitems(config, items):
    known = {line["test"] for line in lines_of(REPORT)}
    again = [item for item in items if item.nodeid in known]
    if again:
        items[:] = [item for item in items if item.nodeid not in known]
        config.hook.pytest_deselected(items=again)


def pytest_collectreport(report):
    if report.failed:
        _write(report.nodeid, "failed", why=report.longreprtext[-LONGEST:])


def pytest_runtest_logstart(nodeid, location):
    _write(nodeid, "started")


def pytest_runtest_logreport(report):
    if report.failed:
        _write(report.nodeid, "failed", when=report.when, why=report.longreprtext[-LONGEST:])
    elif report.skipped:
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        _write(report.nodeid, "skipped", why=why.removeprefix("Skipped: "))
    elif report.when == "call":
        facts = {key: str(value) for key, value in report.user_properties}
        _write(report.nodeid, "passed", seconds=round(report.duration, 3), **facts)


def pytest_sessionfinish(session):
    _write("", "finished")
