"""``spawn``: run a function on several ranks of this machine, as processes or as threads.

For notebooks, lessons and tests. Programs that train are started by torchrun, mpirun or srun.

Processes come from Python's fork server with torch loaded in advance: a clean process each (no
thread or lock is inherited), in milliseconds. Functions travel by cloudpickle, so a lambda or a
function of a notebook cell will do, and the calling script is not imported again.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from dpcore.base.core_choice import NoCore, without_torch
from dpcore.comm.communicators.checks import check_integer, check_is
from dpcore.comm.launch.fork_server import PRELOAD, start_fork_server, unimportable_main
from dpcore.comm.launch.threads import heed_environment
from dpcore.errors import Error, PeerLost, Unsupported

_GRACE_SECONDS = 5.0  # for the other ranks to end by themselves after one has failed
_EXIT_SECONDS = 10.0  # for a process to go after its report: a busy machine takes its time


@dataclass
class Outcome:
    """What became of one rank."""

    rank: int
    result: Any = None
    error: BaseException | None = None
    traceback: str = ""
    exit_code: int | None = None
    failed_at: float = field(default=float("inf"))  # time.monotonic(), the same for all ranks
    reported: bool = False

    def failed(self, error: BaseException) -> None:
        """To be called where the error is handled."""
        self.error, self.traceback = error, traceback.format_exc()
        self.failed_at = time.monotonic()


class RemoteTraceback(Exception):
    """Carries the traceback of a rank as the cause of the error that is raised here."""

    def __str__(self) -> str:
        return str(self.args[0])


def spawn(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    mode: str = "processes",
    timeout: float = 30.0,
    **options: Any,
) -> list[Any]:
    """Calls ``fn(comm, *args)`` on every rank and returns the results in rank order.

    When a rank raises, the others are told (their waits end), and the first error is raised here
    with the traceback of its rank as the cause. ``mode``: "processes" or "threads". Further
    options go to ``dpcore.init``.

    >>> import dpcore
    >>> dpcore.spawn(lambda comm: comm.rank * 10, 3, mode="threads")
    [0, 10, 20]
    """
    check_is("a string", mode=mode)
    if mode not in ("processes", "threads"):
        raise Unsupported(f"mode {mode!r} does not exist; choose 'processes' or 'threads'")
    if not callable(fn):
        raise TypeError(f"spawn: expected a function for every rank, not {fn!r}")
    world_size = check_integer(world_size, "spawn: world_size")
    if world_size < 1:
        raise Unsupported(f"world_size {world_size}: at least one rank is needed")
    if importlib.util.find_spec("torch") is None:
        raise NoCore(without_torch())  # here, rather than on every rank
    run = run_processes if mode == "processes" else run_threads
    outcomes = run(fn, world_size, args, timeout=timeout, options=options)
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    if failed:
        first = min(failed, key=lambda outcome: outcome.failed_at)
        assert first.error is not None
        raise first.error from RemoteTraceback(
            f"\n\n(rank {first.rank} of {world_size})\n{first.traceback}"
        )
    return [outcome.result for outcome in outcomes]


# ---- threads ---------------------------------------------------------------------------------


def run_threads(
    fn: Callable[..., Any],
    world_size: int,
    args: Sequence[Any] = (),
    *,
    timeout: float = 30.0,
    options: Mapping[str, Any] | None = None,
) -> list[Outcome]:
    """The outcomes of all ranks as threads of this process."""
    outcomes = [Outcome(rank) for rank in range(world_size)]
    rendezvous = f"threads-{uuid.uuid4().hex}"

    def body(outcome: Outcome) -> None:
        settings = {"timeout": timeout, **(options or {}), "transport": "inproc"}
        _call(outcome, fn, args, world_size, rendezvous, settings)

    threads = [
        threading.Thread(target=body, args=(outcome,), name=f"rank {outcome.rank}", daemon=True)
        for outcome in outcomes
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def _call(
    outcome: Outcome,
    fn: Callable[..., Any],
    args: Sequence[Any],
    world_size: int,
    rendezvous: str,
    settings: Mapping[str, Any],
) -> None:
    """Runs on the rank: init, the function, finalize; errors are told to the other ranks."""
    from dpcore.comm.launch.session import finalize, init

    comm = None
    try:
        comm = init(rank=outcome.rank, world_size=world_size, init_method=rendezvous, **settings)
        outcome.result = fn(comm, *args)
        finalize()
    except BaseException as error:
        outcome.failed(error)
        if comm is not None and not comm.closed:
            with contextlib.suppress(Exception):  # the error is the more important one
                comm.abort(f"{type(error).__name__}: {error}")
        with contextlib.suppress(Exception):
            finalize()


# ---- processes -------------------------------------------------------------------------------


def run_processes(
    fn: Callable[..., Any],
    world_size: int,
    args: Sequence[Any] = (),
    *,
    timeout: float = 30.0,
    options: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    deadline: float | None = None,
    grace: float = _GRACE_SECONDS,
) -> list[Outcome]:
    """The outcomes of all ranks as processes. Nothing of them is left when this returns.

    Ranks have the environment of the caller, and not that of the fork server, which began earlier;
    ``environment`` is added to it. ``deadline``: seconds for the whole call.
    """
    import cloudpickle

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    start_fork_server()
    payload = cloudpickle.dumps((fn, tuple(args), timeout, dict(options or {})))
    rendezvous = f"spawn-{uuid.uuid4().hex}"
    outcomes = [Outcome(rank) for rank in range(world_size)]
    everything = {**os.environ, **(environment or {})}
    processes = []
    lines: dict[Connection, tuple[Outcome, Any]] = {}
    try:
        with unimportable_main():
            for rank in range(world_size):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(
                    target=_rank_main,
                    args=(theirs, rank, world_size, rendezvous, payload, everything),
                    name=f"dpcore rank {rank}",
                    daemon=False,  # a daemon could not have DataLoader workers
                )
                process.start()
                theirs.close()
                processes.append(process)
                lines[ours] = (outcomes[rank], process)
        _collect(lines, deadline, grace)
    finally:
        _end(processes, outcomes)
        for line in lines:
            line.close()
    for outcome, process in zip(outcomes, processes, strict=True):
        outcome.exit_code = process.exitcode
        if outcome.error is None and outcome.exit_code != 0:
            outcome.error = PeerLost(
                f"rank {outcome.rank} ended {_how(outcome.exit_code)} "
                f"{'after its result was there' if outcome.reported else 'without a result'}"
            )
    return outcomes


def _collect(
    lines: Mapping[Connection, tuple[Outcome, Any]], deadline: float | None, grace: float
) -> None:
    """Takes the ranks' reports until all have spoken or gone, or patience ends.

    A process that is gone is known by its sentinel: workers that it forked may hold its line.
    """
    waiting = dict(lines)
    ends_at = time.monotonic() + deadline if deadline is not None else float("inf")
    while waiting and time.monotonic() < ends_at:
        patience = max(0.0, min(ends_at - time.monotonic(), 0.2))
        sentinels = [process.sentinel for _, process in waiting.values()]
        ready = wait([*waiting, *sentinels], timeout=patience)
        for line, (outcome, process) in list(waiting.items()):
            if line not in ready and process.sentinel not in ready:
                continue
            del waiting[line]
            try:
                if not line.poll():
                    raise EOFError
                _take(line.recv_bytes(), outcome)
                failed = outcome.error is not None
            except EOFError:  # the process is gone
                outcome.failed_at = time.monotonic()
                failed = True
            if failed:
                ends_at = min(ends_at, time.monotonic() + grace)


def _take(report: bytes, outcome: Outcome) -> None:
    """What a rank has sent. The text of its error is good also where the error can't be made."""
    import cloudpickle

    made, described, outcome.traceback, outcome.failed_at = pickle.loads(report)
    outcome.reported = True
    try:
        outcome.result, outcome.error = cloudpickle.loads(made)
    except Exception as problem:
        outcome.traceback = outcome.traceback or traceback.format_exc()
        outcome.failed_at = min(outcome.failed_at, time.monotonic())
        outcome.error = Error(
            f"rank {outcome.rank}: {described} was sent back and can't be unpickled: {problem}"
        )


