"""The table of faults: what happens, to whom, and what the others must say how soon.

Each row bears its number in the fault catalogue:

     1 a rank is killed                11-16 ranks call different things
     2 a rank is stopped               25 signals while waiting
     3 a rank leaves or exits early    26 fork after init
     4 a rank crashes                  27-28 ends: no finalize, twice, with work in flight
     5 the launcher is killed          29 limits: descriptors, addresses, memory
     6 everything is killed            30 more ranks than cores
                                       31-33 odd payloads, freed buffers, clocks

1-4 are rows here, 11-16 in disagreements.py; test_scenarios.py runs them. The others want a
program each: test_start.py, test_exit.py (5, 6, 25, 27), test_fork.py (26), test_lifecycle.py
(28, 32) and test_limits.py (29-31, 33).

A fault comes from the injector in the core (DPCORE_FAULT), which strikes at an exact place of an
exact operation, or from the rank's own steps. Deaths are timed from a stamp that the victim
leaves behind just before, so the time measured is never shorter than the true one.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import cloudpickle
import torch

import dpcore as dp

cloudpickle.register_pickle_by_value(sys.modules[__name__])

FATAL = 5  # the operation at which something happens


@dataclass(frozen=True)
class Scenario:
    item: int  # in the catalogue
    name: str
    world: int
    victim: int
    error: str  # class of the error on the survivors
    steps: Callable  # (comm, scenario, stamp): what every rank does
    fault: str = ""  # DPCORE_FAULT
    says: tuple[str, ...] = ()  # regular expressions, each found in every survivor's message
    victim_error: str | None = None  # a victim that lives on raises this
    exit_code: int = 0  # of the victim
    within: float = 1.0  # seconds from the fault to the last survivor's error
    not_before: float = 0.0
    from_own_call: bool = False  # these are counted from a survivor's own call, not from the fault
    timeout: float = 10.0  # of the rendezvous and of every operation,
    patience: float = 0.0  # unless operation FATAL has another
    wakes_by: signal.Signals = signal.SIGKILL  # what ends a stop, after the survivors' errors
    transport: str = "auto"
    on_one_host: bool = False  # has no counterpart over TCP

    def __str__(self) -> str:
        suffix = "" if self.transport == "auto" else f"-{self.transport}"
        return f"{self.item}-{self.name}-of{self.world}-rank{self.victim}{suffix}"


def observe(comm, scenario, stamp):
    """Runs the steps on a rank and reports what was raised, when, and what a second call says."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    report = {"error": None, "message": "", "at": 0.0, "entered": None, "again": None}
    try:
        scenario.steps(comm, scenario, stamp)
    except dp.Error as error:
        report.update(error=type(error).__name__, message=str(error), at=time.monotonic())
        report["entered"] = getattr(error, "entered", None)
        try:
            comm.barrier()
        except dp.Error as again:
            report["again"] = (type(again).__name__, str(again))
        raised(stamp, comm.rank).touch()
        if scenario.fault.startswith("stop") and comm.rank == neighbour_of(scenario):
            wait_for_survivors(scenario, stamp)
            os.kill(read_stamp(stamp)[1], scenario.wakes_by)
    return report


def raised(stamp, rank):
    return Path(f"{stamp}.{rank}")


def wait_for_survivors(scenario, stamp):
    """Until all have raised: what happens to the victim next is not for a slow one to see."""
    survivors = set(range(scenario.world)) - {scenario.victim}
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if all(raised(stamp, rank).exists() for rank in survivors):
            return
        time.sleep(0.01)


def mark(stamp):
    Path(stamp).write_text(f"{time.monotonic()} {os.getpid()}")


def read_stamp(stamp):
    """When the fault happened, and the process it happened to."""
    moment, process = Path(stamp).read_text().split()
    return float(moment), int(process)


def neighbour_of(scenario):
    return (scenario.victim + 1) % scenario.world


# ---- deaths, in the middle of an all-reduce or between two ------------------------------------


def reduce_again_and_again(comm, scenario, stamp, elements=1000):
    reduce_one(comm, scenario, stamp, comm.empty(elements).zero_())


def reduce_one(comm, scenario, stamp, tensor, **options):
    for number in range(FATAL + 3):
        if number == FATAL:
            if comm.rank == scenario.victim:
                mark(stamp)
            fatal_call(comm, tensor, scenario, **options)
        else:
            comm.all_reduce(tensor, **options)


