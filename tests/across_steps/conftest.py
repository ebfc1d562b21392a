"""What tests of schedules across steps share."""

import os

import pytest


@pytest.fixture
def one_processor():
    """For hundreds of trainings whose ranks are threads and compute in Python: on two processors
    they would wake each other for the interpreter's lock at every operation of torch, and take
    half as long again. `make test-full` lets them have all processors."""
    before = os.sched_getaffinity(0)
    if os.environ.get("DPCORE_TEST_FULL") != "1":
        worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
        os.sched_setaffinity(0, {sorted(before)[worker % len(before)]})
    yield
    os.sched_setaffinity(0, before)
