"""Wrappers within wrappers: refused for the same parameters, fine for different ones."""

import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dpcore
from tests.data_parallel.test_groups import over_gloo

PAIRS = (
    (DistributedDataParallel, dpcore.DataParallel),
    (dpcore.DataParallel, DistributedDataParallel),
    (dpcore.DataParallel, dpcore.DataParallel),
)


def check_refusal(outer, inner):
    """What accelerate's prepare() does to a model that is wrapped already."""
    module = nn.Linear(2, 1)
    with pytest.raises(
        dpcore.Unsupported, match=r"averages (module\.)?weight.*Wrap the model once"
    ):
        outer(inner(module))(torch.ones(1, 2))


def two_parts(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))


def train(model, parameters, share):
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    x = torch.arange(12.0).view(4, 3)
    for _ in range(3):
        optimizer.zero_grad()
        model(x[share]).square().mean().backward()
        optimizer.step()


def check_different_parameters(outer, inner, left_to_outer=()):
    rank = dist.get_rank()
    ignore = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    module = two_parts(seed=rank)
    names = [f"1.module.{name}" for name, _ in module[1].named_parameters()]
    ignore(module[1], left_to_outer)
    module[1] = inner(module[1])
    ignore(module, [name for name in names if name.split(".")[-1] not in left_to_outer])
    model = outer(module)
    train(model, module.parameters(), slice(2 * rank, 2 * rank + 2))
    whole = two_parts(seed=0)
    train(whole, whole.parameters(), slice(0, 4))
    for mine, other in zip(module.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine, other)


def test_nested_wrappers():
    """torch: the same parameters are averaged twice, without a word."""

    def body():
        for outer, inner in PAIRS:
            check_refusal(outer, inner)
            check_different_parameters(outer, inner)
        # torch's own reducer knows the weight of a Linear as ".weight", and never ignores it.
        check_different_parameters(dpcore.DataParallel, dpcore.DataParallel, ["weight"])

    over_gloo(body, 2)


def test_a_model_may_be_wrapped_again_when_the_wrapper_is_not_part_of_it():
    def body(comm):
        module = nn.Linear(2, 1)
        dpcore.DataParallel(module, comm=comm)
        model = dpcore.DataParallel(module, comm=comm)
        model(torch.ones(1, 2)).sum().backward()
        return module.weight.grad.tolist()

    assert dpcore.spawn(body, 2, mode="threads") == [[[1.0, 1.0]]] * 2


@pytest.mark.parametrize("shared", [False, True])
def test_forwards_of_two_threads_leave_no_model_behind(shared):
    """torch's class says which model runs. The second thread saw the first one's there, and put it
    back when the first one's forward was over."""

    class Waits(nn.Linear):
        def __init__(self, steps):
            super().__init__(2, 1)
            self.steps = steps  # of each forward: it says that it has begun, and waits

        def forward(self, x):
            entered, may_end = next(self.steps)
            entered.set()
            assert may_end.wait(20)
            return super().forward(x)

    def body(comm):
        first, second, over = (threading.Event() for _ in range(3))
        steps = iter([(first, second), (second, over)])
        model = dpcore.DataParallel(Waits(steps), comm=comm)
        other = model if shared else dpcore.DataParallel(Waits(steps), comm=comm)
        threads = [
            threading.Thread(target=torch.no_grad()(each), args=(torch.ones(1, 2),))
            for each in (model, other)
        ]
        threads[0].start()
        assert first.wait(20)
        threads[1].start()
        threads[0].join()
        over.set()
        threads[1].join()
        return DistributedDataParallel._active_ddp_module is None

    assert dpcore.spawn(body, 1) == [True]
