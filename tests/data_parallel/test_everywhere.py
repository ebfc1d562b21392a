"""Every feature in worlds of 1 to 4, over our communicator, deterministic, and over Gloo."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel.distributed import _BufferCommHookLocation, _MixedPrecision

import dpcore
from tests.data_parallel.models import (
    OPTIMIZERS,
    Small,
    assert_same_values,
    batch,
    seeded,
    train_alone,
)
from tests.data_parallel.test_groups import over_gloo
from tests.data_parallel.test_join import alone as joined_alone
from tests.data_parallel.test_join import inputs_of, loss_of
from tests.data_parallel.test_join import step as plain_step
from tests.data_parallel.test_precision import Counts
from tests.data_parallel.test_static_graph import Checkpointed


class Ranks:
    """This rank, the number of ranks, and how to wrap a module for them."""

    def __init__(self, rank, world, **options):
        self.rank, self.world, self.options = rank, world, options

    def wrap(self, module=None, **options):
        module = module or Small(seed=7 + self.rank)
        return dpcore.DataParallel(module, **{"bucket_cap_mb": 0.01, **self.options, **options})

    def part(self, tensor):
        return tensor.chunk(self.world)[self.rank]

    def meet(self):
        comm = self.options["comm"]
        dist.barrier(comm) if isinstance(comm, dist.ProcessGroup) else comm.barrier()


def train(ranks, model):
    optimizer = OPTIMIZERS["momentum"]([p for p in model.parameters() if p.requires_grad])
    for step in range(4):
        x, y = map(ranks.part, batch(step))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return model.module


def alone(make=Small):
    return train_alone(OPTIMIZERS["momentum"], steps=4, model=make())


def options_that_change_nothing(ranks):
    for options in (
        {},
        {"gradient_as_bucket_view": False},
        {"gradient_as_bucket_view": False, "batched_grad_copy": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
        {"bucket_cap_mb": None, "bucket_cap_mb_list": [0.001, 0.005]},
        {"bucket_cap_mb": "auto"},
        {"schedule": "sequential"},
        {"schedule": "per_parameter"},
        {"schedule": "flat"},
    ):
        assert_same_values(train(ranks, ranks.wrap(**options)), alone())


def a_hook_of_torch(ranks):
    model = ranks.wrap()
    model.register_comm_hook(model.process_group, default_hooks.allreduce_hook)
    assert_same_values(train(ranks, model), alone())


def an_optimizer_in_backward(ranks):
    module = Small(seed=7 + ranks.rank)
    trained = [p for p in module.parameters() if p.requires_grad]
    _apply_optimizer_in_backward(torch.optim.SGD, trained, {"lr": 0.1})
    model = ranks.wrap(module)
    for step in range(4):
        x, y = map(ranks.part, batch(step))
        nn.functional.mse_loss(model(x), y).backward()
    assert_same_values(module, train_alone(OPTIMIZERS["sgd"], steps=4))


def checkpoints(ranks):
    assert_same_values(
        train(ranks, ranks.wrap(Checkpointed(7 + ranks.rank), static_graph=True)),
        alone(Checkpointed),
    )


def accumulation(ranks):
    model, reference = ranks.wrap(), Small()
    for number in range(2):
        model.zero_grad()
        reference.zero_grad()
        with model.no_sync():
            model(ranks.part(batch(number)[0])).mean().backward()
        model(ranks.part(batch(number + 5)[0])).mean().backward()
        for whole in (batch(number)[0], batch(number + 5)[0]):
            reference(whole).mean().backward()
        for mine, other in zip(model.module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad)


def uneven_inputs(ranks):
    model = ranks.wrap()
    with model.join(divide_by_initial_world_size=False):
        for x in inputs_of(ranks.rank):
            loss_of(model, x).backward()
            plain_step(model)
    assert_same_values(model.module, joined_alone(ranks.world, by_all=False))


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(2, 1, bias=False).double() for _ in range(5))
        for branch in self.branches:
            nn.init.ones_(branch.weight)

    def forward(self, x, number):
        return self.branches[number](x)


def branches_of_their_own(ranks):
    """Each rank uses another parameter; the fifth is used by none."""
    model = ranks.wrap(seeded(Branches), find_unused_parameters=True)
    for _ in range(2):
        model.zero_grad()
        model(torch.full((1, 2), 1.0 + ranks.rank).double(), ranks.rank).sum().backward()
        for number, branch in enumerate(model.module.branches):
            if number < ranks.world:
                assert branch.weight.grad.tolist() == [[(1.0 + number) / ranks.world] * 2]
            else:
                assert branch.weight.grad is None


def one_left_out(ranks):
    """Without the flag, that is an error with the name of the parameter on every rank."""
    model = ranks.wrap(seeded(Branches))
    model(torch.ones(1, 2).double(), 0).sum().backward()
    with pytest.raises(RuntimeError, match=r"branches\.1\.weight"):
        ranks.meet()  # all have made their models; the first error also ends what a rank does here
        model(torch.ones(1, 2).double(), 0)


def narrow_forward(ranks):
    narrow = torch.bfloat16
    model = ranks.wrap(
        seeded(lambda: nn.Linear(3, 2)), mixed_precision=_MixedPrecision(narrow, narrow, narrow)
    )
    wide = copy.deepcopy(model.module)
    inputs = [torch.full((2, 3), 1.0 + rank) for rank in range(ranks.world)]
    model(inputs[ranks.rank]).sum().backward()
    (sum(wide(x).sum() for x in inputs) / ranks.world).backward()
    for mine, other in zip(model.module.parameters(), wide.parameters(), strict=True):
        assert mine.grad.dtype == torch.float32
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-2, atol=0)


def delayed(ranks):
    module = Small()
    held_back = [("last.weight", module.last.weight), ("last.bias", module.last.bias)]
    model = ranks.wrap(
        module,
        delay_all_reduce_named_params=held_back,
        param_to_hook_all_reduce=module.first.weight,
        **({} if "comm" in ranks.options else {"process_group": dist.group.WORLD}),
    )
    assert_same_values(train(ranks, model), alone())


def normalisation(ranks):
    for bias in (True, False):
        normalises(ranks, bias)


def normalises(ranks, bias):
    whole = nn.BatchNorm1d(6).double()
    if not bias:
        whole.register_parameter("bias", None)  # SyncBatchNorm(bias=False)
    module = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(whole))
    model = ranks.wrap(module)
    x = batch(0)[0]
    model(ranks.part(x)).square().mean().backward()
    whole(x).square().mean().backward()
    for mine, other in zip(module.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
    for mine, other in zip(module.buffers(), whole.buffers(), strict=True):
        torch.testing.assert_close(mine, other)


def buffers(ranks):
    """Rank 0's, then by a hook the sum of all."""

    def add_up(group, named):
        return [dist.all_reduce(named["count"], group=group, async_op=True).get_future()]

    model = ranks.wrap(Counts())
    for step in (0.0, 1.0):
        model(torch.tensor([ranks.rank + 1.0])).backward()
        assert model.module.count.item() == step + ranks.rank + 1
    model = ranks.wrap(Counts())
    model._register_buffer_comm_hook(
        model.process_group, add_up, _BufferCommHookLocation.POST_FORWARD
    )
    model(torch.tensor([ranks.rank + 1.0])).backward()
    assert model.module.count.item() == sum(range(ranks.world + 1))


