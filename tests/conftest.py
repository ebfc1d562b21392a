"""What holds for every test."""

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
    if (cache := getattr(config, "cache", None)) is not None:
        cache.set(EXIT_STATUS, status)


def pytest_sessionstart(session):
    _remember(session.config, None)  # a run that crashes leaves this


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    _remember(session.config, int(exitstatus))
