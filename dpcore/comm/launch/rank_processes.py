"""Ranks as processes of this machine: started, heard, and ended.

Everything that runs ranks of its own does it here: ``spawn`` (and with it tests, benchmarks and
exercises, which need clean processes for each call) and the notebook, whose ranks run one cell
after the other. Others start *programs*, which are not forked: the contenders of ``dpcore compare``
(compare/collectives/group.py, compare/training/start.py), and what a launcher such as mpiexec runs.

Processes come from Python's fork server with torch loaded in advance: a clean process each (no
thread or lock is inherited), in milliseconds. A pipe leads to each.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

from dpcore.comm.launch.threads import heed_environment

# What the fork server imports once for all ranks. Tests add to it what their ranks import.
PRELOAD = ["dpcore.comm.launch.spawn", "torch", "cloudpickle"]
PRELOAD += ["dpcore.comm.launch.session", "dpcore.comm.communicators.native"]

_LONGEST_FOLDER = 60  # an address in it has 108 characters at most
_MOMENT = 0.5  # seconds for a process to end that is not expected to


class RankProcesses:
    """A process per rank, in which ``main(pipe, rank, *arguments)`` runs.

    Ranks have the environment of the caller, and not that of the fork server, which began earlier;
    ``environment`` is added to it. ``preload``: what the fork server imports besides ``PRELOAD``,
    if this starts it.
    """

    def __init__(
        self,
        main: Callable[..., None],
        world_size: int,
        arguments: Sequence[Any],
        environment: Mapping[str, str] | None = None,
        preload: Sequence[str] = (),
    ) -> None:
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*PRELOAD, *preload])
        _start_fork_server()
        everything = {**os.environ, **(environment or {})}
        try:
            with _unimportable_main():
                for rank in range(world_size):
                    ours, theirs = context.Pipe()
                    self._pipes.append(ours)
                    process = context.Process(
                        target=_begin,
                        args=(everything, main, theirs, rank, *arguments),
                        name=f"dpcore rank {rank}",
                        daemon=False,  # a daemon could not have DataLoader workers
                    )
                    process.start()
                    theirs.close()
                    self._processes.append(process)
        except BaseException:
            self.end(0.0)
            raise

    @property
    def process_ids(self) -> list[int]:
        """In the order of the ranks; none when they were ended."""
        return [process.pid for process in self._processes]

    def first_gone(self) -> int | None:
        """A rank whose process has ended, if there is one."""
        gone = (rank for rank, one in enumerate(self._processes) if not one.is_alive())
        return next(gone, None)

    def send(self, rank: int, message: Any) -> None:
        with contextlib.suppress(OSError):  # gone meanwhile: `heard` says so
            self._pipes[rank].send(message)

    def heard(self, ranks: Collection[int], seconds: float) -> Iterator[tuple[int, Any]]:
        """What these ranks have sent, as soon as one has; nothing after so many seconds. None from
        a rank whose process is gone, which its sentinel tells: workers that it forked may hold its
        end of the pipe."""
        sentinels = {rank: self._processes[rank].sentinel for rank in ranks}
        pipes = [self._pipes[rank] for rank in ranks]
        ready = wait([*pipes, *sentinels.values()], timeout=seconds)
        for pipe, (rank, sentinel) in zip(pipes, sentinels.items(), strict=True):
            if pipe in ready or sentinel in ready:
                try:
                    yield rank, pipe.recv() if pipe.poll() else None
                except (EOFError, OSError):
                    yield rank, None

    def send_signal(self, rank: int, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._processes[rank].pid, number)

    def hang_up(self) -> None:
        """Closes all pipes, which a rank that reads its own takes for the end."""
        for pipe in self._pipes:
            pipe.close()

    def end(self, seconds: float, leaving: Collection[int] | None = None) -> list[int]:
        """The exit codes. The ranks that are ``leaving`` (all, by default) have so many seconds
        together, each other one a moment. Nothing of them is left when this returns."""
        ends_at = time.monotonic() + seconds
        processes, self._processes = self._processes, []
        for rank, process in enumerate(processes):
            is_leaving = leaving is None or rank in leaving
            process.join(max(0.0, ends_at - time.monotonic()) if is_leaving else _MOMENT)
            if process.is_alive():
                process.kill()
                process.join()
        self.hang_up()
        return [process.exitcode for process in processes]


def how_it_ended(exit_code: int) -> str:
    """An exit code in words.

    >>> how_it_ended(-9), how_it_ended(3)
    ('by SIGKILL', 'with exit code 3')
    """
    return (
        f"by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"with exit code {exit_code}"
    )


# ---- in a rank -------------------------------------------------------------------------------


def _begin(
    environment: Mapping[str, str], main: Callable[..., None], pipe: Connection, *arguments: Any
) -> None:
    """What each process runs: with the caller's environment instead of the fork server's."""
    gc.freeze()  # of what all ranks share, a collection would copy every page
    _end_with_launcher()
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)
    heed_environment()
    main(pipe, *arguments)


def _end_with_launcher() -> None:
    """From here on the kernel sends SIGTERM when the launcher is gone, however it went."""
    launcher = multiprocessing.parent_process()
    if launcher is None:
        return
    sentinel = launcher.sentinel
    fcntl.fcntl(sentinel, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(sentinel, fcntl.F_SETSIG, signal.SIGTERM)
    fcntl.fcntl(sentinel, fcntl.F_SETFL, fcntl.fcntl(sentinel, fcntl.F_GETFL) | os.O_ASYNC)
    if wait([sentinel], timeout=0):
        os.kill(os.getpid(), signal.SIGTERM)


# ---- the fork server -------------------------------------------------------------------------


def _start_fork_server() -> None:
    """Starts the fork server such that no file is left when everything is killed.

    Its socket lies in a directory of its own, which is removed at once: the open handle of the
    socket leads there as well.
    """
    server: Any = vars(forkserver)["_forkserver"]
    settings: dict[str, Any] = vars(multiprocessing.current_process())["_config"]
    if getattr(server, "_forkserver_pid", None) is not None:
        return
    usual_place = settings.get("tempdir")
    is_long = len(tempfile.gettempdir()) > _LONGEST_FOLDER
    folder = tempfile.TemporaryDirectory(prefix="dpcore-", dir="/tmp" if is_long else None)
    with folder as directory, _looks_where_we_do():
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
def _unimportable_main() -> Iterator[None]:
    """Keeps multiprocessing from running the caller's script again in every rank."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