def _end(processes: Sequence[Any], outcomes: Sequence[Outcome]) -> None:
    ends_at = time.monotonic() + _EXIT_SECONDS
    for process, outcome in zip(processes, outcomes, strict=False):  # all may not have started
        process.join(timeout=max(0.0, ends_at - time.monotonic()) if outcome.reported else 0.5)
        if process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            process.join()


def _how(exit_code: int | None) -> str:
    if exit_code is None:
        return "unobserved"
    if exit_code < 0:
        return f"by {signal.Signals(-exit_code).name}"
    return f"with exit code {exit_code}"


def _rank_main(
    line: Connection,
    rank: int,
    world_size: int,
    rendezvous: str,
    payload: bytes,
    environment: Mapping[str, str],
) -> None:
    import cloudpickle

    begin_rank(environment)
    outcome = Outcome(rank)
    try:
        fn, args, timeout, options = cloudpickle.loads(payload)
    except Exception as error:  # what was pickled by value there, and can't be made here
        outcome.failed(error)
    else:
        _call(outcome, fn, args, world_size, rendezvous, {"timeout": timeout, **options})
    described = f"the result, {type(outcome.result)},"
    if outcome.error is not None:
        said = "".join(traceback.format_exception_only(outcome.error)).strip()
        described = f"the error {said}"
    try:
        made = cloudpickle.dumps((outcome.result, outcome.error))
    except Exception:
        outcome.error = Error(f"rank {rank}: {described} can't be sent back")
        outcome.traceback = outcome.traceback or traceback.format_exc()
        outcome.failed_at = min(outcome.failed_at, time.monotonic())
        made = cloudpickle.dumps((None, outcome.error))
    line.send_bytes(pickle.dumps((made, described, outcome.traceback, outcome.failed_at)))
    line.close()
    sys.stdout.flush()
    sys.stderr.flush()


def begin_rank(environment: Mapping[str, str]) -> None:
    """A process that will be a rank: the caller's environment instead of the fork server's, and an
    end when the launcher ends."""
    gc.freeze()  # of what all ranks share, a collection would copy every page
    _end_with_launcher()
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)
    heed_environment()


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
