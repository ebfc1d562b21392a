"""Ranks with different numbers of inputs: the same as one process that has them all."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

import dpcore
from tests.data_parallel.models import Small, assert_same_values, batch

RATE = 0.1


def inputs_of(rank):
    """Rank 0 has two batches, rank 1 three, ..."""
    return [batch(10 * rank + step, rows=2)[0] for step in range(2 + rank)]


def loss_of(model, x):
    return model(x).square().mean()


def step(model):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= RATE * parameter.grad
                parameter.grad = None


def alone(world, by_all, make=Small):
    """Each step is the sum of what the ranks that have a batch would send."""
    model = make()
    inputs = [inputs_of(rank) for rank in range(world)]
    for number in range(max(map(len, inputs))):
        now = [x[number] for x in inputs if number < len(x)]
        divisor = world if by_all else len(now)
        (sum(loss_of(model, x) for x in now) / divisor).backward()
        step(model)
    return model


@pytest.mark.parametrize("world", (1, 2, 3))
@pytest.mark.parametrize("by_all", (True, False))
@pytest.mark.parametrize("find_unused", (True, False))
def test_uneven_inputs(world, by_all, find_unused):
    def body(comm):
        model = dpcore.DataParallel(
            Small(seed=7 + comm.rank),
            comm=comm,
            bucket_cap_mb=0.01,
            find_unused_parameters=find_unused,
        )
        with model.join(divide_by_initial_world_size=by_all):
            for x in inputs_of(comm.rank):
                loss_of(model, x).backward()
                step(model)
        assert_same_values(model.module, alone(world, by_all))
        assert model._get_ddp_logging_data()["join_uneven_inputs"] == 1

    dpcore.spawn(body, world, mode="threads")


def test_all_schedules_shadow_each_other():
    def body(comm):
        for schedule in ("bucketed", "sequential", "per_parameter", "flat"):
            model = dpcore.DataParallel(Small(), comm=comm, schedule=schedule, bucket_cap_mb=0.01)
            with model.join():
                for x in inputs_of(comm.rank):
                    loss_of(model, x).backward()
                    step(model)
            assert_same_values(model.module, alone(2, True))

    dpcore.spawn(body, 2, mode="threads")


def test_accumulation_within_a_join():
    """A rank without inputs follows no_sync too: nothing is sent for those backwards."""

    def body(comm):
        model, reference = dpcore.DataParallel(Small(), comm=comm), Small()
        everybody = [inputs_of(rank) for rank in range(2)]
        with model.join():
            for number, x in enumerate(inputs_of(comm.rank)):
                if number == 0:
                    with model.no_sync():
                        loss_of(model, x).backward()
                    continue
                loss_of(model, x).backward()
                step(model)
        for number in range(3):
            now = [x[number] for x in everybody if number < len(x)]
            (sum(loss_of(reference, x) for x in now) / 2).backward()
            if number > 0:
                step(reference)
        assert_same_values(model.module, reference)

    dpcore.spawn(body, 2, mode="threads")


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6).double()

    def forward(self, x):
        return self.norm(x)


def test_buffers_come_from_a_rank_that_still_has_inputs():
    def body(comm):
        model = dpcore.DataParallel(Norm(), comm=comm)
        with model.join():
            for x in inputs_of(comm.rank):
                model(x).sum().backward()
        # The last joiner's buffers, which began each step from its own: rank 2 has four batches.
        expected = Norm()
        for x in inputs_of(comm.world_size - 1):
            expected(x)
        torch.testing.assert_close(model.module.norm.running_mean, expected.norm.running_mean)
        return model.module.norm.running_var.tolist()

    variances = dpcore.spawn(body, 3, mode="threads")
    assert variances == [variances[0]] * 3


def test_the_first_rank_without_inputs_stops_all():
    def body(comm):
        model = dpcore.DataParallel(Small(), comm=comm)
        steps = 0
        text = "Rank 0 exhausted all inputs" if comm.rank == 0 else "at least one rank that exha"
        with pytest.raises(RuntimeError, match=text), model.join(throw_on_early_termination=True):
            for x in inputs_of(comm.rank):
                loss_of(model, x).backward()
                steps += 1
        assert steps == 2

    dpcore.spawn(body, 2, mode="threads")


def test_a_join_that_is_switched_off():
    def body(comm):
        model = dpcore.DataParallel(Small(), comm=comm)
        with model.join(enable=False):
            for x in inputs_of(0):
                loss_of(model, x).backward()
                step(model)
        assert not model._join_config.enable

    dpcore.spawn(body, 2, mode="threads")


class Counter(Joinable):
    """Somebody else in the same context, with a reduction of its own per step."""

    def __init__(self, model, comm):
        super().__init__()
        self.model, self.comm, self.total = model, comm, 0.0

    def count(self, value):
        Join.notify_join_context(self)
        tensor = torch.tensor([float(value)])
        self.comm.all_reduce(tensor)
        self.total += tensor.item()

    def join_hook(self, **kwargs):
        class Hook(JoinHook):
            def main_hook(hook):  # noqa: N805
                self.comm.all_reduce(torch.zeros(1))

        return Hook()

    @property
    def join_device(self):
        return self.model.join_device

    @property
    def join_process_group(self):
        return self.model.join_process_group


def test_other_joinables_in_the_same_context():
    from dpcore.ddp.torch_face.join import JoinOverGroup

    def body(comm):
        model = dpcore.DataParallel(Small(), comm=comm)
        counter = Counter(model, comm)
        with JoinOverGroup([model, counter]):
            for x in inputs_of(comm.rank):
                loss_of(model, x).backward()
                counter.count(1)
                step(model)
        assert_same_values(model.module, alone(2, True))
        return counter.total

    assert dpcore.spawn(body, 2, mode="threads") == [4.0, 5.0]


@pytest.mark.parametrize("by_all", (True, False))
def test_sparse_gradients_of_uneven_inputs(by_all):
    def body(comm):
        table = nn.Embedding(8, 2, sparse=True, dtype=torch.float64)
        with torch.no_grad():
            table.weight.fill_(1.0)
        model = dpcore.DataParallel(table, comm=comm)
        with model.join(divide_by_initial_world_size=by_all):
            for number in range(1 + comm.rank):
                model.zero_grad()
                model(torch.tensor([number])).sum().backward()
                grad = table.weight.grad.to_dense()
                assert grad[number].tolist() == [0.5 if by_all and number == 1 else 1.0] * 2
        return table.weight.sum().item()

    first, second = dpcore.spawn(body, 2, mode="threads")
    assert first == second


def test_until_all_end():
    def body(comm):
        model = dpcore.DataParallel(Small(), comm=comm)
        seen = 0
        for x in model.until_all_end(inputs_of(comm.rank)):
            loss_of(model, x).backward()
            step(model)
            seen += 1
        assert_same_values(model.module, alone(3, True))
        return seen

    assert dpcore.spawn(body, 3, mode="threads") == [2, 3, 4]


def test_forwards_after_a_join_are_plain_and_it_may_be_entered_again():
    """torch: they go on with telling the others, and a rank must not run one alone."""

    def body(comm):
        model, reference = dpcore.DataParallel(Small(), comm=comm), Small()
        context = model.join()
        for _ in range(2):
            with context:
                for x in inputs_of(comm.rank):
                    loss_of(model, x).backward()
                    step(model)
            if comm.rank == 0:
                with torch.no_grad():
                    model(inputs_of(0)[0])
            for number in range(3):
                now = [x[number] for x in (inputs_of(0), inputs_of(1)) if number < len(x)]
                (sum(loss_of(reference, x) for x in now) / 2).backward()
                step(reference)
        assert_same_values(model.module, reference)

    dpcore.spawn(body, 2, mode="threads", timeout=20)


def test_a_rank_may_evaluate_while_others_have_no_inputs_left():
    def body(comm):
        model = dpcore.DataParallel(Small(seed=7), comm=comm, bucket_cap_mb=0.01)
        with model.join():
            for x in inputs_of(comm.rank):
                loss_of(model, x).backward()
                step(model)
                with torch.no_grad():
                    model(x)
        assert_same_values(model.module, alone(2, True))

    dpcore.spawn(body, 2, mode="threads")


def test_a_rank_without_any_inputs_has_no_optimizer_that_stepped():
    """Its hyperparameters are not known yet, so they differ from nobody's."""

    def body(comm):
        model = dpcore.DataParallel(Small(seed=7), comm=comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

        def train(steps):
            for number in range(steps):
                optimizer.zero_grad()
                loss_of(model, batch(number, rows=2)[0]).backward()
                optimizer.step()

        with model.join():
            train(2 * comm.rank)
        train(2)  # a warning is an error in these tests

    dpcore.spawn(body, 2)