def sparse(ranks):
    module = seeded(lambda: nn.Embedding(10, 2, sparse=True).double())
    model = ranks.wrap(module)
    model(torch.tensor([ranks.rank, 9])).sum().backward()
    wanted = torch.zeros(10, 2, dtype=torch.float64)
    wanted[: ranks.world], wanted[9] = 1 / ranks.world, 1.0
    torch.testing.assert_close(module.weight.grad.to_dense(), wanted)


def unequal_batches(ranks):
    """Rank r has r + 1 samples, and the mean is over all of them."""
    model, reference = ranks.wrap(), Small()
    counts = range(1, ranks.world + 1)
    x, y = batch(0, sum(counts))
    nn.functional.mse_loss(reference(x), y).backward()
    x, y = (whole.split(list(counts))[ranks.rank] for whole in (x, y))
    with model.weighted(len(x)):
        nn.functional.mse_loss(model(x), y).backward()
    for mine, other in zip(model.module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def a_difference_of_the_last_rank(ranks):
    model = ranks.wrap()
    optimizer = OPTIMIZERS["adamw"](model.module.parameters())
    assert dpcore.check(model, optimizer)
    with torch.no_grad():
        model.module.last.bias[1] += 0.5 if ranks.rank == ranks.world - 1 else 0.0
    found = dpcore.check(model, optimizer)
    assert bool(found) == (ranks.world == 1)
    if not found:
        (difference,) = found.differences
        assert difference.ranks == (ranks.world - 1,)
        assert "in 1 of 3 elements, by up to 0.5; equal after step 0" in difference.text


FEATURES = (
    options_that_change_nothing,
    a_hook_of_torch,
    an_optimizer_in_backward,
    checkpoints,
    accumulation,
    uneven_inputs,
    branches_of_their_own,
    narrow_forward,
    delayed,
    normalisation,
    buffers,
    sparse,
    unequal_batches,
    a_difference_of_the_last_rank,
    one_left_out,  # ends the group
)


def all_features(ranks):
    for feature in FEATURES:
        try:
            feature(ranks)
        except Exception as error:
            raise AssertionError(f"{feature.__name__} on rank {ranks.rank}") from error
    return len(FEATURES)


@pytest.mark.parametrize("world", (1, 2, 3, 4))
@pytest.mark.parametrize("deterministic", (False, True), ids=("native", "deterministic"))
def test_every_feature_over_our_communicator(world, deterministic):
    def body(comm):
        options = {"comm": comm, "deterministic": deterministic}
        return all_features(Ranks(comm.rank, comm.world_size, **options))

    assert dpcore.spawn(body, world, mode="threads") == [len(FEATURES)] * world


@pytest.mark.parametrize("world", (1, 2, 3, 4))
def test_every_feature_over_a_group_of_torch(world):
    def body():
        options = {"comm": dist.group.WORLD}
        return all_features(Ranks(dist.get_rank(), dist.get_world_size(), **options))

    results = over_gloo(body, world)
    assert results == [len(FEATURES)] * world
