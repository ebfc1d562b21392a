"""Data parallel training with one mistake each, of the kinds that people make.

Each is a `wrap(module, comm)` for tests/data_parallel/contract.py. A mistake is made where people
make it: in the group that reduces, in the schedule, around forward, or in the hook. In all of them
training goes on and the loss falls.
"""

import torch

import dpcore
from dpcore.ddp.wrapper import completion
from dpcore.ddp.wrapper.arguments import make_equal
from dpcore.reference.ladder import PerParameterDDP
from tests.data_parallel.own_schedules import WaitsAtTheOptimizer

CAP_MB = 0.01


class Done:
    def wait(self):
        pass


class Group:
    """A communicator to make mistakes in."""

    def __init__(self, comm):
        self.comm = comm
        self.rank, self.world_size = comm.rank, comm.world_size

    def all_reduce(self, tensor, op, *, async_op):
        return self.comm.all_reduce(tensor, op, async_op=async_op)

    def broadcast(self, tensor, root):
        self.comm.broadcast(tensor, root)

    def all_gather(self, output, input, *, sizes=None):
        self.comm.all_gather(output, input, sizes=sizes)


def with_group(group, **options):
    def wrap(module, comm):
        return dpcore.DataParallel(module, comm=group(comm), bucket_cap_mb=CAP_MB, **options)

    return wrap


def with_class(cls, **options):
    def wrap(module, comm):
        return cls(module, comm=comm, bucket_cap_mb=CAP_MB, **options)

    return wrap


# ---- in the group ----------------------------------------------------------------------------


class NeverReduces(Group):
    def all_reduce(self, tensor, op, *, async_op):
        return Done()


class Sums(Group):
    def all_reduce(self, tensor, op, *, async_op):
        return self.comm.all_reduce(tensor, "sum", async_op=async_op)


class AveragesTwice(Group):
    def all_reduce(self, tensor, op, *, async_op):
        tensor.div_(self.world_size)
        return self.comm.all_reduce(tensor, op, async_op=async_op)


class ReducesEveryOtherTime(Group):
    """As a forgotten reset after the first step would."""

    count = 0

    def all_reduce(self, tensor, op, *, async_op):
        self.count += 1
        return self.comm.all_reduce(tensor, op, async_op=async_op) if self.count % 2 else Done()


class ForgetsTheLastElement(Group):
    """An end that is off by one."""

    def all_reduce(self, tensor, op, *, async_op):
        return self.comm.all_reduce(tensor[: tensor.numel() - 8], op, async_op=async_op)


class BroadcastsNothing(Group):
    def broadcast(self, tensor, root):
        pass


# ---- in the schedule -------------------------------------------------------------------------


class SkipsTheLastBucket(dpcore.LaunchSchedule):
    def is_exact(self):
        return False

    def backward_end(self, control):
        for bucket in range(control.buckets - 1):
            control.launch(bucket)
        control.skip(control.buckets - 1)
        for bucket in range(control.buckets):
            control.wait(bucket)


class WaitsForAllBeforeLaunching(dpcore.LaunchSchedule):
    """Called bucketed, and sequential in truth."""

    def backward_end(self, control):
        for bucket in range(control.buckets):
            control.launch(bucket)
        control.wait_for_all()


class OrderByRank(dpcore.LaunchSchedule):
    def __init__(self, rank):
        self.rank = rank

    def order(self, buckets):
        numbers = list(range(buckets))
        return numbers[self.rank % buckets :] + numbers[: self.rank % buckets]

    def bucket_ready(self, control, bucket):
        control.launch(bucket)

    def backward_end(self, control):
        control.wait_for_all()


def with_schedule(schedule):
    def wrap(module, comm):
        made = schedule(comm.rank) if schedule is OrderByRank else schedule()
        return dpcore.DataParallel(module, comm=comm, bucket_cap_mb=CAP_MB, schedule=made)

    return wrap


# ---- around forward and in the hook ----------------------------------------------------------


class RebuildLosesGradients(dpcore.DataParallel):
    def _rebuild_buckets(self):
        self.module.zero_grad()
        super()._rebuild_buckets()


class RebuildsByOwnOrder(dpcore.DataParallel):
    """Of this rank's arrival, not rank 0's."""

    def _rebuild_buckets(self):
        self._reducer.rebuild(self._reducer.arrival_order, [])


class IgnoresNoSync(dpcore.DataParallel):
    def __setattr__(self, name, value):
        super().__setattr__(name, True if name == "require_backward_grad_sync" else value)


class NeverSynchronisesAgain(dpcore.DataParallel):
    """After the first no_sync()."""

    def __setattr__(self, name, value):
        already = self.__dict__.get(name) is False
        is_flag = name == "require_backward_grad_sync"
        super().__setattr__(name, False if is_flag and already else value)


class NeverAsksTheOptimizer(dpcore.DataParallel):
    """As torch's: what was missed is seen at the next forward."""

    def _set_up(self, trained):
        super()._set_up(trained)
        completion._models.discard(self)


class GradientsAreReadInFlight(dpcore.DataParallel):
    """Nobody but the optimizer waits for what the schedule left."""

    def _set_up(self, trained):
        super()._set_up(trained)
        self._reducer.defer_by(lambda in_flight: True)


class LooksAtParametersOnce(dpcore.DataParallel):
    """As torch's: in the constructor."""

    def _set_up(self, trained):
        super()._set_up(trained)
        self._watch.check = lambda learns: False


class ComparesShapesOnly(dpcore.DataParallel):
    """As torch's, which counts parameters of one shape as the same."""

    def __init__(self, module, **options):
        super().__init__(module, init_sync=False, **options)
        first = next(parameter for parameter in module.parameters() if parameter.requires_grad)
        make_equal(self, [("weight", first)], (), buffers=True)


class ReducesTheParameter(PerParameterDDP):
    """A hook gets the parameter, and this takes it for the gradient."""

    def gradient_ready(self, parameter):
        if self.averages:
            with torch.no_grad():
                self.works.append(self.comm.all_reduce(parameter.data, "mean", async_op=True))


MUTANTS = {
    "never reduces": with_group(NeverReduces),
    "sums": with_group(Sums),
    "averages twice": with_group(AveragesTwice),
    "reduces every other time": with_group(ReducesEveryOtherTime),
    "forgets the last elements": with_group(ForgetsTheLastElement),
    "broadcasts nothing": with_group(BroadcastsNothing),
    "begins with its own values": with_class(dpcore.DataParallel, init_sync=False),
    "forgets buffers": with_class(dpcore.DataParallel, forward_sync_buffers=False),
    "skips the last bucket": with_schedule(SkipsTheLastBucket),
    "waits for all before launching": with_schedule(WaitsForAllBeforeLaunching),
    "gradients are read in flight": with_class(
        GradientsAreReadInFlight, schedule=WaitsAtTheOptimizer()
    ),
    "bucket order by rank": with_schedule(OrderByRank),
    "rebuild loses accumulated gradients": with_class(RebuildLosesGradients),
    "rebuilds by its own order": with_class(RebuildsByOwnOrder),
    "ignores no_sync": with_class(IgnoresNoSync),
    "never synchronises again": with_class(NeverSynchronisesAgain),
    "never asks the optimizer": with_class(NeverAsksTheOptimizer),
    "looks at parameters once": with_class(LooksAtParametersOnce),
    "compares shapes only": with_class(ComparesShapesOnly),
    "hook on the parameter": ReducesTheParameter,
    "communicates nothing": with_class(dpcore.DataParallel, schedule="oracle"),
}
