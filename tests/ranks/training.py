"""The ranks that `dpcore.compare` trains on, forked from a Python that has imported torch."""

import subprocess
import sys
from types import SimpleNamespace

from tests.ranks import python


def popen(command, **options):
    network = ""
    if command[:3] == ["ip", "netns", "exec"]:
        network, command = command[3], command[4:]
    assert command[0] == sys.executable
    return python.start(*command[1:], network=network, **options)


def fork_ranks_that_train(monkeypatch):
    replaced = SimpleNamespace(**{**vars(subprocess), "Popen": popen})
    monkeypatch.setattr("dpcore.compare.training.start.subprocess", replaced)
