"""``warm_memory``: large tensors on the CPU get memory that was used before.

malloc gives a block of more than 32 MiB back to the kernel when its tensor goes, and the next
tensor of that size is faulted in and zeroed page by page. With large layers that is up to a third
of a training step. Here such blocks wait for the next tensor of their size (csrc/tensors).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dpcore import _C


@contextmanager
def warm_memory() -> Iterator[None]:
    """Keeps the memory of tensors of 1 MiB and more on the CPU for the next ones, in all threads.

    Any training on a CPU may use it, with or without ``DataParallel``. The price is memory: what is
    kept and what is in use are together at most 1.5 times what was in use at once in the last
    seconds, and blocks that were not needed in that time go back. At the end of the block
    everything goes back that no tensor holds.

    >>> import torch, dpcore as dp
    >>> model = torch.nn.Linear(1024, 1024)
    >>> with dp.warm_memory():
    ...     for _ in range(3):
    ...         model.zero_grad()
    ...         model(torch.ones(2, 1024)).sum().backward()
    """
    opened = _C.WarmMemory()
    try:
        yield
    finally:
        opened.close()
