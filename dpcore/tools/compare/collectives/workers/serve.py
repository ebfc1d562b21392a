"""The command loop of a rank: one JSON line in, one JSON line out, asleep in between.

A rank between two commands blocks in a read of its socket and never inside its library, so that it
takes no processor time from the contender that measures.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import threading
from typing import Any

from dpcore.base.processes import end_with_parent
from dpcore.tools.compare.collectives.cells import Cell
from dpcore.tools.compare.collectives.leftovers import remove_own_files
from dpcore.tools.compare.collectives.workers.backend import (
    Backend,
    Place,
    Prepared,
    UnsupportedError,
)


def serve(place: Place) -> None:
    end_with_parent(os.getppid())
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    channel.connect(f"{place.job}.sock")
    threading.Thread(target=_end_with, args=(channel,), daemon=True).start()
    stream = channel.makefile("rw", encoding="utf-8")

    def answer(reply: dict[str, Any]) -> None:
        stream.write(json.dumps(reply, default=str) + "\n")
        stream.flush()

    try:
        backend = load(place)
    except Exception as error:
        answer({"error": str(error) or type(error).__name__})
        return
    answer({"rank": backend.rank, "versions": backend.versions()})
    gc.disable()  # a collection inside a timed loop would be charged to the contender
    cells: dict[str, Prepared] = {}
    for line in stream:
        command = json.loads(line)
        if command["do"] == "quit":
            cells.clear()
            backend.close()
            answer({})
            return
        try:
            answer(obey(command, backend, cells))
        except UnsupportedError as reason:
            answer({"unsupported": str(reason)})
        except Exception as error:
            answer({"error": f"rank {backend.rank}: {type(error).__name__}: {error}"})


def obey(command: dict[str, Any], backend: Backend, cells: dict[str, Prepared]) -> dict[str, Any]:
    """What `loop.py` tells the ranks. ``cells``: what is prepared so far, by variant."""
    match command["do"]:
        case "prepare":
            variant = command["variant"]
            cells[variant] = backend.prepare(variant, Cell(**command["cell"]))
            return {"wrong": cells[variant].wrong}
        case "run":
            loop = cells[command["variant"]].seconds_per_iteration
            if command["warm"]:
                loop(command["warm"])
            backend.synchronise(command["start_at"])
            return {"seconds": loop(command["iterations"])}
        case "release":
            cells.clear()  # reference counts free the buffers: a collection costs 0.1 s with torch
            return {"facts": backend.facts()}
    raise ValueError(f"unknown command {command['do']!r}")


def load(place: Place) -> Backend:
    """Imports what the group needs and nothing else: an MPI environment has no torch."""
    if place.group in ("dpcore", "dpcore-tcp"):
        from dpcore.tools.compare.collectives.workers.native import DpcoreBackend

        return DpcoreBackend.at(place, "tcp" if place.group == "dpcore-tcp" else "auto")
    if place.group == "gloo":
        from dpcore.tools.compare.collectives.workers.gloo import GlooBackend

        return GlooBackend(place)
    if place.group == "bounds":
        from dpcore.tools.compare.collectives.workers.bounds import BoundsBackend

        return BoundsBackend(place)
    if place.group == "stream":
        from dpcore.tools.compare.collectives.workers.stream import StreamBackend

        return StreamBackend(place)
    from dpcore.tools.compare.collectives.workers.mpi import MpiBackend

    return MpiBackend(place)


def _end_with(channel: socket.socket) -> None:
    """Ends this rank when the orchestrator is gone, also in the middle of a collective.

    The thread sleeps in poll() without a timeout: it costs nothing while something is measured.
    """
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLRDHUP)
    poll.poll()
    remove_own_files()
    os.kill(os.getpid(), signal.SIGKILL)
