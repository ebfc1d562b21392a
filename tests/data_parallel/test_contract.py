"""One contract for DataParallel, its schedules, and the ladder of plain Python."""

import inspect
from functools import partial

import pytest
import torch
from torch import nn

import dpcore
from dpcore.reference.ladder import LADDER, BucketedDDP
from tests.data_parallel import contract
from tests.data_parallel.models import Small
from tests.data_parallel.own_schedules import LEAVING

CAP_MB = 0.01  # a few buckets


def data_parallel(schedule, module, comm):
    return dpcore.DataParallel(module, comm=comm, bucket_cap_mb=CAP_MB, schedule=schedule)


def own_schedule(kind, module, comm):
    return data_parallel(kind(), module, comm)


WRAPPERS = {
    schedule: partial(data_parallel, schedule)
    for schedule in ("bucketed", "sequential", "per_parameter", "flat")
}
WRAPPERS |= {kind.__name__: partial(own_schedule, kind) for kind in LEAVING}
WRAPPERS |= {cls.__name__: cls for cls in LADDER if cls is not BucketedDDP}
WRAPPERS["BucketedDDP"] = partial(BucketedDDP, bucket_cap_mb=CAP_MB)
OVERLAPPING = ("bucketed", "per_parameter", "PerParameterDDP", "BucketedDDP")
OVERLAPPING += tuple(kind.__name__ for kind in LEAVING)


def holds(name, check):
    if check is contract.sends_while_backward_goes_on:
        return name in OVERLAPPING
    # The simplest with overlap relies on one order of arrival.
    by_arrival = check is contract.pairs_gradients_by_parameter_and_not_by_arrival
    return not (by_arrival and name == "PerParameterDDP")


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize(
    "check", contract.VALUES + contract.BEHAVIOUR, ids=lambda check: check.__name__
)
def test_contract(name, check):
    def body(comm):
        check(comm, WRAPPERS[name])

    if holds(name, check):
        dpcore.spawn(body, 3, mode="threads")
    else:
        with pytest.raises((AssertionError, dpcore.Error)):
            dpcore.spawn(body, 3, mode="threads", timeout=2)


@pytest.mark.parametrize("check", contract.GUARDS, ids=lambda check: check.__name__)
def test_faults_are_not_silent(check):
    dpcore.spawn(check, 3, partial(data_parallel, "bucketed"), mode="threads")


@pytest.mark.parametrize("cls", LADDER)
def test_the_end_of_an_inner_no_sync_does_not_end_the_outer(cls):
    def body(comm):
        watching = contract.Watching(comm)
        model = cls(Small(), watching)
        with model.no_sync():
            with model.no_sync():
                pass
            contract.loss_of(model, 0, comm).backward()
            assert not model.averages and not watching.log
        assert model.averages

    dpcore.spawn(body, 2, mode="threads")


def test_every_step_of_the_ladder_is_short():
    for cls in LADDER:
        assert len(inspect.getsource(cls).splitlines()) < 80


def test_a_buffer_with_gaps_that_is_alone_of_its_type():
    def body(comm):
        module = nn.Linear(8, 4)
        module.register_buffer("every_second", (torch.arange(10) + comm.rank)[::2])
        module.register_buffer("column", (torch.zeros(5, 3, dtype=torch.float64) + comm.rank)[:, 1])
        model = dpcore.DataParallel(module, comm=comm)
        return model.module.every_second.tolist(), model.module.column.unique().tolist()

    assert dpcore.spawn(body, 2, mode="threads") == [([0, 2, 4, 6, 8], [0.0])] * 2
