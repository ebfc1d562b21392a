"""static_graph, activation checkpointing, and outputs that unused parameters hide behind."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dpcore
from tests.data_parallel.models import (
    OPTIMIZERS,
    Small,
    assert_same_values,
    batch,
    part,
    train,
    train_alone,
)


@pytest.mark.parametrize("world", (1, 2, 3))
@pytest.mark.parametrize("as_view", (True, False))
def test_a_static_graph_trains_as_one_process(world, as_view):
    def body(comm):
        model = train(
            comm,
            OPTIMIZERS["momentum"],
            static_graph=True,
            bucket_cap_mb=0.01,
            gradient_as_bucket_view=as_view,
        )
        assert_same_values(model.module, train_alone(OPTIMIZERS["momentum"]))
        assert model.bucket_report().rebuilt
        assert model._get_ddp_logging_data()["static_graph"] == 1

    dpcore.spawn(body, world, mode="threads")


class Checkpointed(Small):
    """Layers whose forward runs again in backward; `shared` in two of them."""

    def __init__(self, seed=7, reentrant=True, more=None):
        super().__init__(seed)
        self.reentrant = reentrant
        self.unused = nn.Linear(3, 3).double() if more else None

    def forward(self, x):
        x = torch.tanh(self.norm(self.first(x)))
        for _ in range(2):
            # Ranks are threads with one generator: restoring it would disturb another's Small().
            x = checkpoint(self.once, x, use_reentrant=self.reentrant, preserve_rng_state=False)
        return self.last(x)

    def once(self, x):
        return torch.tanh(self.shared(x)) + self.frozen(x)


@pytest.mark.parametrize("world", (1, 2))
@pytest.mark.parametrize("unused", (False, True))
@pytest.mark.parametrize("schedule", ("bucketed", "per_parameter"))
def test_parameters_in_several_checkpoints_with_a_static_graph(world, unused, schedule):
    """Re-entrant: several runs of autograd within one backward bring gradients of `shared`."""

    def body(comm):
        model = dpcore.DataParallel(
            Checkpointed(seed=7 + comm.rank, more=unused),
            comm=comm,
            static_graph=True,
            schedule=schedule,
        )
        alone = Checkpointed(reentrant=False, more=unused)
        alone.load_state_dict(model.module.state_dict())
        optimizers = [OPTIMIZERS["sgd"](m.parameters()) for m in (model, alone)]
        for step in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            x, y = batch(step)
            nn.functional.mse_loss(alone(x), y).backward()
            nn.functional.mse_loss(model(part(x, comm)), part(y, comm)).backward()
            for optimizer in optimizers:
                optimizer.step()
        assert_same_values(model.module, alone)
        if unused:
            assert model.module.unused.weight.grad is None

    dpcore.spawn(body, world, mode="threads")


@pytest.mark.parametrize("reentrant", (True, False))
def test_one_checkpoint_without_a_static_graph(reentrant):
    class Once(Checkpointed):
        def forward(self, x):
            x = torch.tanh(self.norm(self.first(x)))
            return self.last(checkpoint(self.once, x, use_reentrant=self.reentrant))

    def body(comm):
        model, alone = (Once(reentrant=r) for r in (reentrant, False))
        model = dpcore.DataParallel(model, comm=comm, bucket_cap_mb=0.01)
        for step in range(3):
            model.zero_grad()
            alone.zero_grad()
            x, _ = batch(step)
            (model(part(x, comm)).square().sum() * comm.world_size).backward()
            alone(x).square().sum().backward()
            for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
                if other.grad is not None:
                    torch.testing.assert_close(mine.grad, other.grad)

    dpcore.spawn(body, 2, mode="threads")


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x, *which):
        return sum(self.branches[number](x).sum() for number in which)


def test_parameters_that_only_some_ranks_use_with_a_static_graph():
    def body(comm):
        model = dpcore.DataParallel(Branches(), comm=comm, static_graph=True)
        for _ in range(3):
            model.zero_grad()
            model(torch.ones(1, 4), *((0, 1) if comm.rank == 0 else (0,))).backward()
            assert model.module.branches[0].bias.grad.tolist() == [1.0] * 4
            assert model.module.branches[1].bias.grad.tolist() == [0.5] * 4

    dpcore.spawn(body, 2, mode="threads")


def test_a_static_graph_that_changes_is_an_error():
    def body(comm):
        model = dpcore.DataParallel(Branches(), comm=comm, static_graph=True)
        x = torch.ones(1, 4)
        model(x, 0).backward()
        with pytest.raises(dpcore.Error, match=r"branches\.1\.\w+ came though there was none"):
            model(x, 0, 1).backward()
        model = dpcore.DataParallel(Branches(), comm=comm, static_graph=True)
        model(x, 0, 1).backward()
        model(x, 0).backward()
        with pytest.raises(dpcore.Error, match=r"branches\.1\.weight.*that the first one used"):
            model(x, 0)

    dpcore.spawn(body, 1, mode="threads")


def test_setting_it_later():
    def body(comm):
        model = dpcore.DataParallel(Branches(), comm=comm)
        model._set_static_graph()
        with pytest.warns(UserWarning, match="set already"):
            model._set_static_graph()
        model(torch.ones(1, 4), 0).backward()
        assert model.module.branches[1].weight.grad is None
        late = dpcore.DataParallel(Branches(), comm=comm)
        late(torch.ones(1, 4), 0, 1).backward()
        with pytest.raises(dpcore.Error, match="before training loop starts"):
            late._set_static_graph()

    dpcore.spawn(body, 1, mode="threads")


def test_two_forwards_and_one_backward():
    def body(comm):
        model = dpcore.DataParallel(Small(), comm=comm, static_graph=True)
        alone = Small()
        for step in range(3):
            model.zero_grad()
            alone.zero_grad()
            x, _ = batch(step)
            mine = part(x, comm)
            ((model(mine).sum() + model(2 * mine).sum()) * comm.world_size).backward()
            (alone(x).sum() + alone(2 * x).sum()).backward()
            for p, q in zip(model.parameters(), alone.parameters(), strict=True):
                if q.grad is not None:
                    torch.testing.assert_close(p.grad, q.grad)

    dpcore.spawn(body, 2, mode="threads")


# ---- unused parameters behind outputs --------------------------------------------------------


@dataclasses.dataclass
class Result:
    heads: list


class Heads(nn.Module):
    """Gives the outputs of two heads, in what it was told to put them."""

    def __init__(self, form):
        super().__init__()
        self.form = form
        self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        outputs = [head(x) for head in self.heads]
        return {
            "list": outputs,
            "tuple": tuple(outputs),
            "dict": {"deep": [{"first": outputs[0]}, outputs[1]]},
        }[self.form]


def outputs_of(form, result):
    if form == "dict":
        return result["deep"][0]["first"], result["deep"][1]
    return tuple(result)


@pytest.mark.parametrize("form", ("list", "tuple", "dict"))
def test_an_output_outside_of_the_loss(form):
    """Its parameters are part of the graph and get no gradient: what they had stays."""

    def body(comm):
        model = dpcore.DataParallel(Heads(form), comm=comm, find_unused_parameters=True)
        x = torch.ones(1, 4)
        for step in range(3):
            first, second = outputs_of(form, model(x))
            (first.sum() + second.sum() if step == 1 else second.sum()).backward()
            grads = [head.bias.grad for head in model.module.heads]
            assert (grads[0] is None) == (step == 0)
            assert grads[1].tolist() == [step + 1.0] * 4
        assert grads[0].tolist() == [1.0] * 4

    dpcore.spawn(body, 2, mode="threads")


def test_outputs_in_a_dataclass_are_found():
    class Boxed(Heads):
        def forward(self, x):
            return Result([self.heads[0](x)])

    def body(comm):
        model = dpcore.DataParallel(Boxed("list"), comm=comm, find_unused_parameters=True)
        model(torch.ones(1, 4)).heads[0].sum().backward()
        assert model.module.heads[0].bias.grad.tolist() == [1.0] * 4
        assert model.module.heads[1].bias.grad is None

    dpcore.spawn(body, 2, mode="threads")


def test_a_loss_that_is_changed_in_place():
    def body(comm):
        class Loss(nn.Linear):
            def forward(self, x):
                return super().forward(x).sum()

        model = dpcore.DataParallel(Loss(2, 2), comm=comm, find_unused_parameters=True)
        loss = model(torch.ones(1, 2))
        loss /= 2
        loss.backward()
        assert model.module.bias.grad.tolist() == [0.5, 0.5]

    dpcore.spawn(body, 1, mode="threads")


def test_buckets_without_a_used_parameter_are_not_sent():
    def body(comm):
        sent = []
        for skip in (False, True):
            model = dpcore.DataParallel(
                Branches(),
                comm=comm,
                find_unused_parameters=True,
                skip_all_reduce_unused_params=skip,
                bucket_cap_mb=0,
            )
            for _ in range(3):
                model(torch.full((1, 4), float(comm.rank)), 0).backward()
            assert model.module.branches[0].weight.grad.tolist() == [[1.5] * 4] * 4
            assert model.module.branches[1].weight.grad is None
            sent.append(model._get_ddp_logging_data()["num_buckets_reduced"])
        assert sent == [4, 2]

    dpcore.spawn(body, 2, mode="threads")
