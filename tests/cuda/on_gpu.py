"""``OnGpu``: a communicator for GPUs that takes CPU tensors, so that the CPU's bodies run over it.

Views stay views: the whole storage of a tensor goes to the GPU and comes back."""

import os

import torch

from dpcore.comm.communicators.nccl import nccl_library

GPUS = torch.cuda.device_count()
# A world over NCCL that one GPU is enough for, beside a world of one.
SHARES_GPU = (
    os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    and GPUS > 0
    and tuple(map(int, (nccl_library()["version"] or "0").split("."))) >= (2, 30, 3)
)
NEEDS = "GPUs (two ranks share one with NCCL 2.30.3 and NCCL_MULTI_RANK_GPU_ENABLE=1)"


def has_room_for(world):
    """Whether ranks over NCCL find GPUs: one each, or one for two of them."""
    return world <= GPUS or (world == 2 and SHARES_GPU)


def use_gpu_of(rank):
    """The GPU with the rank's number, or the one that all share; it is current from here on."""
    device = torch.device("cuda", rank % GPUS)
    torch.cuda.set_device(device)
    return device


def settle():
    """Waits for what this rank has asked for, and not for the device, which another rank of this
    process may hold up. Before the host reads a result or writes a tensor: what waits within the
    driver, as a copy to ordinary memory does, lets no other rank of the process allocate."""
    torch.cuda.current_stream().synchronize()


class OnGpu:
    def __init__(self, comm):
        self._comm = comm
        self.rank, self.world_size = comm.rank, comm.world_size

    def empty(self, *shape, dtype=None):
        return torch.empty(*shape, dtype=dtype)

    def __getattr__(self, name):
        method = getattr(self._comm, name)

        def call(*arguments, **options):
            moved = {}
            work = method(*(self._moved(x, moved) for x in arguments), **options)
            if work is None:
                self._bring_back(moved)
            return work if work is None else _Pending(self, work, moved)

        return call

    def _moved(self, value, moved):
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage()
        key = storage.data_ptr()
        if key not in moved:
            on_gpu = torch.empty(storage.nbytes(), dtype=torch.uint8, device=self._comm.device)
            on_gpu.copy_(_bytes_of(storage))
            moved[key] = (storage, on_gpu.untyped_storage())
        on_gpu = torch.empty(0, dtype=value.dtype, device=self._comm.device)
        return on_gpu.set_(moved[key][1], value.storage_offset(), value.shape, value.stride())

    def _bring_back(self, moved):
        settle()
        # By tensors, whose copies let go of Python's lock: other ranks are threads that need it.
        for on_host, on_gpu in moved.values():
            _bytes_of(on_host).copy_(_bytes_of(on_gpu))


def _bytes_of(storage):
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class _Pending:
    def __init__(self, owner, work, moved):
        self._owner, self._work, self._moved = owner, work, moved

    def wait(self, timeout=None):
        self._work.wait(timeout)
        self._owner._bring_back(self._moved)
