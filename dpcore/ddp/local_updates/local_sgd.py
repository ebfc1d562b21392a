"""``LocalSGD``: the ranks' parameters become their mean every ``sync_every`` steps.

with dp.LocalSGD(module, optimizer, sync_every=16):
    for inputs, targets in loader:  # each rank reads different batches
        optimizer.zero_grad()
        loss(module(inputs), targets).backward()
        optimizer.step()  # every 16th also averages the parameters
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dpcore.ddp.local_updates.block import LocalUpdates
from dpcore.ddp.local_updates.fragments import Fragment


class LocalSGD(LocalUpdates):
    """Averages the parameters of all ranks after every ``sync_every``-th step of ``optimizer``.

    ``module``        the model itself, not a ``DataParallel``.
    ``optimizer``     an optimizer of torch for the module's parameters; if there are several, the
                      one that steps last.
    ``comm``, ``process_group``   as those of ``DataParallel``.

    >>> import torch, dpcore
    >>> comm = dpcore.init(rank=0, world_size=1)
    >>> module = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    >>> with dpcore.LocalSGD(module, optimizer, sync_every=4):
    ...     for _ in range(8):
    ...         optimizer.zero_grad()
    ...         module(torch.ones(3, 2)).sum().backward()
    ...         optimizer.step()
    >>> dpcore.finalize()
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        sync_every: int = 16,
        *,
        comm: Any = None,
        process_group: Any = None,
    ) -> None:
        super().__init__(module, optimizer, sync_every, comm, process_group)

    def _start(self, fragment: Fragment, number: int) -> Any:
        flat = self._flat[: fragment.elements]
        fragment.read(flat)
        content = self._content(number)
        return self._model_group.all_reduce(flat, "mean", async_op=True, content=content)

    def _take(self, number: int, is_late: bool) -> bool:
        self._fragments[number].write(self._flat)
        return False
