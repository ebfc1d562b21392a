"""What holds for every test."""

import fcntl
import signal

import pytest

from dpcore.launch.spawn import PRELOAD

# Started in the background by a shell, a program ignores Ctrl-C and so do its children: the tests
# of what Ctrl-C does would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What each rank that is a process would import: torch._dynamo, for one, with its first optimizer.
PRELOAD += ["dpcore.launch.session", "dpcore.ddp.data_parallel", "dpcore.torch_backend"]
PRELOAD += ["torch._dynamo", "pytest"]

EXIT_STATUS = "dpcore/exitstatus"  # in pytest's cache, for tools/test_again.py


def _remember(config, status):
    if hasattr(config, "workerinput"):
        return  # of xdist: the whole run is another process
    if (cache := getattr(config, "cache", None)) is not None:
        cache.set(EXIT_STATUS, status)


def pytest_sessionstart(session):
    _remember(session.config, None)  # a run that crashes leaves this


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    _remember(session.config, int(exitstatus))


# ---- side by side ------------------------------------------------------------------------------

# Tests of several processes (pytest -n, or another terminal) share the machine by a lock on this
# file; a test that is marked `alone`, since it has a deadline of a few seconds, holds it by itself.
_machine = open(__file__)  # noqa: SIM115


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Those come last, since others wait meanwhile: files with some, then files of nothing else."""
    marks = {}
    for item in items:
        marks.setdefault(item.path, set()).add(_is_alone(item))
    items.sort(key=lambda item: (sum(marks[item.path]) / len(marks[item.path]), _is_alone(item)))


def _is_alone(item):
    return item.get_closest_marker("alone") is not None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    fcntl.flock(_machine, fcntl.LOCK_EX if _is_alone(item) else fcntl.LOCK_SH)
    try:
        return (yield)
    finally:
        fcntl.flock(_machine, fcntl.LOCK_UN)
