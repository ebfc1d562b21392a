"""``spawn``: run a function on several ranks of this machine, as processes or as threads.

For notebooks, lessons and tests. Programs that train are started by torchrun, mpirun or srun.

Functions travel by cloudpickle, so a lambda or a function of a notebook cell will do, and the
calling script is not imported again.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from dpcore.base.core_choice import NoCore, without_torch
from dpcore.comm.communicators.checks import check_integer, check_is
from dpcore.comm.launch.rank_processes import RankProcesses, how_it_ended
from dpcore.errors import Error, PeerLost, Unsupported

_GRACE_SECONDS = 5.0  # for the other ranks to end by themselves after one has failed
_LOOK_SECONDS = 0.2  # at most between two looks at the clock
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
    preload: Sequence[str] = (),
) -> list[Outcome]:
    """The outcomes of all ranks as processes. Nothing of them is left when this returns.

    ``environment`` is added to that of the caller. ``deadline``: seconds for the whole call.
    """
    import cloudpickle

    payload = cloudpickle.dumps((fn, tuple(args), timeout, dict(options or {})))
    processes = RankProcesses(
        _rank_main,
        world_size,
        (world_size, f"spawn-{uuid.uuid4().hex}", payload),
        environment,
        preload,
    )
    outcomes = [Outcome(rank) for rank in range(world_size)]
    try:
        _collect(processes, outcomes, deadline, grace)
    finally:
        leaving = [outcome.rank for outcome in outcomes if outcome.reported]
        exit_codes = processes.end(_EXIT_SECONDS, leaving)
    for outcome, exit_code in zip(outcomes, exit_codes, strict=True):
        outcome.exit_code = exit_code
        if outcome.error is None and exit_code != 0:
            outcome.error = PeerLost(
                f"rank {outcome.rank} ended {how_it_ended(exit_code)} "
                f"{'after its result was there' if outcome.reported else 'without a result'}"
            )
    return outcomes


def _collect(
    processes: RankProcesses, outcomes: Sequence[Outcome], deadline: float | None, grace: float
) -> None:
    """Takes the ranks' reports until all have spoken or gone, or patience ends."""
    waiting = set(range(len(outcomes)))
    ends_at = time.monotonic() + deadline if deadline is not None else float("inf")
    while waiting and (left := ends_at - time.monotonic()) > 0:
        for rank, report in processes.heard(waiting, min(left, _LOOK_SECONDS)):
            waiting.discard(rank)
            outcome = outcomes[rank]
            if report is None:  # the process is gone
                outcome.failed_at = time.monotonic()
            else:
                _take(report, outcome)
            if report is None or outcome.error is not None:
                ends_at = min(ends_at, time.monotonic() + grace)


def _take(report: tuple[bytes, str, str, float], outcome: Outcome) -> None:
    """What a rank has sent. The text of its error is good also where the error can't be made."""
    import cloudpickle

    made, described, outcome.traceback, outcome.failed_at = report
    outcome.reported = True
    try:
        outcome.result, outcome.error = cloudpickle.loads(made)
    except Exception as problem:
        outcome.traceback = outcome.traceback or traceback.format_exc()
        outcome.failed_at = min(outcome.failed_at, time.monotonic())
        outcome.error = Error(
            f"rank {outcome.rank}: {described} was sent back and can't be unpickled: {problem}"
        )


def _rank_main(
    pipe: Connection, rank: int, world_size: int, rendezvous: str, payload: bytes
) -> None:
    import cloudpickle

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
    pipe.send((made, described, outcome.traceback, outcome.failed_at))
    pipe.close()
    sys.stdout.flush()
    sys.stderr.flush()
