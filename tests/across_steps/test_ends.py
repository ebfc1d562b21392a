"""What ends a step that is under way: a rank that dies, one that leaves out its step, a model that
changes."""

import copy
import gc
import os
import pickle
import signal
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import dpcore as dp
from dpcore.comm.launch.spawn import run_processes
from dpcore.reference.launches import ACROSS_STEPS


def layers(width=16):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))


def with_optimizer(comm, schedule, module):
    model = dp.DataParallel(module, comm=comm, schedule=schedule, bucket_cap_mb=0)
    optimizer = torch.optim.SGD(
        [parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1
    )
    if schedule in ACROSS_STEPS:
        return model, dp.DistributedOptimizer(optimizer, model)
    return model, optimizer


def train(model, optimizer, comm, steps=2):
    width = model.module[0].in_features
    for number in range(steps):
        optimizer.zero_grad()
        model(torch.full((2, width), comm.rank + number + 1.0)).tanh().sum().backward()
        optimizer.step()


@pytest.mark.hurried
def test_a_rank_that_dies_while_parameters_are_gathered():
    """Over a link on which the gathers take half a second."""

    def body(comm):
        model, optimizer = with_optimizer(comm, "zero1", layers(256))
        train(model, optimizer, comm, 1)
        model.flush()
        train(model, optimizer, comm, 1)
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        with pytest.raises(dp.PeerLost) as lost:
            model(torch.ones(2, 256))
        return str(lost.value)

    first = run_processes(body, 2, timeout=10, options={"link": "10mbit,1ms"})[0]
    assert first.error is None
    said = first.result
    assert "rank 1" in said
    assert "parameters of this rank lie between step 1 and step 2: buckets " in said
    assert "Go on from a checkpoint" in said


@pytest.mark.parametrize("schedule", ACROSS_STEPS)
def test_a_step_that_one_rank_leaves_out_is_a_mismatch(schedule):
    def body(comm):
        model, optimizer = with_optimizer(comm, schedule, layers())
        train(model, optimizer, comm)
        with pytest.raises(dp.Mismatch, match=r"left out optimizer\.step\(\)"):
            for number in range(2):
                optimizer.zero_grad()
                model(torch.ones(2, 16)).sum().backward()
                if comm.rank == 0 or number > 0:
                    optimizer.step()
            model.flush()

    dp.spawn(body, 2, mode="threads")


@pytest.mark.parametrize("schedule", ACROSS_STEPS)
def test_a_model_that_changes_is_taken_in_by_refresh(schedule):
    def body(comm):
        torch.set_num_threads(1)
        found = []
        start = layers()  # once: rank threads share torch's random numbers
        for one in ("bucketed", schedule):
            module = copy.deepcopy(start)
            model, optimizer = with_optimizer(comm, one, module)
            train(model, optimizer, comm)
            module[1].requires_grad_(False)
            model.refresh()
            trained = [p for p in model.parameters() if p.requires_grad]
            optimizer = torch.optim.SGD(trained, lr=0.1)
            if one in ACROSS_STEPS:
                with pytest.raises(dp.Unsupported, match=r"refresh\(\) has ended the Distributed"):
                    train(model, optimizer, comm)
                optimizer = dp.DistributedOptimizer(optimizer, model)
            optimizer.zero_grad()
            train(model, optimizer, comm)
            found.append(model.state_dict())
        for name, value in found[0].items():
            torch.testing.assert_close(found[1][name], value, msg=name)

    dp.spawn(body, 2, mode="threads")


@pytest.mark.parametrize("schedule", ACROSS_STEPS)
def test_a_copy_has_the_step_that_is_under_way_and_trains(schedule):
    def body(comm):
        model, optimizer = with_optimizer(None, schedule, layers())
        train(model, optimizer, comm)
        assert model._reducer.is_in_flight
        for copied in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
            for mine, its in zip(model.parameters(), copied.parameters(), strict=True):
                assert torch.equal(mine, its)
            plain = torch.optim.SGD(copied.parameters(), lr=0.1)
            train(copied, dp.DistributedOptimizer(plain, copied), comm)
            copied.flush()

    dp.spawn(body, 2, mode="threads")


def loaded(model, start):
    model.load_state_dict({f"module.{name}": value for name, value in start.items()})


def loaded_by_the_module(model, start):
    model.module.load_state_dict(start)


def loaded_after_rank_0_has_saved(model, start):
    """``state_dict()`` finishes the step, on that rank alone."""
    if model.group.rank == 0:
        model.state_dict()
    model.module.load_state_dict(start)


@pytest.mark.parametrize(
    "load", [loaded, loaded_by_the_module, loaded_after_rank_0_has_saved], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("schedule", ACROSS_STEPS)
def test_a_state_that_is_loaded_is_not_stepped(schedule, load):
    """By the step that was under way."""

    def body(comm):
        start = copy.deepcopy(layers().state_dict())
        model, optimizer = with_optimizer(comm, schedule, layers())
        train(model, optimizer, comm)
        assert model._reducer.is_in_flight
        load(model, start)
        optimizer.zero_grad()
        model(torch.ones(2, 16))
        for name, value in model.module.state_dict().items():
            assert torch.equal(value, start[name]), name

    dp.spawn(body, 2, mode="threads")


def dropped(model, optimizer):
    """As by a function that trains a module and returns."""


def dropped_in_a_cycle(model, optimizer):
    """As by a trainer that its callbacks know."""
    trainer = {"model": model, "optimizer": optimizer}
    trainer["trainer"] = trainer


@pytest.mark.parametrize("drop", [dropped, dropped_in_a_cycle], ids=lambda f: f.__name__)
@pytest.mark.parametrize("schedule", ACROSS_STEPS)
def test_a_module_without_its_wrapper_has_the_last_step_and_trains_again(schedule, drop):
    def trained(comm, one, module):
        model, optimizer = with_optimizer(comm, one, module)
        train(model, optimizer, comm)
        optimizer.zero_grad()
        assert one == "bucketed" or model._reducer.is_in_flight
        drop(model, optimizer)

    def body(comm):
        torch.set_num_threads(1)
        start = layers()
        found = []
        for one in ("bucketed", schedule):
            module = copy.deepcopy(start)
            for _ in range(2):
                trained(comm, one, module)
                gc.collect()
            found.append(module.state_dict())
        for name, value in found[0].items():
            torch.testing.assert_close(found[1][name], value, msg=name)

    for outcome in run_processes(body, 2, timeout=20):
        assert outcome.error is None


@pytest.mark.parametrize("schedule", ACROSS_STEPS)
def test_the_end_of_a_model_waits_only_for_what_is_in_flight(schedule):
    """Where garbage is collected, a lock of torch may be held: ranks as threads have waited for it
    without end, each for the other's."""
    idle = SimpleNamespace(is_in_flight=False, has_failed=False, stop_listening=lambda: None)

    def body(comm):
        model, _ = with_optimizer(comm, schedule, layers())
        model._across._model_is_gone(idle)  # which has no flush()

    dp.spawn(body, 1, mode="threads")
