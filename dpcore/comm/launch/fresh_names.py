"""Ranks with a store of torch.distributed agree there on a name that no other meeting has.

A store may outlive the ranks: the agents of torchrun keep theirs over a restart, whose ranks find
all that the ranks before have written. So a rank asks for the name with a word of its own, and
rank 0 answers that word. What it answers to ranks that have ended is never read.
"""

from __future__ import annotations

import json
import time
import uuid
from datetime import timedelta
from typing import Any

from dpcore.comm.communicators.work import LONGEST_SECONDS
from dpcore.errors import RendezvousError

_LOOK_SECONDS = (0.0005, 0.02)  # while ranks come, and where none has come for long
_GRACE_SECONDS = 1.0  # for rank 0 to say at its own deadline who is missing


def agree(
    store: Any, rank: int, world_size: int, timeout: float, host: str = ""
) -> tuple[str, list[str]]:
    """The name, and what every rank gave as its ``host``.

    All ranks call it, and none leaves before all have come.
    """
    deadline = time.monotonic() + min(timeout, LONGEST_SECONDS)
    try:
        if rank == 0:
            return _answer(store, world_size, deadline, host)
        return _ask(store, rank, deadline + _GRACE_SECONDS, host)
    except RendezvousError:
        raise
    except Exception as error:  # torch raises RuntimeErrors of several kinds
        raise RendezvousError(f"rank {rank}: the store of the ranks fails: {error}") from error


def _answer(store: Any, world_size: int, deadline: float, host: str) -> tuple[str, list[str]]:
    name = uuid.uuid4().hex
    hosts = {0: host}
    answered: dict[int, bytes] = {}
    pause = _LOOK_SECONDS[0]
    while len(hosts) < world_size and time.monotonic() < deadline:
        before = len(hosts) + len(answered)
        for rank in set(range(world_size)) - set(hosts):
            asked = store.get(_asks(rank)) if store.check([_asks(rank)]) else None
            # Looked at after the question: a rank that is here may ask for the next meeting.
            if store.check([f"dpcore/{name}/{rank}"]):
                hosts[rank] = store.get(f"dpcore/{name}/{rank}").decode()
            elif asked is not None and asked != answered.get(rank):
                store.set(f"dpcore/answers/{asked.decode()}", name)
                answered[rank] = asked
        came = len(hosts) + len(answered) > before
        pause = _LOOK_SECONDS[0] if came else min(2 * pause, _LOOK_SECONDS[1])
        if len(hosts) < world_size:
            time.sleep(pause)
    problem = ""
    if len(hosts) < world_size:
        missing = ", ".join(str(rank) for rank in range(world_size) if rank not in hosts)
        problem = f"{len(hosts)} of {world_size} ranks came; missing: {missing}"
    in_order = [text for _, text in sorted(hosts.items())]
    store.set(f"dpcore/{name}/outcome", json.dumps([in_order, problem]))
    if problem:
        raise RendezvousError(f"rank 0: {problem}")
    return name, in_order


def _ask(store: Any, rank: int, deadline: float, host: str) -> tuple[str, list[str]]:
    asked = uuid.uuid4().hex
    store.set(_asks(rank), asked)
    name = _wait(store, f"dpcore/answers/{asked}", rank, deadline)
    store.set(f"dpcore/{name}/{rank}", host)
    hosts, problem = json.loads(_wait(store, f"dpcore/{name}/outcome", rank, deadline))
    if problem:
        raise RendezvousError(f"rank {rank}: told by rank 0: {problem}")
    return name, hosts


def _wait(store: Any, key: str, rank: int, deadline: float) -> str:
    patience = timedelta(seconds=max(0.001, deadline - time.monotonic()))
    try:
        store.wait([key], patience)
    except Exception as error:
        raise RendezvousError(
            f"rank {rank}: rank 0 did not come to the store of the ranks before the deadline: "
            f"{error}"
        ) from error
    return bytes(store.get(key)).decode()


def _asks(rank: int) -> str:
    return f"dpcore/asks/{rank}"
