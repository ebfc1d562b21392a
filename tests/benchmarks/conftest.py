"""`benchmarks` is no installed package: its scripts run from the checkout, and so do its tests."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.ranks import python

sys.path.append(str(Path(__file__).resolve().parents[2]))


def _popen(command, **options):
    network = ""
    if command[:3] == ["ip", "netns", "exec"]:
        network, command = command[3], command[4:]
    assert command[0] == sys.executable
    return python.start(*command[1:], network=network, **options)


@pytest.fixture(autouse=True)
def _ranks_that_train_are_forked(monkeypatch):
    replaced = SimpleNamespace(**{**vars(subprocess), "Popen": _popen})
    monkeypatch.setattr("dpcore.compare.training.start.subprocess", replaced)
