"""Averages gradients that are sparse tensors (embeddings with ``sparse=True``).

Ranks touch different rows, so each rank gathers the indices and values of all ranks, one after the
other. Rows that several ranks have are added in rank order when the list is coalesced. The cost is
that of the rows of all ranks, so a dense gradient is cheaper if most rows are used.
"""

from __future__ import annotations

import torch

from dpcore.comm.communicators.protocol import GradientGroup
from dpcore.comm.communicators.read_back import numbers_in


@torch.no_grad()
def average_sparse(group: GradientGroup, parameter: torch.Tensor, scale: float = 1.0) -> None:
    """Replaces ``parameter.grad`` by ``scale`` times the average. A rank without a gradient
    contributes nothing and also gets it. If no rank has one, nothing changes."""
    grad = parameter.grad
    if grad is not None:
        grad = (grad if grad.is_sparse else grad.to_sparse(1)).coalesce()
    rows = 0 if grad is None else grad.indices().shape[1]
    device = parameter.device
    facts = torch.empty(2 * group.world_size, dtype=torch.int64, device=device)
    group.all_gather(facts, torch.tensor([rows, int(grad is not None)], device=device))
    numbers = numbers_in(facts, group)
    counts, present = numbers[::2], numbers[1::2]
    if not any(present):
        return
    width = parameter[0].numel()
    if grad is None:
        indices = torch.empty(0, dtype=torch.int64, device=device)
        values = torch.empty(0, dtype=parameter.dtype, device=device)
    else:
        indices = grad.indices()[0].contiguous()
        values = grad.values().reshape(-1).contiguous()
    total = sum(counts)
    all_indices = torch.empty(total, dtype=torch.int64, device=device)
    all_values = torch.empty(total * width, dtype=parameter.dtype, device=device)
    group.all_gather(all_indices, indices, sizes=counts)
    group.all_gather(all_values, values, sizes=[count * width for count in counts])
    parameter.grad = torch.sparse_coo_tensor(
        all_indices.unsqueeze(0),
        all_values.view(total, *parameter.shape[1:]) / (group.world_size / scale),
        parameter.shape,
        check_invariants=False,
    ).coalesce()
