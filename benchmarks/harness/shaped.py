"""Ranks on hosts of their own (network namespaces) whose NICs the kernel shapes, both ways.

``on_hosts`` runs a function on every rank and returns what the ranks returned, and the goodput that
one raw TCP stream from each host to its right neighbour reached, all at once: that of the fastest
of several transfers before and after.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from dpcore.tools.hosts import burst_of
from dpcore.tools.records import ROOT

PORT, RAW_PORT = 29547, 29548
CARD = "eth0"  # of a namespace
RAW_SECONDS = 1.0
RAW_TRANSFERS = 3  # in one connection: the first one also finds out how fast the link is


def on_hosts(
    body: Callable[..., Any], world: int, rate: str, bytes_per_second: float, **arguments: Any
) -> tuple[list[Any], float]:
    """``body(comm, **arguments)`` returns something that JSON can hold."""
    from dpcore.tools import hosts as namespaces

    with namespaces.hosts(world) as made:
        made.shape(rate, burst_of(rate), both_ways=True)
        task = {
            "body": [_module_of(body), body.__name__],
            "arguments": arguments,
            "addresses": [made.address(host) for host in range(world)],
            "raw_bytes": int(bytes_per_second * RAW_SECONDS),
        }
        script = "from benchmarks.harness.shaped import serve; serve()"
        told = {"WORLD_SIZE": str(world), "SHAPED_TASK": json.dumps(task)}
        told |= {"GLOO_SOCKET_IFNAME": CARD, "DPCORE_SOCKET_IFNAME": CARD}
        ranks = [
            made.start(host, script, told | {"RANK": str(host)}, stderr=None, cwd=ROOT)
            for host in range(world)
        ]
        said = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise subprocess.SubprocessError("a rank failed; its error stands above")
    results = [json.loads(text.splitlines()[-1]) for text in said]
    return [r["result"] for r in results], min(r["goodput"] for r in results)


def _module_of(body: Callable[..., Any]) -> str:
    """Its name for an import, also of the program that runs."""
    spec = getattr(sys.modules[body.__module__], "__spec__", None)
    return spec.name if spec else body.__module__


def serve() -> None:
    """What a rank runs."""
    import torch

    import dpcore as dp

    torch.set_num_threads(1)
    task = json.loads(os.environ["SHAPED_TASK"])
    module, name = task["body"]
    body = getattr(importlib.import_module(module), name)
    addresses = task["addresses"]
    meeting = f"tcp://{addresses[0]}:{PORT}"
    comm = dp.init(transport="tcp", init_method=meeting, timeout=120)
    goodput = raw_goodput(comm, addresses, task["raw_bytes"])
    result = body(comm, **task["arguments"])
    goodput = max(goodput, raw_goodput(comm, addresses, task["raw_bytes"]))
    dp.finalize()
    print(json.dumps({"goodput": goodput, "result": result}))


def raw_goodput(comm: Any, addresses: list[str], nbytes: int) -> float:
    """Bytes per second of a stream to the right neighbour, while one comes from the left: of the
    fastest transfer."""
    listener = socket.create_server((addresses[comm.rank], RAW_PORT))
    comm.barrier()
    right = socket.create_connection((addresses[(comm.rank + 1) % comm.world_size], RAW_PORT))
    left = listener.accept()[0]
    data, buffer = bytes(nbytes), bytearray(1 << 20)
    seconds = []
    for _ in range(RAW_TRANSFERS):
        comm.barrier()
        begin = time.perf_counter()
        sender = threading.Thread(target=right.sendall, args=(data,))
        sender.start()
        have = 0
        while have < nbytes:
            have += left.recv_into(buffer)
        seconds.append(time.perf_counter() - begin)
        sender.join()
    comm.barrier()
    for opened in (left, right, listener):
        opened.close()
    return nbytes / min(seconds)
