"""How soon do the others go on when a rank dies? `python -m benchmarks.survivors`

In each trial a rank of a fresh job kills itself in a loop of all-reduces. Counted is the time from
its kill to the end of the first all-reduce in the communicator that `shrink()` returns, on the
slowest of the ranks that live, and how much of it passes before they raise and in `shrink()`.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import cloudpickle
import torch

import dpcore as dp
from benchmarks.harness.options import script_parser
from dpcore.comm.launch.spawn import run_processes
from dpcore.tools.records import ROOT, keep, run_facts

cloudpickle.register_pickle_by_value(sys.modules[__name__])

KILLED_AT = 50  # steps


def measured(comm: Any, victim: int, elements: int, stamp: str) -> dict[str, float]:
    """On a rank that lives: seconds after the kill."""
    tensor = comm.empty(elements).fill_(1)
    step = 0
    try:
        while True:
            if comm.rank == victim and step == KILLED_AT:
                Path(stamp).write_text(str(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
            comm.all_reduce(tensor)
            step += 1
    except dp.PeerLost:
        raised = time.monotonic()
        comm = comm.shrink()
    shrunk = time.monotonic()
    tensor = comm.empty(elements).fill_(1)
    comm.all_reduce(tensor)
    done = time.monotonic()
    if not tensor.eq(comm.world_size).all():
        raise RuntimeError(f"rank {comm.rank}: wrong sums after shrink()")
    killed = float(Path(stamp).read_text())
    return {"raised": raised - killed, "shrunk": shrunk - killed, "reduced": done - killed}


def trial(number: int, world: int, elements: int, transport: str, folder: str) -> dict[str, float]:
    victim = number % world
    outcomes = run_processes(
        measured,
        world,
        (victim, elements, str(Path(folder) / str(number))),
        options={"transport": transport},
        deadline=120.0,
        grace=100.0,
    )
    lives = [outcome for outcome in outcomes if outcome.rank != victim]
    for outcome in lives:
        if outcome.error is not None:
            raise outcome.error
    return {name: max(outcome.result[name] for outcome in lives) for name in lives[0].result}


if __name__ == "__main__":
    made = script_parser(__doc__)
    made.add_argument("--world", type=int, default=4)
    made.add_argument("--kills", type=int, default=100)
    made.add_argument("--elements", type=int, default=4_700_000, help="of float32; %(default)s")
    made.add_argument("--transport", default="shm", choices=("shm", "tcp"))
    made.add_argument("--records", type=Path, default=ROOT / "benchmarks/results/survivors.jsonl")
    options = made.parse_args()
    facts = run_facts({"": {"torch": torch.__version__}}, {"kills": options.kills})
    with tempfile.TemporaryDirectory() as folder:
        trials = [
            trial(number, options.world, options.elements, options.transport, folder)
            for number in range(options.kills)
        ]
    line: dict[str, Any] = {
        "world": options.world,
        "elements": options.elements,
        "transport": options.transport,
    }
    for name in ("raised", "shrunk", "reduced"):
        line[f"{name}_s"] = sorted(one[name] for one in trials)
        print(f"{name:8} median {statistics.median(line[f'{name}_s']) * 1e3:7.1f} ms, "
              f"slowest {line[f'{name}_s'][-1] * 1e3:7.1f} ms")  # fmt: skip
    keep(options.records, facts, [line])
