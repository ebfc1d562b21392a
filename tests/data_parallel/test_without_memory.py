"""Parameters and gradients whose elements lie in no memory."""

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import dpcore


def wrapped(comm, module, **options):
    return dpcore.DataParallel(module, comm=comm, **options)


def test_parameters_and_buffers_without_memory_are_refused_by_name():
    def body(comm):
        freed = nn.Linear(2, 2)
        freed.weight.untyped_storage().resize_(0)
        doubled = nn.Linear(2, 2)
        doubled.weight = nn.Parameter(TwoTensor(torch.ones(2, 2), torch.ones(2, 2)))
        buffered = nn.BatchNorm1d(2)
        buffered.running_mean.untyped_storage().resize_(0)
        for module, message in (
            (freed, "weight: .*memory was freed"),
            (doubled, "weight: .*TwoTensor"),
            (buffered, "running_mean: .*memory was freed"),
        ):
            with pytest.raises(dpcore.Unsupported, match=message):
                wrapped(comm, module)
        module = nn.Linear(2, 2)
        module.register_buffer("others", torch.ones(2))
        module.others.untyped_storage().resize_(0)
        module._ddp_params_and_buffers_to_ignore = ["others"]
        wrapped(comm, module)

    dpcore.spawn(body, 2, mode="threads")


@pytest.mark.parametrize("view", [True, False])
def test_an_efficient_zero_tensor_is_a_gradient_of_zeros(view):
    """torch DDP takes it too, with gradient_as_bucket_view=True only."""

    def body(comm):
        module = nn.Linear(2, 1, bias=False)
        if comm.rank == 1:
            module.weight.register_hook(lambda grad: torch._efficientzerotensor(grad.shape))
        model = wrapped(comm, module, gradient_as_bucket_view=view)
        for _ in range(3):
            model(torch.tensor([[2.0, 4.0]])).sum().backward()
            assert module.weight.grad.tolist() == [[1.0, 2.0]]
            model.zero_grad()

    dpcore.spawn(body, 2, mode="threads")
