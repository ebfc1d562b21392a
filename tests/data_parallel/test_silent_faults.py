"""What torch DDP does without a word, and is an error here, each with what torch does."""

import pytest
import torch
from torch import nn

import dpcore
from tests.data_parallel.models import Small, batch, part


class Branches(nn.Module):
    """Uses the branches that it is told."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x, *which):
        x = self.trunk(x)
        return sum(self.branches[number](x).sum() for number in which)


MISSED = r"step 1.*branches\.1\.weight.*find_unused_parameters=True"


def backward(model, *which):
    model(torch.ones(1, 4), *which).backward()


# ---- unused parameters -----------------------------------------------------------------------


def test_an_unused_parameter_raises_before_the_optimizer_has_stepped():
    """torch: the step is done with gradients that were not averaged; the next forward raises."""

    def body(comm):
        model = dpcore.DataParallel(Branches(), comm=comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        before = [p.detach().clone() for p in model.parameters()]
        backward(model, 0)
        with pytest.raises(dpcore.Error, match=MISSED):
            optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))

    dpcore.spawn(body, 2, mode="threads")


def test_an_unused_parameter_raises_on_ranks_that_used_it():
    """torch: they wait for the other's bucket until the timeout of the group."""

    def body(comm):
        model = dpcore.DataParallel(Branches(), comm=comm, bucket_cap_mb=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with pytest.raises(dpcore.Error, match=r"branches\.1\.weight"):
            backward(model, *((0,) if comm.rank == 1 else (0, 1)))
            optimizer.step()

    dpcore.spawn(body, 2, mode="threads", timeout=20)


def test_an_unused_parameter_in_the_last_step_raises_in_finalize():
    """torch: nothing ever notices."""

    def body(comm):
        model = dpcore.DataParallel(Branches(), comm=comm)
        backward(model, 0)
        with pytest.raises(dpcore.Error, match=MISSED):
            dpcore.finalize()
        dpcore.finalize()

    dpcore.spawn(body, 2)


class BackwardWithin(nn.Module):
    """Runs its backwards by itself, in the forward of its wrapper, as manual optimization does."""

    def __init__(self, *of_each_backward):
        super().__init__()
        self.inner, self.of_each_backward = Branches(), of_each_backward

    def forward(self, x, reducer):
        for branches in self.of_each_backward:
            loss = self.inner(x, *branches)
            reducer.prepare_for_backward(loss)
            loss.backward()


def test_a_backward_within_forward_is_averaged():
    """torch: only where somebody calls ``prepare_for_backward``; Lightning does."""

    def body(comm):
        x = torch.full((1, 4), comm.rank + 1.0)
        model = dpcore.DataParallel(BackwardWithin((0, 1)), comm=comm)
        for step in range(3):
            model.zero_grad()
            model(x, model.reducer)
            assert model._reducer.completed == step + 1
        expected = BackwardWithin((0, 1))
        expected.load_state_dict(model.module.state_dict())
        for other in range(comm.world_size):
            (expected.inner(torch.full((1, 4), other + 1.0), 0, 1) / comm.world_size).backward()
        torch.testing.assert_close(
            [p.grad for p in model.parameters()], [p.grad for p in expected.parameters()]
        )

    dpcore.spawn(body, 2, mode="threads")


def test_an_unused_parameter_of_a_backward_within_forward_raises_at_its_end():
    """torch: nothing notices."""

    def body(comm):
        together = BackwardWithin((0,), (1,))
        model = dpcore.DataParallel(together, comm=comm, schedule="sequential")
        model(torch.ones(1, 4), model.reducer)  # together they reach all
        missed = dpcore.DataParallel(BackwardWithin((0,)), comm=comm)
        with pytest.raises(dpcore.Error, match=MISSED):
            missed(torch.ones(1, 4), missed.reducer)

    dpcore.spawn(body, 2, mode="threads")


def test_optimizers_of_other_parameters_step():
    def body(comm):
        model = dpcore.DataParallel(Branches(), comm=comm)
        other = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(other.parameters(), lr=1.0)
        backward(model, 0)
        other(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        with pytest.raises(dpcore.Error, match=MISSED):
            model(torch.ones(1, 4), 0)

    dpcore.spawn(body, 1, mode="threads")


def test_backwards_that_reach_every_parameter_together_may_step():
    """As in torch, where the last of them sends what is complete then."""

    def body(comm):
        model = dpcore.DataParallel(Branches(), comm=comm, schedule="sequential")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            backward(model, 0)
            model.module.branches[1](torch.ones(1, 4)).sum().backward()
            optimizer.step()
        return [p.sum().item() for p in model.parameters()]

    first, second = dpcore.spawn(body, 2, mode="threads")
    assert first == second


# ---- parameters that change ------------------------------------------------------------------


def frozen_first():
    model = Small()
    model.first.requires_grad_(False)
    return model


def replace(model):
    model.last = nn.Linear(40, 3).double()


def add(model):
    model.more = nn.Linear(2, 2).double()


def add_within(model):
    model.last.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))


