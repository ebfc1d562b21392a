"""Tests that need a GPU: the bodies of tests/comm and tests/cuda_host, on one."""

import os

import pytest
import torch

# Ranks that are threads of one process: their streams must not queue behind each other's waits.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
# Nor may the first launch of a kernel load it, which waits for the whole device. The driver reads
# this when it starts, here. Ranks that are processes wait for themselves only, and start sooner
# without.
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
if HAS_GPU := torch.cuda.is_available():
    torch.cuda.init()  # or the context, made later, would read the next value
os.environ["CUDA_MODULE_LOADING"] = "LAZY"


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/cuda/" in item.path.as_posix() and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="torch sees no GPU"))


@pytest.fixture
def comm():
    """A world of one over NCCL on the first GPU: what one GPU is enough for."""
    import dpcore

    communicator = dpcore.init("nccl", rank=0, world_size=1, device="cuda:0")
    yield communicator
    dpcore.finalize()
