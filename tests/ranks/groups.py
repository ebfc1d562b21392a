"""``in_device_group``: ranks of torch.distributed that are threads, each with a device of the host.

Tensors on the CPU count as tensors of that device, so the bodies for CPU tensors run over the part
of the backend that is for GPUs. torch keeps a world for the process; here every thread has one."""

import threading
from collections.abc import MutableMapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg

import dpcore
from dpcore._autoload import register
from dpcore.launch import session
from dpcore.torch_backend import Options
from dpcore.torch_backend import backend as torch_backend


class OfThread(MutableMapping):
    """A dict per thread: ranks are threads, and their groups have the same names."""

    def __init__(self):
        self._local = threading.local()

    def _own(self):
        return self._local.__dict__.setdefault("entries", {})

    def __getitem__(self, key):
        return self._own()[key]

    def __setitem__(self, key, value):
        self._own()[key] = value

    def __delitem__(self, key):
        del self._own()[key]

    def __iter__(self):
        return iter(self._own())

    def __len__(self):
        return len(self._own())


def meet_in_process(store, rank, world_size, timeout):
    """As ``dpcore.launch.group_store.meet``, for threads."""
    attempt = store.add(f"dpcore/attempts/{rank}", 1)
    if rank == 0:
        store.set(f"dpcore/{attempt}", f"test/{id(store)}/{attempt}")
    job = store.get(f"dpcore/{attempt}").decode()
    return session.connect(job, rank, world_size, timeout=timeout, transport="inproc")


def in_device_group(
    body, world, *args, cuda="nccl", uuids=None, timeout=30.0, pg_options=None, **options
):
    """Runs ``body(*args)`` on every rank of an initialised torch.distributed; the results. ``cuda``
    may be a function of the rank."""
    before = torch_backend.meet, torch_backend._groups
    torch_backend.meet, torch_backend._groups = meet_in_process, OfThread()
    threaded = multi_threaded_pg._install_threaded_pg()
    if not hasattr(threaded, "comms"):
        threaded.comms = []  # torch 2.11 asks for it and forgot it in this class
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    store = dist.HashStore()
    register()

    def rank_main(comm):
        rank = comm.rank
        dpcore.finalize()  # DataParallel would take it
        uuid = f"gpu {rank}" if uuids is None else uuids[rank]
        wanted = cuda(rank) if callable(cuda) else cuda
        dist.init_process_group(
            "dpcore",
            store=store,
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout),
            pg_options=pg_options or Options(wanted, _host_uuid=uuid, **options),
        )
        try:
            result = body(*args)
        except BaseException:
            dist.group.WORLD._get_backend(torch.device("cpu")).abort()  # let nobody wait
            raise
        finally:
            dist.destroy_process_group()
        return result

    try:
        return dpcore.spawn(rank_main, world, mode="threads", timeout=timeout)
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        multi_threaded_pg._uninstall_threaded_pg()
        torch_backend.meet, torch_backend._groups = before


def all_begun(met):
    """A first collective, over on every rank of the barrier: whoever gives up now breaks nobody's
    start. What waits for a rank on purpose gets its short time limit after this."""
    dist.all_reduce(torch.ones(1), async_op=True).wait(timedelta(seconds=60))
    met.wait(60)
