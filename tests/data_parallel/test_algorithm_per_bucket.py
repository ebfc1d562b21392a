"""Algorithms that a launch schedule names for a bucket: names, functions, files and schedules."""

import pytest
import torch

import dpcore
from tests.data_parallel.models import OPTIMIZERS, assert_same_values, train, train_alone
from tests.data_parallel.test_schedules import layers
from tests.ranks.groups import in_group
from tests.swing import SWING


class Named(dpcore.LaunchSchedule):
    """Each bucket by the next of these algorithms."""

    def __init__(self, *algorithms):
        self._algorithms = algorithms

    def caps(self, wanted):
        return [0]

    def bucket_ready(self, control, bucket):
        self.buckets = control.buckets
        control.launch(bucket, algorithm=self._algorithms[bucket % len(self._algorithms)])


def exchange(world):
    return [(0, a, b, 0, True) for a in range(world) for b in range(world) if a != b]


def paths_since(comm, before, collective="all_reduce"):
    now = comm.stats().get(collective, {})
    ran = {path: now[path]["operations"] - before.get(path, 0) for path in now}
    return {path: count for path, count in ran.items() if count}


def counts(comm, collective="all_reduce"):
    return {path: ran["operations"] for path, ran in comm.stats().get(collective, {}).items()}


def step(model):
    model(torch.randn(4, 32)).square().sum().backward()


@pytest.mark.parametrize("mode", ["threads", "processes"])
@pytest.mark.parametrize("world", [2, 4])
def test_training_is_the_same(mode, world):
    def body(comm):
        made = dpcore.schedule("ring", "all_reduce", comm.world_size)
        schedule = Named("ring", exchange, None, SWING, made, "auto", "one_shot", "tree/moves")
        model = train(comm, OPTIMIZERS["sgd"], schedule=schedule)
        assert_same_values(model.module, train_alone(OPTIMIZERS["sgd"]))

    dpcore.spawn(body, world, mode=mode)


def test_each_bucket_runs_what_is_named_and_functions_are_called_once():
    calls = []

    def counted(world):
        calls.append(world)
        return exchange(world)

    def body(comm):
        schedule = Named(counted, "one_shot")
        model = dpcore.DataParallel(layers(), comm=comm, schedule=schedule)
        step(model)  # which may plan buckets anew
        for _ in range(3):
            before = counts(comm)
            step(model)
            buckets = schedule.buckets
            ran = paths_since(comm, before)
            assert ran["moves"] == (buckets + 1) // 2
            assert sum(n for path, n in ran.items() if path.startswith("one_shot")) == buckets // 2

    dpcore.spawn(body, 2, mode="threads")
    assert calls == [2, 2]  # once on each rank


class InHalves(dpcore.LaunchSchedule):
    def __init__(self, scatter, gather):
        self._scatter, self._gather = scatter, gather

    def phases(self):
        return ["reduce_scatter", "all_gather", "update"]

    def bucket_ready(self, control, bucket):
        control.launch(bucket, algorithm=self._scatter)

    def backward_end(self, control):
        for bucket in range(control.buckets):
            control.launch(bucket, algorithm=self._gather)

    def forward_begin(self, control, module):
        for gradient in control.gradients_of_module(module):
            control.wait(control.bucket_of(gradient))
            control.update(control.bucket_of(gradient))


def trained_in_halves(comm, schedule):
    module = layers()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = dpcore.DataParallel(module, comm=comm, schedule=schedule)
    optimizer = dpcore.DistributedOptimizer(optimizer, model)
    for _ in range(2):
        optimizer.zero_grad()
        step(model)
        optimizer.step()
    model(torch.randn(4, 32))


def test_phases_have_algorithms_of_their_own_collective():
    def body(comm):
        gather = dpcore.schedule("ring", "all_gather", comm.world_size)
        trained_in_halves(comm, InHalves("ring", gather))
        assert counts(comm, "reduce_scatter") == {"moves": 2}
        assert "moves" in counts(comm, "all_gather")

    dpcore.spawn(body, 2, mode="threads")


@pytest.mark.parametrize(
    ("algorithm", "error", "says"),
    [
        ("rign", dpcore.Unsupported, r"bucket 0 .*: there is no algorithm 'rign' for all_reduce"),
        (lambda world: exchange(world)[1:], dpcore.Unsupported, r"algorithm <lambda> for 2 ranks"),
        (
            dpcore.schedule("ring", "all_reduce", 3),
            dpcore.Unsupported,
            r"bucket 0 .*: this schedule is for 3 ranks, and the communicator has 2",
        ),
        (
            dpcore.schedule("ring", "all_gather", 2),
            dpcore.Unsupported,
            r"bucket 0 .*: this schedule is for all_gather, not for all_reduce",
        ),
        (3, TypeError, r"algorithm: expected a name, FILE:NAME, a function of the number of ranks"),
    ],
)
def test_what_is_wrong_is_said_with_the_bucket(algorithm, error, says):
    def body(comm):
        model = dpcore.DataParallel(layers(), comm=comm, schedule=Named(algorithm))
        with pytest.raises(error, match=says):
            step(model)

    dpcore.spawn(body, 2, mode="threads")


def test_ranks_that_name_different_ones_are_told_the_bucket():
    def body(comm):
        named = ("ring", "tree") if comm.rank else ("ring", "ring")
        model = dpcore.DataParallel(layers(), comm=comm, schedule=Named(*named))
        step(model)

    with pytest.raises(dpcore.Mismatch, match=r"^bucket \d+ \(.*the algorithms differ"):
        dpcore.spawn(body, 2, mode="threads")


def test_what_depends_on_the_layout_is_refused_when_deterministic():
    def body(comm):
        for algorithm, is_refused in (("ring", True), (SWING, True), (exchange, False)):
            model = dpcore.DataParallel(
                layers(), comm=comm.split(0), schedule=Named(algorithm), deterministic=True
            )
            if is_refused:
                with pytest.raises(dpcore.Unsupported, match=r"bucket 0 .* adds in an order that"):
                    step(model)
            else:
                step(model)

    dpcore.spawn(body, 4, mode="threads")


def test_a_hook_and_an_algorithm_are_one_too_many():
    def hook(state, bucket):
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def body(comm):
        model = dpcore.DataParallel(layers(), comm=comm, schedule=Named("ring"))
        model.register_comm_hook(None, hook)
        with pytest.raises(
            dpcore.Unsupported, match=r"bucket 0 .*algorithm 'ring': a communication hook"
        ):
            step(model)

    dpcore.spawn(body, 2, mode="threads")


class OverAnother:
    """What DataParallel needs of a communicator, and no more."""

    def __init__(self, comm):
        self._comm, self.rank, self.world_size = comm, comm.rank, comm.world_size

    def all_reduce(self, tensor, op, *, async_op):
        return self._comm.all_reduce(tensor, op, async_op=async_op)

    def broadcast(self, tensor, root):
        return self._comm.broadcast(tensor, root)

    def all_gather(self, output, input, *, sizes=None):
        return self._comm.all_gather(output, input, sizes=sizes)


def assert_refused_over(comm):
    model = dpcore.DataParallel(layers(), comm=comm, schedule=Named("ring"))
    with pytest.raises(
        dpcore.Unsupported, match=r"bucket 0 .* 'ring': MPI, CuPy and groups of torch such as"
    ):
        step(model)


def test_other_communicators_choose_for_themselves():
    dpcore.spawn(lambda comm: assert_refused_over(OverAnother(comm)), 2, mode="threads")
    in_group(lambda: assert_refused_over(dpcore.TorchCommunicator()), 2, backend="gloo")