def unfreeze(model):
    model.first.requires_grad_(True)


CHANGES = {
    replace: r"last\.weight, last\.bias: added, replaced or unfrozen.*refresh",
    add: r"more\.weight, more\.bias: added",
    add_within: r"last\.scale: added",
    unfreeze: r"first\.weight, first\.bias: added",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_parameter_raises_at_the_next_forward(change):
    """torch: it is trained on each rank by itself, and the ranks drift apart."""

    def body(comm):
        model = dpcore.DataParallel(frozen_first(), comm=comm)
        x, _ = batch(0)
        model(x).sum().backward()
        change(model.module)
        with pytest.raises(dpcore.Error, match=CHANGES[change]):
            model(x)

    dpcore.spawn(body, 2, mode="threads")


def test_a_frozen_parameter_is_taken_in_by_refresh():
    def body(comm):
        model = dpcore.DataParallel(frozen_first(), comm=comm)
        x, _ = batch(0)
        model.module.last.bias.requires_grad_(False)
        model(x).sum().backward()
        with pytest.raises(dpcore.Error, match=r"last\.bias .*no longer require grad.*refresh"):
            model(x)

    dpcore.spawn(body, 2, mode="threads")

    def refreshed(comm):
        model = dpcore.DataParallel(frozen_first(), comm=comm)
        x, _ = batch(0)
        model.module.last.bias.requires_grad_(False)
        model.refresh()
        for _ in range(2):
            model(x).sum().backward()

    dpcore.spawn(refreshed, 2, mode="threads")


@pytest.mark.parametrize("change", (replace, unfreeze), ids=lambda change: change.__name__)
def test_refresh_takes_a_change_in(change):
    def body(comm):
        model = dpcore.DataParallel(frozen_first(), comm=comm, bucket_cap_mb=0.01)
        alone = frozen_first()
        for step in range(4):
            if step == 2:
                change(model.module)  # with values of this rank: the first rank's count
                model.refresh()
                change(alone)
                alone.load_state_dict(model.module.state_dict())
            model.zero_grad()
            alone.zero_grad()
            x, _ = batch(step)
            alone(x).square().sum().backward()
            (model(part(x, comm)).square().sum() * comm.world_size).backward()
            for mine, other in zip(model.module.parameters(), alone.parameters(), strict=True):
                if other.grad is not None:
                    torch.testing.assert_close(mine.grad, other.grad)

    dpcore.spawn(body, 3, mode="threads")


def test_another_type_after_wrapping_raises():
    """torch: writes gradients of one type into buckets of another, or fails in its reducer with
    an assertion that names no parameter."""

    def body(comm):
        model = dpcore.DataParallel(nn.Linear(4, 2), comm=comm)
        model.to(torch.float64)
        with pytest.raises(
            dpcore.Error, match=r"\w+ was Float on cpu when .*, and is Double on cpu now.*refresh"
        ):
            model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()

    dpcore.spawn(body, 1, mode="threads")


def through_the_module(model):
    model.bfloat16()
    model(torch.ones(1, 4, dtype=torch.bfloat16))
    model.float()


def through_data(model):
    for parameter in model.parameters():
        parameter.data = parameter.data.double()
        parameter.data = parameter.data.float()


@pytest.mark.parametrize("there_and_back", [through_the_module, through_data])
def test_another_type_and_back_raises(there_and_back):
    """torch: ranks drift apart, since autograd has other nodes for the parameters."""

    def body(comm):
        model = dpcore.DataParallel(nn.Linear(4, 2), comm=comm)
        model(torch.ones(1, 4)).sum().backward()
        with torch.no_grad():
            there_and_back(model)
        with pytest.raises(dpcore.Error, match=r"\w+ was parametrized, or converted.*refresh"):
            model(torch.ones(1, 4))
        model.refresh()
        model.zero_grad()
        model(torch.full((1, 4), 1.0 + comm.rank)).sum().backward()
        assert model.module.weight.grad.unique().tolist() == [1.5]

    dpcore.spawn(body, 2, mode="threads")


def test_ignored_parameters_may_change():
    def body(comm):
        module = Small()
        names = ["last.weight", "last.bias"]
        dpcore.DataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
        model = dpcore.DataParallel(module, comm=comm)
        replace(model.module)
        model(batch(0)[0] * (comm.rank + 1)).sum().backward()
        return model.module.last.weight.grad.sum().item()

    first, second = dpcore.spawn(body, 2, mode="threads")
    assert first != second  # nobody averaged it


# ---- models and steps that differ ------------------------------------------------------------


def half_on_one(comm):
    return nn.Linear(4, 4).to(torch.float16 if comm.rank == 0 else torch.bfloat16)


def other_way_round(comm):
    model = nn.Module()
    for name in ("a", "b") if comm.rank == 0 else ("b", "a"):
        model.register_parameter(name, nn.Parameter(torch.ones(3)))
    return model


def other_one_frozen(comm):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[comm.rank].requires_grad_(False)
    return model


MODELS = {
    # torch: takes them and adds bit patterns: 1.5 becomes 0.125.
    half_on_one: r"'weight: \[4, 4\] torch.float16.*' where rank 1 has '.*torch.bfloat16",
    # torch: takes them and swaps their values.
    other_way_round: r"'a: .*' where rank 1 has 'b: ",
    # torch: takes them and averages gradients of different parameters.
    other_one_frozen: r"'1\.weight: .*' where rank 1 has '0\.weight: ",
}


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_models_that_differ_raise_in_the_constructor(make):
    def body(comm):
        with pytest.raises(dpcore.Mismatch, match=MODELS[make]):
            dpcore.DataParallel(make(comm), comm=comm)

    dpcore.spawn(body, 2, mode="threads")


OPTIONS = (
    {"find_unused_parameters": (False, True)},  # torch: a timeout with a message of sockets
    {"static_graph": (False, True)},
    {"bucket_cap_mb": (1, 2)},  # torch: buckets of different sizes in the first step
    {"bucket_cap_mb_list": ([1, 2], [1, 3])},
    {"skip_all_reduce_unused_params": (False, True)},
    {"forward_sync_buffers": (False, True)},
    {"deterministic": (False, True)},
)


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: next(iter(option)))
def test_options_that_differ_raise_in_the_constructor(option):
    ((name, values),) = option.items()
    said = "bucket_cap_mb" if name.startswith("bucket_cap_mb") else name

    def body(comm):
        with pytest.raises(dpcore.Mismatch, match=f"'{said}=.*' where rank 1 has '{said}="):
            dpcore.DataParallel(nn.Linear(2, 2), comm=comm, **{name: values[comm.rank]})

    dpcore.spawn(body, 2, mode="threads")


@pytest.mark.parametrize("schedule", ("bucketed", "sequential"))
def test_a_rank_with_a_step_more_is_told_which(schedule):
    """torch: "Connection closed by peer", when the other process has ended."""

    def body(comm):
        model = dpcore.DataParallel(nn.Linear(2, 2), comm=comm, schedule=schedule)
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
        if comm.rank == 1:
            with pytest.raises(dpcore.Error, match=r"bucket 0 .*, step 4: .*rank 0"):
                model(torch.ones(1, 2)).sum().backward()

    dpcore.spawn(body, 2, mode="threads", timeout=20)


def test_a_rank_with_a_forward_more_is_told_which():
    """With buffers, forward is where the ranks meet first."""

    def body(comm):
        model = dpcore.DataParallel(nn.BatchNorm1d(2), comm=comm)
        x = torch.randn(4, 2)
        for _ in range(2):
            model(x).sum().backward()
        if comm.rank == 1:
            with pytest.raises(dpcore.Error, match=r"step 3, buffers before forward: .*rank 0"):
                model(x)

    dpcore.spawn(body, 2, mode="threads", timeout=20)
