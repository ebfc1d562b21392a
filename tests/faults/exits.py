"""Ranks that end as real programs do: through the interpreter's own shutdown. Run by test_exit.py.

One process loads torch and forks a clean copy for each rank of each case, which then leaves
through sys.exit() or an exception. Printed: for every case the list of [exit code, stderr].
"""

import gc
import json
import os
import signal
import sys
import tempfile
import threading
import time

import torch

from dpcore import _C  # noqa: F401  (loaded once; the package's own state comes with init)

WORLD = 2
PATIENCE = 20  # seconds; a rank that hangs at its exit ends by SIGALRM


def start(rank, rendezvous):
    import dpcore

    return dpcore.init(rank=rank, world_size=WORLD, init_method=rendezvous, timeout=10)


def without_finalize(rank, rendezvous):
    comm = start(rank, rendezvous)
    comm.all_reduce(comm.empty(1000).fill_(1))


def kept_by_a_module(rank, rendezvous):
    """What the interpreter clears last: a global of __main__, in a cycle."""
    global kept
    comm = start(rank, rendezvous)
    kept = {"comm": comm, "tensor": comm.empty(1000)}
    kept["itself"] = kept
    comm.all_reduce(kept["tensor"])


def in_flight(rank, rendezvous):
    comm = start(rank, rendezvous)
    return [comm.all_reduce(torch.ones(1 << 18), async_op=True) for _ in range(5)]


def in_flight_then_exit(rank, rendezvous):
    works = in_flight(rank, rendezvous)
    assert len(works) == 5
    sys.exit(3)


def in_flight_then_exception(rank, rendezvous):
    works = in_flight(rank, rendezvous)
    raise KeyError(f"not found, {len(works)} in flight")


def exception_on_rank_1(rank, rendezvous):
    """An operation that the other rank waits for will never come."""
    comm = start(rank, rendezvous)
    if rank == 1:
        raise ValueError("bad batch")
    comm.barrier()


def callback_at_the_end(rank, rendezvous):
    comm = start(rank, rendezvous)
    done = comm.all_reduce(torch.ones(1 << 20), async_op=True).get_future()
    done.then(lambda future: future.value())


def a_thread_waits(rank, rendezvous):
    """Rank 0's daemon thread sits in a barrier that rank 1 never enters."""
    comm = start(rank, rendezvous)
    if rank == 0:
        threading.Thread(target=comm.barrier, daemon=True).start()
        time.sleep(0.2)
    else:
        time.sleep(0.4)


def session_inherited(rank, rendezvous):
    """The package was in use before the fork, as under multiprocessing's fork method."""
    comm = start(rank, rendezvous)
    return comm.all_reduce(torch.ones(1 << 20), async_op=True)


def unheard(rank, rendezvous):
    """Nobody waits for an operation that the other rank has no part in."""
    comm = start(rank, rendezvous)
    return comm.all_reduce(torch.ones(1000), async_op=True) if rank == 0 else None


def unheard_then_exit(rank, rendezvous):
    work = unheard(rank, rendezvous)
    sys.exit(3 if work else 0)


def last_update(rank, rendezvous, keep=True):
    """Rank 0 takes a step more, and the next forward, which would finish it, does not come."""
    import dpcore

    start(rank, rendezvous)
    model = dpcore.DataParallel(torch.nn.Linear(4, 2), schedule="priority")
    optimizer = dpcore.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for _ in range(3 - rank):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    return (model, optimizer) if keep else None


def last_update_of_a_lost_model(rank, rendezvous):
    last_update(rank, rendezvous, keep=False)


CASES = {
    "without finalize": (without_finalize, 2),
    "kept by a module": (kept_by_a_module, 1),
    "in flight": (in_flight, 1),
    "in flight, sys.exit": (in_flight_then_exit, 1),
    "in flight, exception": (in_flight_then_exception, 1),
    "exception on rank 1": (exception_on_rank_1, 1),
    "callback at the end": (callback_at_the_end, 1),
    "a thread waits": (a_thread_waits, 1),
    "session inherited": (session_inherited, 1),
    "unheard": (unheard, 1),
    "unheard, sys.exit": (unheard_then_exit, 1),
    "last update": (last_update, 1),
    "last update of a lost model": (last_update_of_a_lost_model, 1),
}


def run_case(case, rendezvous):
    """The parent gets the ends of the ranks; a rank gets None, having done its part."""
    ranks = []
    for rank in range(WORLD):
        errors = tempfile.TemporaryFile()  # noqa: SIM115
        child = os.fork()
        if child == 0:
            signal.alarm(PATIENCE)
            os.dup2(errors.fileno(), 2)
            global result
            result = case(rank, rendezvous)  # lives until the interpreter ends
            return None
        ranks.append((child, errors))
    ends = []
    for child, errors in ranks:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        errors.seek(0)
        ends.append([code, errors.read().decode()])
        errors.close()
    return ends


def run_all(cases):
    """The ends of the ranks of every case; None in a rank, which then has to end by itself."""
    torch.set_num_threads(1)
    gc.freeze()  # what all ranks share need not be looked through at the end of each
    report = {}
    for name, (case, times) in cases.items():
        if case is session_inherited:
            import dpcore.comm.launch.session  # noqa: F401
        report[name] = []
        for time_ in range(times):
            ends = run_case(case, f"exits-{os.getpid()}-{name}-{time_}")
            if ends is None:
                return None
            report[name] += ends
    return report


if __name__ == "__main__":
    report = run_all(CASES)
    if report is not None:
        print(json.dumps(report))
