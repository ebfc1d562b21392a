"""Buffers that come, change and go after the model was wrapped are rank 0's on every rank."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dpcore
from tests.data_parallel.models import seeded
from tests.data_parallel.test_groups import over_gloo


class Plain(nn.Module):
    """Has the buffers of a BatchNorm besides, or none."""

    def __init__(self, has_others, value):
        super().__init__()
        self.value = value  # what this rank's buffers begin with
        self.layer = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3) if has_others else nn.Identity()

    def forward(self, x):
        self.change(torch.full((4,), self.value))
        return self.norm(self.layer(x)).sum()

    def change(self, value):
        raise NotImplementedError


class NoneAtFirst(Plain):
    def __init__(self, has_others, value):
        super().__init__(has_others, value)
        self.register_buffer("late", None)

    def change(self, value):
        if self.late is None:
            self.late = value


class RegisteredByForward(Plain):
    def change(self, value):
        if not hasattr(self, "late"):
            self.register_buffer("late", value)


class RegisteredInANewModule(Plain):
    def change(self, value):
        if not hasattr(self, "part"):
            self.part = nn.Module()
            self.part.register_buffer("late", value)


class EmptyAtFirst(Plain):
    def __init__(self, has_others, value):
        super().__init__(has_others, value)
        self.register_buffer("late", torch.empty(0))

    def change(self, value):
        if self.late.numel() == 0:
            self.late = value


class EmptyAndResized(EmptyAtFirst):
    def change(self, value):
        if self.late.numel() == 0:
            self.late.resize_(4).copy_(value)


class Growing(EmptyAtFirst):
    """A tensor that is larger before each forward."""

    def change(self, value):
        self.late.resize_(self.late.numel() + 1).fill_(value[0])


class Replaced(EmptyAtFirst):
    def change(self, value):
        self.late = value.clone()


class Removed(EmptyAtFirst):
    def change(self, value):
        if hasattr(self, "late"):
            del self.late
            self.register_buffer("other_late", value)


KINDS = (
    NoneAtFirst,
    RegisteredByForward,
    RegisteredInANewModule,
    EmptyAtFirst,
    EmptyAndResized,
    Growing,
    Replaced,
    Removed,
)


@pytest.mark.parametrize("has_others", (True, False), ids=("beside others", "alone"))
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_late_buffers_are_those_of_rank_0(kind, has_others):
    """torch: the same beside others, and never where the model had no buffer when it was
    wrapped."""

    def body(comm):
        model = dpcore.DataParallel(kind(has_others, 1.0 + comm.rank), comm=comm)
        for _ in range(3):
            model(torch.ones(2, 3)).backward()
        model._sync_buffers()  # what the beginning of the next forward does
        late = [b for name, b in model.module.named_buffers() if name.endswith("late")]
        assert [set(buffer.tolist()) for buffer in late] == [{1.0}]

    dpcore.spawn(body, 2, mode="threads", timeout=20)


@pytest.mark.parametrize(
    "compiled",
    (torch.jit.script, lambda module: torch.jit.trace(module, torch.ones(2, 3))),
    ids=("scripted", "traced"),
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_buffers_of_a_submodule_of_torchscript_are_those_of_rank_0(compiled):
    """torch: the same."""
    norms = [compiled(nn.BatchNorm1d(3)) for _ in range(2)]

    def body(comm):
        module = nn.Sequential(seeded(lambda: nn.Linear(3, 3)), norms[comm.rank], nn.Linear(3, 1))
        model = dpcore.DataParallel(module, comm=comm)
        for step in range(3):
            model(torch.randn(2, 3) * (comm.rank + step)).sum().backward()
        model._sync_buffers()  # what the beginning of the next forward does
        return {name: value.tolist() for name, value in model.module.named_buffers()}, [
            parameter.grad.tolist() for parameter in model.parameters()
        ]

    first, second = dpcore.spawn(body, 2, mode="threads", timeout=20)
    assert first == second
    assert set(first[0]) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert first[0]["1.num_batches_tracked"] >= 3 and any(first[0]["1.running_mean"])


class OnOneRank(Plain):
    """Only rank 1 registers a buffer, in the forward with this number."""

    def __init__(self, has_others, value, forward):
        super().__init__(has_others, value)
        self.forwards, self.late_at = 0, forward

    def change(self, value):
        self.forwards += 1
        if self.forwards == self.late_at and self.value == 2.0:
            self.register_buffer("only_here", value)


def train_three_steps(model):
    for _ in range(3):
        model(torch.ones(2, 3)).backward()


@pytest.mark.parametrize("has_others", (True, False), ids=("beside others", "alone"))
@pytest.mark.parametrize("forward", (1, 2))
def test_a_buffer_of_one_rank_only_is_named(forward, has_others):
    """torch: buffers of other names or sizes, or a hang."""

    def body(comm):
        module = OnOneRank(has_others, 1.0 + comm.rank, forward)
        model = dpcore.DataParallel(module, comm=comm)
        with pytest.raises(dpcore.Mismatch) as problem:
            train_three_steps(model)
        # The first two forwards compare; afterwards only a rank that changed can name the buffer.
        if comm.rank == 1 or (forward == 1 and has_others):
            assert r"buffer only_here: [4] torch.float32" in str(problem.value)
            assert f"step {forward + 1}, buffers before forward" in str(problem.value)

    dpcore.spawn(body, 2, mode="threads", timeout=20)


def test_over_a_group_of_torch_it_is_named_too():
    """Gloo compares nothing by itself."""

    def body():
        module = OnOneRank(True, 1.0 + dist.get_rank(), 1)
        model = dpcore.DataParallel(module, comm=dist.group.WORLD)
        with pytest.raises(dpcore.Mismatch, match="buffer only_here"):
            train_three_steps(model)

    over_gloo(body, 2)


def test_buffers_of_different_sizes_are_refused_by_the_constructor():
    def body(comm):
        model = nn.Linear(2, 2)
        model.register_buffer("table", torch.zeros(3 + comm.rank))
        with pytest.raises(dpcore.Mismatch, match=r"buffer table: \[3\].*buffer table: \[4\]"):
            dpcore.DataParallel(model, comm=comm)

    dpcore.spawn(body, 2, mode="threads", timeout=20)


def test_ranks_may_have_buffers_of_their_own_when_these_are_not_sent():
    def body(comm):
        model = nn.Linear(2, 2)
        model.register_buffer("table", torch.zeros(3 + comm.rank))
        model._ddp_params_and_buffers_to_ignore = ["table"]
        model = dpcore.DataParallel(model, comm=comm)
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()

    dpcore.spawn(body, 2, mode="threads", timeout=20)


def test_a_plain_step_compares_nothing():
    def body(comm):
        model = dpcore.DataParallel(Removed(True, 1.0), comm=comm)
        counts = []
        for _ in range(6):
            model(torch.ones(2, 3)).backward()
            kinds = comm.stats()
            counts.append(sum(path["operations"] for path in kinds["all_gather"].values()))
        assert counts[2:] == counts[2:3] * 4

    dpcore.spawn(body, 2, mode="threads", timeout=20)


@pytest.mark.parametrize("instead", ("barrier", "all_reduce"))
def test_a_rank_that_evaluates_alone_is_told_to_call_the_module(instead):
    """torch: the buffers of rank 0 arrive in what the others receive next, or a hang."""

    def body(comm):
        model = dpcore.DataParallel(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), comm=comm)
        for _ in range(3):
            model(torch.ones(2, 3)).sum().backward()
        with pytest.raises(dpcore.Mismatch) as problem, torch.no_grad():
            if comm.rank == 0:
                model.eval()
                model(torch.ones(2, 3))
            comm.barrier() if instead == "barrier" else comm.all_reduce(torch.ones(9))
        return str(problem.value)

    for text in dpcore.spawn(body, 2, mode="threads", timeout=20):
        assert "broadcast" in text and instead in text
        assert "to evaluate on one rank alone, call model.module there" in text
        assert "the lists of sizes" not in text and "register, replace and resize" not in text