def fatal_call(comm, tensor, scenario, **options):
    """Its error bears the moment at which it was called."""
    entered = time.monotonic()
    try:
        comm.all_reduce(tensor, timeout=scenario.patience, **options)
    except dp.Error as error:
        error.entered = entered
        raise


def reduce_much(comm, scenario, stamp):
    reduce_again_and_again(comm, scenario, stamp, elements=1 << 20)


def reduce_ordinary_memory(comm, scenario, stamp):
    reduce_one(comm, scenario, stamp, torch.zeros(1 << 18))


def read_ordinary_memory(comm, scenario, stamp):
    """The root keeps its memory until the others have read it, or until it has told them."""
    for number in range(FATAL + 3):
        parts = torch.ones(comm.world_size, 1 << 20) if comm.rank == 0 else None
        mine = torch.zeros(1 << 20)
        if number == FATAL and comm.rank == scenario.victim:
            mark(stamp)
        entered = time.monotonic()
        try:
            comm.scatter(mine, parts, root=0)
        except dp.Error as error:
            error.entered = entered
            if parts is not None:
                parts.fill_(-1.0)  # whoever has not read its part has to raise as well
            raise
        assert mine.eq(1.0).all()


def in_flight(comm, scenario, stamp):
    # More than is sent with the word that a rank has entered: the others would have all they need.
    tensors = [comm.empty(20_000).zero_() for _ in range(FATAL + 3)]
    if comm.rank == scenario.victim:
        mark(stamp)
    for work in [comm.all_reduce(tensor, async_op=True) for tensor in tensors]:
        work.wait()


def between_two(action):
    """The victim does something outside any operation while the others wait for it."""

    def steps(comm, scenario, stamp):
        tensor = comm.empty(1000).zero_()
        for _ in range(FATAL):
            comm.all_reduce(tensor)
        if comm.rank == scenario.victim:
            time.sleep(0.1)  # the others sleep by now
            mark(stamp)
            action()
            return
        comm.all_reduce(tensor)

    return steps


def while_all_compute(comm, scenario, stamp):
    """Nobody waits when the victim dies: the others learn it at their next call, at once."""
    tensor = comm.empty(1000).zero_()
    comm.all_reduce(tensor)
    if comm.rank == scenario.victim:
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.3)
    fatal_call(comm, tensor, scenario)


def kill_self():
    os.kill(os.getpid(), signal.SIGKILL)


def terminate_self():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(10)


def give_up():
    raise ValueError("no more data")


NAMED = r"rank {victim}( |\b).*operation \d+ \((all_reduce of \d+ x float32, sum|barrier)\)"
# Over TCP a connection that ends tells nothing about the reason.
DIED = (
    r"rank {victim} \(process \d+\) died( or is out of reach \(.+\))? and is needed for",
    NAMED,
)


def deaths():
    for world in (2, 3, 4):
        for victim in range(world):
            yield Scenario(
                1, "killed-idle", world, victim, "PeerLost", between_two(kill_self),
                says=DIED, exit_code=-9,
            )  # fmt: skip
            for place in ("entry", "middle", "exit"):
                yield Scenario(
                    1, f"killed-{place}", world, victim, "PeerLost", reduce_again_and_again,
                    f"kill:rank{victim}:op{FATAL}:{place}", DIED, exit_code=-9,
                )  # fmt: skip
    for name, steps in (
        ("4MiB-in-the-arena", reduce_much),
        ("1MiB-ordinary", reduce_ordinary_memory),
        ("async", in_flight),
    ):
        for world in (2, 4):
            yield Scenario(
                1, f"killed-{name}", world, 1, "PeerLost", steps,
                f"kill:rank1:op{FATAL}:middle", DIED, exit_code=-9,
            )  # fmt: skip
    for world in (2, 4):
        for victim in (0, 1):
            yield Scenario(
                1, "killed-while-memory-is-read", world, victim, "PeerLost", read_ordinary_memory,
                f"kill:rank{victim}:op{FATAL}:middle", DIED[:1], exit_code=-9,
            )  # fmt: skip
    yield Scenario(
        1, "killed-while-all-compute", 3, 0, "PeerLost", while_all_compute, says=DIED,
        exit_code=-9, from_own_call=True,
    )  # fmt: skip
    for item, action, exit_code in ((3, "exit", 0), (4, "segv", -11), (4, "abort", -6)):
        yield Scenario(
            item, action, 3, 2, "PeerLost", reduce_again_and_again,
            f"{action}:rank2:op{FATAL}:middle", DIED, exit_code=exit_code,
        )  # fmt: skip
    left = (r"rank {victim} \(process \d+\) finalized and left and is needed for", NAMED)
    for victim in range(3):
        yield Scenario(
            3, "returns-early", 3, victim, "PeerLost", between_two(lambda: None), says=left
        )
    yield Scenario(
        25, "SIGTERM", 3, 1, "PeerLost", between_two(terminate_self), says=DIED, exit_code=-15
    )


