"""``in_group``: ranks of an initialised torch.distributed, as processes or as threads."""

import tempfile
import threading
from collections.abc import MutableMapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import dpcore
from dpcore._autoload import register
from dpcore.comm.launch import session, torch_backend
from dpcore.comm.launch.torch_backend import BackendOptions


def in_group(
    body,
    world,
    *args,
    backend="dpcore",
    timeout=60.0,
    debug="OFF",
    device=None,
    uuids=None,
    pg_options=None,
    **options,
):
    """Runs ``body(*args)`` on every rank; the results in rank order.

    Without ``device`` ranks are processes, of any backend. With it ("nccl", "cuda", "auto", "" or a
    function of the rank) they are threads over dpcore's backend, each with a device of the host
    (with the names ``uuids``), and tensors on the CPU count as tensors of that device: the bodies
    for CPU tensors run over the part that is for GPUs. More options go to that of the backend.
    """
    member = partial(_member, body, args, backend, timeout, debug)
    if device is None:
        with tempfile.TemporaryDirectory() as folder:
            return dpcore.spawn(member, world, {"init_method": f"file://{Path(folder) / 'store'}"})

    store = dist.HashStore()

    def with_a_device(comm):
        wanted = device(comm.rank) if callable(device) else device
        uuid = f"gpu {comm.rank}" if uuids is None else uuids[comm.rank]
        chosen = pg_options or BackendOptions(wanted, _host_uuid=uuid, **options)
        return member(comm, {"store": store, "pg_options": chosen}, told=True)

    with _a_world_for_every_thread():
        return dpcore.spawn(with_a_device, world, mode="threads", timeout=timeout)


def _member(body, args, backend, timeout, debug, comm, rendezvous, told=False):
    """What a rank does. ``told``: the others are told when it fails; they see a process end."""
    rank, world = comm.rank, comm.world_size
    dpcore.finalize()  # DataParallel would take it
    register()
    dist.set_debug_level(getattr(dist.DebugLevel, debug))
    dist.init_process_group(
        backend, rank=rank, world_size=world, timeout=timedelta(seconds=timeout), **rendezvous
    )
    try:
        return body(*args)
    except BaseException:
        if told:
            dist.group.WORLD._get_backend(torch.device("cpu")).abort()
        raise
    finally:
        dist.destroy_process_group()


@contextmanager
def _a_world_for_every_thread():
    """torch keeps one for the process."""
    from torch.testing._internal.distributed import multi_threaded_pg

    before = torch_backend.meet, torch_backend._groups
    torch_backend.meet, torch_backend._groups = _meet_in_process, _OfThread()
    threaded = multi_threaded_pg._install_threaded_pg()
    if not hasattr(threaded, "comms"):
        threaded.comms = []  # torch 2.11 asks for it and forgot it in this class
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    register()
    try:
        yield
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        multi_threaded_pg._uninstall_threaded_pg()
        torch_backend.meet, torch_backend._groups = before


def _meet_in_process(store, rank, world_size, timeout):
    """As ``dpcore.comm.launch.group_store.meet``, for threads."""
    attempt = store.add(f"dpcore/attempts/{rank}", 1)
    if rank == 0:
        store.set(f"dpcore/{attempt}", f"test/{id(store)}/{attempt}")
    job = store.get(f"dpcore/{attempt}").decode()
    return session.connect(job, rank, world_size, timeout=timeout, transport="inproc")


class _OfThread(MutableMapping):
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


def all_begun(met):
    """A first collective, over on every rank of the barrier: whoever gives up now breaks nobody's
    start. What waits for a rank on purpose gets its short time limit after this."""
    dist.all_reduce(torch.ones(1), async_op=True).wait(timedelta(seconds=60))
    met.wait(60)


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
