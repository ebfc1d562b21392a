"""Ranks as threads of this process that talk over TCP: what goes wrong with connections, without
the seconds that processes take to start."""

import threading
import uuid

from dpcore import _C
from dpcore.comm.launch import session


def over_tcp(body, world=2, timeout=30.0):
    """What ``body(comm)`` returned on each rank, or the exception that it raised there.

    Communicators are dropped, not closed, unless the body closes them.
    """
    job = f"over-tcp-{uuid.uuid4().hex}"
    listener = _C.TcpListener.at("127.0.0.1:0")
    address = listener.address
    results = [None] * world

    def run(rank):
        tcp = _C.TcpOptions(address, listener if rank == 0 else None, "", "", 1)
        try:
            results[rank] = body(
                session.connect(job, rank, world, timeout=timeout, transport="inproc", tcp=tcp)
            )
        except Exception as problem:
            results[rank] = problem.with_traceback(None)  # its frames hold the communicator

    ranks = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return results
