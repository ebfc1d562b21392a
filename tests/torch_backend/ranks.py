"""Ranks of torch.distributed with a backend of choice, for tests."""

import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import dpcore
from dpcore._autoload import register


def in_group(body, world, *args, backend="dpcore", timeout=60.0, debug="OFF"):
    """Runs ``body(*args)`` on every rank of an initialised torch.distributed; the results."""

    def rank(comm, store):
        number, size = comm.rank, comm.world_size
        dpcore.finalize()
        register()
        dist.set_debug_level(getattr(dist.DebugLevel, debug))
        dist.init_process_group(
            backend,
            init_method=f"file://{store}",
            rank=number,
            world_size=size,
            timeout=timedelta(seconds=timeout),
        )
        try:
            return body(*args)
        finally:
            dist.destroy_process_group()

    with tempfile.TemporaryDirectory() as folder:
        return dpcore.spawn(rank, world, str(Path(folder) / "store"))


def error_of(work):
    """``work.exception()``. Before torch 2.13 Python cannot be given it, whatever the backend:
    there, what another ``wait()`` raises."""
    if torch.__version__ >= (2, 13):
        return work.exception()
    try:
        work.wait()
    except RuntimeError as error:
        return error
    return None
