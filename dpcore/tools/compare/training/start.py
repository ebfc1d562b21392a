"""Starts the ranks of `dpcore.tools.compare.training.worker`: on this host, or each in its own
namespace.

Within a namespace ranks have a NIC with an address, and what leaves it is shaped by the kernel: the
same TCP and queues as between two machines. Ranks are programs, as torchrun starts them, and not
``RankProcesses`` (comm/launch): those are forked, in one namespace and with torch's memory of then.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

from dpcore.errors import Error
from dpcore.tools import hosts as namespaces
from dpcore.tools.compare.training.worker import Job
from dpcore.tools.records import ROOT

PORT = 29541  # within a namespace of its own; on this host one that is free
RAW_PORT = 29542
_LAST_WORDS_SECONDS = 60.0


class RankFailed(Error):
    """A rank ended with an error; the message is what it wrote."""


@contextlib.contextmanager
def shaped_hosts(rate: str, burst: str, count: int = 2) -> Iterator[namespaces.Hosts]:
    """Hosts whose NICs send no faster than `rate`, such as "1gbit"."""
    with namespaces.hosts(count) as made:
        made.shape(rate, burst)
        yield made


def run_job(
    job: Job, on_line: Callable[[dict[str, Any]], None], hosts: namespaces.Hosts | None = None
) -> dict[str, Any]:
    """The result of rank 0. `on_line` gets what it says in between."""
    port = PORT if hosts is not None else namespaces.free_port()
    environment = {**os.environ, "WORLD_SIZE": str(job.world), "MASTER_PORT": str(port)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.getenv("PYTHONPATH")]))
    if hosts is not None:
        environment |= {"MASTER_ADDR": hosts.address(0), "RANK_1_ADDR": hosts.address(1)}
        environment |= {"GLOO_SOCKET_IFNAME": "eth0"}
    else:
        environment |= {"MASTER_ADDR": "127.0.0.1"}
    command = [sys.executable, "-m", "dpcore.tools.compare.training.worker", job.to_json()]
    result: dict[str, Any] = {}
    mistake = ""
    with contextlib.ExitStack() as stack:
        complaints = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(job.world)]
        ranks = [
            subprocess.Popen(
                command if hosts is None else hosts.inside(rank, *command),
                env=environment | {"RANK": str(rank)}, text=True,
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stderr=complaints[rank],
            )
            for rank in range(job.world)
        ]  # fmt: skip
        try:
            assert ranks[0].stdout is not None
            for text in ranks[0].stdout:
                if (line := _line(text)) is not None:
                    result = line.get("result", result)
                    mistake = line.get("error", mistake)
                    on_line(line)
            # Rank 0 has said its last word, or died; the other one may wait for it for a long time.
            with contextlib.suppress(subprocess.TimeoutExpired):
                for rank in ranks:
                    rank.wait(timeout=_LAST_WORDS_SECONDS)
        finally:
            for rank in ranks:
                if rank.poll() is None:
                    rank.kill()
                    rank.wait()
        if not result or any(rank.returncode for rank in ranks):
            if mistake:
                raise RankFailed(mistake)
            raise RankFailed(_last_words(ranks, complaints))
    return result


def _last_words(ranks: Sequence[subprocess.Popen[str]], complaints: Sequence[TextIO]) -> str:
    """What the first rank that failed by itself has said; the others failed because it was gone."""
    said = []
    for rank, file in zip(ranks, complaints, strict=True):
        file.seek(0)
        text = file.read()[-4000:]
        if rank.returncode > 0 and text and "PeerLost" not in text:
            return text
        said.append(text)
    return next(filter(None, said), "it said nothing")


def _line(text: str) -> dict[str, Any] | None:
    """What a rank reports; a model may print what it likes."""
    if not text.startswith("{"):
        return None
    try:
        return dict(json.loads(text))
    except ValueError:
        return None