def a_rank_raises():
    says = (r"rank {victim} gave up: %s",)
    yield Scenario(
        27, "raises", 3, 1, "PeerLost", between_two(give_up),
        says=(says[0] % "ValueError: no more data",), victim_error="ValueError",
    )  # fmt: skip
    yield Scenario(
        27, "sys.exit", 3, 1, "PeerLost", between_two(lambda: sys.exit(3)),
        says=(says[0] % "SystemExit: 3",), victim_error="SystemExit",
    )  # fmt: skip
    yield Scenario(
        27, "core-throws", 3, 1, "Error", reduce_again_and_again,
        f"throw:rank1:op{FATAL}:entry", (r"rank 1: a fault was injected",), "Error",
    )  # fmt: skip


# ---- stopped and slow ranks -------------------------------------------------------------------


def ring_moves(comm, scenario, stamp):
    reduce_one(comm, scenario, stamp, torch.zeros(100_000), algorithm="ring/moves")


def never_calls(comm, scenario, stamp):
    tensor = comm.empty(1000).zero_()
    for _ in range(FATAL):
        comm.all_reduce(tensor)
    if comm.rank == scenario.victim:
        mark(stamp)
        wait_for_survivors(scenario, stamp)
        return
    fatal_call(comm, tensor, scenario)


def limit(timeout):
    return {"not_before": 0.9 * timeout, "within": 1.1 * timeout + 0.5, "from_own_call": True}


def late():
    bounds = {"timeout": 30.0, "patience": 1.0, **limit(1.0)}
    of_the_communicator = {"timeout": 2.0, **limit(2.0)}
    after = rf"operation {FATAL} \(all_reduce of \d+ x float32, sum\) was not complete after "
    not_entered = (
        r"rank {victim} has not entered it: its last was operation 4 "
        r"\(all_reduce of \d+ x float32, sum\), finished [\d.]+ s ago"
    )
    entry = (after + "1 s", not_entered)
    middle = (after + "1 s", r"every rank has entered it, but rank {victim} stopped in the middle")
    for world, victim in ((2, 0), (3, 1), (4, 3)):
        for place, says in (("entry", entry), ("middle", middle)):
            yield Scenario(
                2, f"stopped-{place}", world, victim, "Timeout", reduce_much,
                f"stop:rank{victim}:op{FATAL}:{place}", says, exit_code=-9, **bounds,
            )  # fmt: skip
    yield Scenario(
        2, "stopped-within-a-ring", 4, 2, "Timeout", ring_moves,
        f"stop:rank2:op{FATAL}:middle", middle, exit_code=-9, **bounds,
    )  # fmt: skip
    yield Scenario(
        2, "stopped-then-woken", 3, 1, "Timeout", reduce_much,
        f"stop:rank1:op{FATAL}:entry", (after + "2 s", not_entered), "Timeout",
        wakes_by=signal.SIGCONT, **of_the_communicator,
    )  # fmt: skip
    # The memory of a root that is stopped can be read all the same: the next operation waits.
    for world, victim, says in ((3, 0, "rank {victim} has not entered it"), (2, 1, middle[1])):
        yield Scenario(
            2, "woken-while-memory-is-read", world, victim, "Timeout", read_ordinary_memory,
            f"stop:rank{victim}:op{FATAL}:middle", (says,), "Timeout",
            wakes_by=signal.SIGCONT, on_one_host=True, **of_the_communicator,
        )  # fmt: skip
    yield Scenario(2, "never-calls", 3, 1, "Timeout", never_calls, says=entry, **bounds)
    yield Scenario(
        8, "slow-but-in-time", 3, 1, "", reduce_again_and_again,
        f"delay=400:rank1:op{FATAL}:entry",
    )  # fmt: skip


TABLE = [*deaths(), *a_rank_raises(), *late()]
