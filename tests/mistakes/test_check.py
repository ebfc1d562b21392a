"""``dpcore.check``: which value ranks first differ in, on which rank, and since when."""

import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel

import dpcore
from tests.data_parallel.models import seeded
from tests.ranks.groups import in_group
from tests.ranks.mpi import each_mpi, mpirun, needs_mpi

in_threads = partial(dpcore.spawn, mode="threads")


def net(norm=False):
    between = [nn.BatchNorm1d(6)] if norm else []
    return seeded(lambda: nn.Sequential(nn.Linear(4, 6), *between, nn.Linear(6, 2)))


class Trainer:
    """A model of a rank and its optimizer, which train on data of the rank."""

    def __init__(self, comm, make=net, optimizer=torch.optim.Adam, **options):
        self.rank = comm.rank if hasattr(comm, "rank") and not callable(comm.rank) else comm.rank()
        self.model = dpcore.DataParallel(make(), comm=comm, **options)
        self.optimizer = optimizer(self.model.parameters(), lr=0.01)

    def steps(self, count):
        for step in range(count):
            self.optimizer.zero_grad()
            x = torch.arange(12.0).view(3, 4).sin() * (1 + self.rank + step)
            self.model(x).square().mean().backward()
            self.optimizer.step()

    def check(self, *more):
        return dpcore.check(self.model, self.optimizer, *more)

    @property
    def weight(self):
        return self.model.module[0].weight


# ---- what is equal ---------------------------------------------------------------------------


def test_a_program_without_mistakes_is_equal():
    def body(comm):
        one = Trainer(comm, partial(net, norm=True))
        ema = AveragedModel(one.model.module)
        scheduler = torch.optim.lr_scheduler.StepLR(one.optimizer, 2)
        for _ in range(3):
            one.steps(1)
            scheduler.step()
            ema.update_parameters(one.model.module)
        found = one.check(ema, scheduler, None, one.model.state_dict()["module.0.weight"])
        assert found and found.ok and found.differences == ()
        assert found.raise_if_different() is found
        text = str(found)
        assert text.startswith("after step 3: all equal: ")
        assert "hyperparameters of Adam, 6 parameters, 3 buffers, 18 state of Adam, " in text
        assert f"on {comm.world_size} ranks in " in text
        # The running statistics are of each rank's own batches until rank 0's are sent.
        assert any("buffer 1.running_mean differs" in note for note in found.notes)
        return text

    in_threads(body, 2)


@pytest.mark.parametrize("schedule", ["priority", "dear", "zero1", "zero2"])
def test_schedules_that_go_across_steps(schedule):
    def body(comm):
        one = Trainer(comm, schedule=schedule)
        one.optimizer = dpcore.DistributedOptimizer(one.optimizer, one.model)
        one.steps(3)
        found = one.check()
        assert found
        left_out = any("left out: the state of DistributedOpt" in note for note in found.notes)
        assert left_out == schedule.startswith("zero")
        one.steps(1)
        one.model.flush()
        with torch.no_grad():
            one.weight[0, 0] += comm.rank
        assert not one.check()

    in_threads(body, 2)


def test_several_models_and_modules_that_are_not_wrapped():
    def body(comm):
        one, two = Trainer(comm), Trainer(comm)
        assert dpcore.check(one.model, two.model, one.optimizer, two.optimizer)
        plain = net()
        assert dpcore.check(plain, comm=comm)
        with torch.no_grad():
            plain[2 - 1].bias[1] = float(comm.rank)
        found = dpcore.check(plain, comm=comm)
        assert str(found) == (
            "at check 2: ranks differ: parameter 1.bias differs between rank 0 and rank 1 in 1 of "
            "2 elements, by up to 1; equal at check 1"
        )
        assert not dpcore.check({"a": torch.tensor(comm.rank)}, comm=comm)
        assert "Sequential 2 parameter 1.bias" in str(dpcore.check(two.model, plain))

    in_threads(body, 2)


# ---- what differs ----------------------------------------------------------------------------


