"""The process that ranks of ``spawn`` and of notebooks are forked from: Python's fork server."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import tempfile
import types
from collections.abc import Iterator
from multiprocessing import forkserver
from typing import Any

# What the fork server imports once for all ranks. Tests add to it what their ranks import.
PRELOAD = ["dpcore.comm.launch.spawn", "torch", "cloudpickle"]
PRELOAD += ["dpcore.comm.launch.session", "dpcore.comm.communicators.native"]


def start_fork_server() -> None:
    """Starts the fork server such that no file is left when everything is killed.

    Its socket lies in a directory of its own, which is removed at once: the open handle of the
    socket leads there as well.
    """
    server: Any = vars(forkserver)["_forkserver"]
    settings: dict[str, Any] = vars(multiprocessing.current_process())["_config"]
    if getattr(server, "_forkserver_pid", None) is not None:
        return
    usual_place = settings.get("tempdir")
    with tempfile.TemporaryDirectory(prefix="dpcore-") as directory, _looks_where_we_do():
        settings["tempdir"] = directory
        try:
            server.ensure_running()
            handle = os.open(server._forkserver_address, os.O_PATH | os.O_CLOEXEC)
            server._forkserver_address = f"/proc/self/fd/{handle}"
        finally:
            settings["tempdir"] = usual_place


@contextlib.contextmanager
def _looks_where_we_do() -> Iterator[None]:
    """What it imports in advance, it finds where this program does. By itself it begins in the
    current directory: a dpcore that lies there, or a random.py, would be every rank's. (Before
    Python 3.11 the current directory can't be left out.)"""
    ours = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONSAFEPATH": "1"}
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def unimportable_main() -> Iterator[None]:
    """Keeps multiprocessing from running the caller's script again in every rank."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
