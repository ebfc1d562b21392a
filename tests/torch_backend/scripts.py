"""Programs that end without destroy_process_group, as `test_exits.py` runs them.

python tests/torch_backend/scripts.py CASE STORE RANK WORLD
"""

import sys
import threading

import torch
import torch.distributed as dist

import dpcore  # noqa: F401  (from the source tree: its entry point may not be installed)
from dpcore._autoload import register


def nothing_left():
    dist.all_reduce(torch.ones(1000))


def in_flight():
    return [dist.all_reduce(torch.ones(1 << 16), async_op=True) for _ in range(4)]


def in_flight_and_forgotten():
    in_flight()


def kept_by_the_module():
    global kept
    kept = in_flight()
    kept.append(kept)


def in_an_exception():
    works = in_flight()
    raise KeyError(f"{len(works)} in flight")


def by_sys_exit():
    works = in_flight()
    sys.exit(2 + len(works))


def with_a_callback():
    """It asks for the interpreter's lock while the interpreter wants to end."""
    done = threading.Event()
    return [work.get_future().then(lambda future: done.set()) for work in in_flight()]


def one_rank_gave_up():
    if dist.get_rank() == 1:
        raise ValueError("no more data")
    dist.all_reduce(torch.ones(4))


CASES = {
    case.__name__: case
    for case in (
        nothing_left,
        in_flight_and_forgotten,
        kept_by_the_module,
        in_an_exception,
        by_sys_exit,
        with_a_callback,
        one_rank_gave_up,
    )
}

if __name__ == "__main__":
    name, store, rank, world = sys.argv[1:]
    register()
    dist.init_process_group(
        "dpcore", init_method=f"file://{store}", rank=int(rank), world_size=int(world)
    )
    CASES[name]()
