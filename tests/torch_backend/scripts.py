"""Programs that end without destroy_process_group, as `test_exits.py` runs them: see
`tests/faults/exits.py` for how.

    python tests/torch_backend/scripts.py FOLDER ROUNDS
"""

import json
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist

from dpcore._autoload import register
from tests.faults.exits import WORLD, run_all


def start(rank, rendezvous):
    register()
    store = Path(sys.argv[1]) / rendezvous
    dist.init_process_group("dpcore", init_method=f"file://{store}", rank=rank, world_size=WORLD)


def in_flight(rank, rendezvous):
    start(rank, rendezvous)
    return [dist.all_reduce(torch.ones(1 << 16), async_op=True) for _ in range(4)]


def nothing_left(rank, rendezvous):
    start(rank, rendezvous)
    dist.all_reduce(torch.ones(1000))


def in_flight_and_forgotten(rank, rendezvous):
    in_flight(rank, rendezvous)


def kept_by_the_module(rank, rendezvous):
    global kept
    kept = in_flight(rank, rendezvous)
    kept.append(kept)


def in_an_exception(rank, rendezvous):
    works = in_flight(rank, rendezvous)
    raise KeyError(f"{len(works)} in flight")


def by_sys_exit(rank, rendezvous):
    works = in_flight(rank, rendezvous)
    sys.exit(2 + len(works))


def with_a_callback(rank, rendezvous):
    """It asks for the interpreter's lock while the interpreter wants to end."""
    done = threading.Event()
    works = in_flight(rank, rendezvous)
    return [work.get_future().then(lambda future: done.set()) for work in works]


def one_rank_gave_up(rank, rendezvous):
    start(rank, rendezvous)
    if rank == 1:
        raise ValueError("no more data")
    dist.all_reduce(torch.ones(4))


CASES = (
    nothing_left,
    in_flight_and_forgotten,
    kept_by_the_module,
    in_an_exception,
    by_sys_exit,
    with_a_callback,
    one_rank_gave_up,
)

if __name__ == "__main__":
    report = run_all({case.__name__: (case, int(sys.argv[2])) for case in CASES})
    if report is not None:
        print(json.dumps(report))
