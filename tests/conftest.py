"""What holds for every test."""

import gc
import multiprocessing
import os
import signal
import sys
import warnings
from statistics import fmean

import pytest

# A thread of OpenMP that has nothing to do spins until it has, for which these processors have no
# time. Where torch is loaded already, as in a rank, this says nothing; programs do not inherit it.
os.environ["OMP_WAIT_POLICY"] = "passive"
import torch

del os.environ["OMP_WAIT_POLICY"]

from dpcore.comm.launch.rank_processes import PRELOAD
from tests import sharing

# Started in the background by a shell, a program ignores Ctrl-C and so do its children: the tests
# of what Ctrl-C does would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What each rank that is a process would import: torch._dynamo, for one, with its first optimizer.
PRELOAD += [
    "dpcore.ddp.data_parallel",
    "dpcore.comm.launch.torch_backend",
    "torch._dynamo",
    "pytest",
]

# The models are small: a second thread of torch costs a hundred times what it computes. Ranks that
# are processes, and programs, have as many threads as they have without tests.
torch.set_num_threads(1)


def pytest_configure(config):
    """The processes of `pytest -n` share a server that forks ranks and programs. Theirs for the
    ranks of `dpcore.spawn` are forked from it as well."""
    if config.getoption("numprocesses", None):
        from tests.ranks import python

        os.environ[python.SERVER] = str(python.folder())
    elif hasattr(config, "workerinput"):
        from tests.ranks import python

        multiprocessing.set_executable(python.executable())


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_teardown(item):
    """Names a test after which torch still takes a model's forward for running: models that later
    tests compile would be cut at that one's buckets."""
    yield
    ddp = sys.modules.get("torch.nn.parallel.distributed")
    if ddp is not None and ddp.DistributedDataParallel._active_ddp_module is not None:
        ddp.DistributedDataParallel._active_ddp_module = None
        warnings.warn(f"{item.nodeid} has left a model active", stacklevel=1)


@pytest.fixture
def mistakes_are_errors(monkeypatch):
    """Whatever is said of a program that this test runs, on ranks of any kind, is a false alarm."""
    monkeypatch.setenv("DPCORE_MISTAKES", "raise")


# ---- side by side ------------------------------------------------------------------------------

_machine = sharing.open_here()


def _shares_of(item):
    """Of the machine, which tests of several processes share (pytest -n, or another terminal)."""
    if item.get_closest_marker("alone") is not None or _is_quiet(item):
        return sharing.SHARES
    return 1 if item.get_closest_marker("hurried") is None else 2


def _is_quiet(item):
    return item.get_closest_marker("quiet") is not None


def _seconds_of(item):
    """How long a quiet test takes, where that is so long that it has to be the first of them."""
    marker = item.get_closest_marker("quiet")
    return marker.kwargs.get("seconds", 0) if marker else 0


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """First files with hurried tests, the most hurried first, and last tests that are quiet or
    alone, since all others wait for them (`scheduling.py`)."""
    shares = {}
    for item in items:
        if (count := _shares_of(item)) < sharing.SHARES:
            shares.setdefault(item.path, []).append(count)

    def place(item):
        hurry = fmean(shares.get(item.path, [1]))
        is_last = _shares_of(item) == sharing.SHARES
        quiet_first = not _is_quiet(item), -_seconds_of(item)
        return is_last, *quiet_first, -hurry, item.path, _shares_of(item)

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With `--dist loadfile`, ours."""
    if config.getoption("dist") != "loadfile":
        return None
    from tests.scheduling import WaitingBesideComputing

    return WaitingBesideComputing(config, log)


def pytest_collection_finish():
    """What was imported stays: the garbage collector need not look through it in every test. Nor
    need it look for cycles as often as where memory is short."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    with sharing.taken(_machine, _shares_of(item), together=_is_quiet(item)):
        return (yield)