def edit(one):
    with torch.no_grad():
        one.weight.view(-1)[[1, 5]] += 2**-10


def step_more(one):
    for group in one.optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    one.optimizer.step()


def other_rate(one):
    one.optimizer.param_groups[0]["lr"] = 0.02


def other_state(one):
    one.optimizer.state[one.weight]["exp_avg"].mul_(2)


def lose_state(one):
    one.optimizer.state.clear()


def register(one):
    one.model.module.register_buffer("extra", torch.ones(3))


DIFFERENCES = {
    edit: r"parameter 0\.weight differs on rank 1 from ranks 0, 2 in 2 of 24 elements, by up to "
    r"0\.000977; equal after step 2$",
    step_more: r"parameter 0\.weight differs on rank 1 .* in 24 of 24 elements, .*; equal after",
    other_rate: r"Adam, group 0: lr differs on rank 1 from ranks 0, 2: 0\.01 and 0\.02; eq",
    other_state: r"Adam, state of 0\.weight: exp_avg differs on rank 1 .* in 24 of 24 elements",
    lose_state: r"^rank 0 has 'Adam, state of 0\.weight: exp_avg: \[6, 4\] torch\.float32', and "
    r"rank 1 has not; rank 1 had \d+ things to compare, and rank 0 \d+$",
    register: r"^rank 1 has 'buffer extra: \[3\] torch\.float32 \(may differ\)', and rank 0 has",
}


@pytest.mark.parametrize("change", DIFFERENCES, ids=lambda change: change.__name__)
def test_the_first_difference_is_named(change):
    def body(comm):
        one = Trainer(comm)
        one.steps(2)
        assert one.check()
        one.steps(1)
        if comm.rank == 1:
            change(one)
        found = one.check()
        assert not found and found.differences[0].ranks == (1,)
        with pytest.raises(dpcore.Mismatch, match=f"^rank {comm.rank}, after step 3: .*dpcore.c"):
            found.raise_if_different()
        assert str(found).startswith("after step 3: ranks differ: ")
        return str(found.differences[0])

    texts = set(in_threads(body, 3))
    assert len(texts) == 1  # the same report on all ranks
    assert re.search(DIFFERENCES[change], texts.pop())


def test_a_difference_is_dated_by_its_own_section():
    """The optimizer was not part of the first check, and its state not of any that was equal."""

    def body(comm):
        one = Trainer(comm)
        one.steps(1)
        assert dpcore.check(one.model)
        one.optimizer.state[one.weight]["exp_avg"].add_(comm.rank)
        found = one.check()
        assert str(found.differences[0]).endswith("; not compared before")
        one.optimizer.state[one.weight]["exp_avg"].sub_(comm.rank)
        return [difference.name for difference in found.differences]

    assert in_threads(body, 2) == [["Adam, state of 0.weight: exp_avg"]] * 2


def test_bits_are_compared_and_not_numbers():
    def body(comm):
        plain = nn.Linear(2, 2, bias=False)
        with torch.no_grad():
            plain.weight.fill_(0.0)
            plain.weight[0, 0] = -0.0 if comm.rank == 1 else 0.0
        found = dpcore.check(plain, comm=comm)
        assert "in 1 of 4 elements, by up to 0;" in str(found)
        for value in (float("nan"), torch.inf):
            assert dpcore.check(torch.full((3,), value), comm=comm)
        kinds = [torch.bool, torch.bfloat16, torch.complex64, torch.int8, torch.float8_e5m2]
        for kind in kinds:
            assert dpcore.check(torch.ones(3).to(kind), torch.tensor(1).to(kind), comm=comm), kind
            assert not dpcore.check((torch.arange(3) == comm.rank).to(kind), comm=comm), kind
        transposed = torch.arange(6.0).view(2, 3)
        if comm.rank == 1:
            transposed = transposed.t().contiguous().t()  # the same values in another order
        assert dpcore.check(transposed, comm=comm)
        sparse = torch.eye(3).mul(1 + comm.rank).to_sparse()
        assert ", values differs between" in str(dpcore.check(sparse, comm=comm))

    in_threads(body, 2)


def test_ignored_parameters_and_parts_of_zero_are_left_out():
    def body():
        from torch.distributed.optim import ZeroRedundancyOptimizer  # takes a second

        module = net()
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            module, ["1.bias"]
        )
        model = dpcore.DataParallel(module)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
        with torch.no_grad():
            module[1].bias.fill_(dist.get_rank())
        module[1].bias.requires_grad_(False)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        found = dpcore.check(model, optimizer)
        assert found, found
        assert "left out, as DataParallel ignores them: 1.bias" in found.notes
        assert "left out: the state of ZeroRedundancyOptimizer" in str(found)

    in_group(body, 2, backend="gloo")


def test_states_of_random_number_generators_are_notes():
    def body(comm):
        torch.manual_seed(1)
        plain = nn.Linear(1, 1)
        same = dpcore.check(plain, comm=comm)
        torch.manual_seed(comm.rank)
        other = dpcore.check(plain, comm=comm)
        assert same and other
        return str(same.notes), str(other.notes)

    for same, other in dpcore.spawn(body, 2):
        assert "torch's" in same.partition("are the same on all ranks")[0].split(",")[-1]
        assert "torch's" in other.partition("differ between ranks")[0]


def test_notes_about_mistakes_are_shown():
    def body(comm):
        model = dpcore.DataParallel(net(), comm=comm)
        model._mistakes.note("a kind", f"a note of rank {comm.rank}")
        assert f"  note: a note of rank {comm.rank}" in str(dpcore.check(model)).splitlines()

    in_threads(body, 2)


def test_memory_can_be_resized_after_a_check():
    """As that of a buffer that grows; memory that numpy has seen cannot."""

    def body(comm):
        tensor, grown = torch.ones(3), nn.Module()
        grown.register_buffer("grows", tensor)
        assert dpcore.check(grown, torch.empty(0), comm=comm)
        assert tensor.resize_(100).shape == (100,)

    in_threads(body, 1)


def test_buffers_of_a_wrapped_model_differ_between_evaluations_of_their_own():
    """Rank 1 evaluates, which takes rank 0's buffers, and rank 0 does not."""

    def body(comm):
        model = dpcore.DataParallel(net(norm=True), comm=comm)
        model(torch.randn(4, 4) + comm.rank).sum().backward()
        if comm.rank == 1:
            model.module(torch.randn(4, 4))
        with torch.no_grad():
            model(torch.randn(4, 4))
        if comm.rank == 1:
            model.module.eval()(torch.randn(4, 4))
            model.module.train()(torch.randn(4, 4))
        found = dpcore.check(model)
        assert found and any("buffer 1.running_mean differs" in note for note in found.notes)

    in_threads(body, 2)


def test_what_cannot_be_compared_is_refused():
    def body(comm):
        with pytest.raises(TypeError, match="argument 2 is a float"):
            dpcore.check(net(), 1.5, comm=comm)

    in_threads(body, 1)


# ---- over other communicators ----------------------------------------------------------------


def check_over(comm, rank):
    one = Trainer(comm)
    one.rank = rank
    one.steps(2)
    assert one.check(), one.check()
    one.steps(1)
    if rank == 1:
        edit(one)
    found = one.check()
    assert "parameter 0.weight differs between rank 0 and rank 1 in 2 of 24" in str(found), found
    assert "equal after step 2" in str(found)


def test_over_a_group_of_gloo():
    def body():
        check_over(dist.group.WORLD, dist.get_rank())

    in_group(body, 2, backend="gloo")


def test_over_processes():
    dpcore.spawn(lambda comm: check_over(comm, comm.rank), 2)


@needs_mpi
@each_mpi
def test_over_mpi(launcher, tmp_path):
    script = """
from mpi4py import MPI
from tests.mistakes.test_check import check_over

check_over(MPI.COMM_WORLD, MPI.COMM_WORLD.rank)
"""
    run, _ = mpirun(tmp_path, script, launcher)
    assert run.returncode == 0, run.stderr
