"""What a schedule leaves in flight is there before anybody uses a gradient: every way that programs
have of using one, against one process with the whole batch."""

import copy
import io
import threading

import numpy
import pytest
import torch
from torch import nn

import dpcore
from tests.data_parallel.models import Small, assert_same_values, batch, part
from tests.data_parallel.own_schedules import (
    LEAVING,
    OnlyLaunches,
    WaitsAtForward,
    WaitsAtTheOptimizer,
)

CAP_MB = 0.01  # a few buckets


# ---- programs: each makes a step from the parameters ----------------------------------------


def clips_by_norm(parameters, **options):
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    def step(backward):
        optimizer.zero_grad()
        backward()
        nn.utils.clip_grad_norm_(parameters, 0.01, **options)
        optimizer.step()

    return step


def clips_by_norm_foreach(parameters):
    return clips_by_norm(parameters, foreach=True)


def clips_by_value(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.1)

    def step(backward):
        optimizer.zero_grad(set_to_none=False)
        backward()
        nn.utils.clip_grad_value_(parameters, 1e-3)
        optimizer.step()

    return step


def clips_by_hand(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.1)

    def step(backward):
        optimizer.zero_grad()
        backward()
        norm = sum(float(p.grad.square().sum()) for p in parameters) ** 0.5
        for p in parameters:
            p.grad *= 0.01 / norm
        optimizer.step()

    return step


def without_an_optimizer(parameters):
    def step(backward):
        for p in parameters:
            p.grad = None
        backward()
        with torch.no_grad():
            for p in parameters:
                p.add_(p.grad, alpha=-0.1)

    return step


def stepping(make):
    def program(parameters):
        optimizer = make(parameters)

        def step(backward):
            optimizer.zero_grad()
            backward()
            optimizer.step()

        return step

    return program


def with_a_closure(make):
    def program(parameters):
        optimizer = make(parameters)

        def step(backward):
            def closure():
                optimizer.zero_grad()
                return backward()

            optimizer.step(closure)

        return step

    return program


PROGRAMS = {
    "clip_grad_norm_": clips_by_norm,
    "clip_grad_norm_ foreach": clips_by_norm_foreach,
    "clip_grad_value_": clips_by_value,
    "clipping by hand": clips_by_hand,
    "no optimizer": without_an_optimizer,
    "sgd foreach": stepping(lambda p: torch.optim.SGD(p, lr=0.1, foreach=True)),
    "sgd fused": stepping(lambda p: torch.optim.SGD(p, lr=0.1, fused=True)),
    "adamw fused": stepping(lambda p: torch.optim.AdamW(p, lr=0.01, fused=True)),
    "sgd with a closure": with_a_closure(lambda p: torch.optim.SGD(p, lr=0.1)),
    "lbfgs": with_a_closure(lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3)),
}


def run(model, program, parameters, of_batch):
    step = program(parameters)
    for number in range(3):
        x, y = (of_batch(tensor) for tensor in batch(number))

        def backward(x=x, y=y):
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            return loss

        step(backward)


def trained(module):
    return [p for p in module.parameters() if p.requires_grad]


@pytest.mark.parametrize("schedule", LEAVING)
def test_every_program_trains_as_one_process_with_the_whole_batch(schedule):
    def body(comm):
        for name, program in PROGRAMS.items():
            alone = Small()
            run(alone, program, trained(alone), lambda tensor: tensor)
            model = dpcore.DataParallel(
                Small(), comm=comm, bucket_cap_mb=CAP_MB, schedule=schedule()
            )
            run(model, program, trained(model), lambda tensor: part(tensor, comm))
            try:
                assert_same_values(model.module, alone)
            except AssertionError as problem:
                raise AssertionError(f"{name}: {problem}") from None

    dpcore.spawn(body, 2, mode="threads")


@pytest.mark.parametrize("schedule", LEAVING)
def test_optimizers_that_step_within_backward(schedule):
    from torch.distributed.optim import _apply_optimizer_in_backward

    def body(comm):
        alone = Small()
        sgd = stepping(lambda p: torch.optim.SGD(p, lr=0.1))
        run(alone, sgd, trained(alone), lambda tensor: tensor)
        module = Small()
        _apply_optimizer_in_backward(torch.optim.SGD, trained(module), {"lr": 0.1})
        model = dpcore.DataParallel(module, comm=comm, bucket_cap_mb=CAP_MB, schedule=schedule())
        run(model, lambda _: lambda backward: backward(), (), lambda tensor: part(tensor, comm))
        assert_same_values(model.module, alone)

    dpcore.spawn(body, 2, mode="threads")


@pytest.mark.parametrize("schedule", ("bucketed", "sequential"))
def test_an_optimizer_in_a_hook_on_a_parameter_would_step_what_is_not_averaged(schedule):
    def body(comm):
        model = dpcore.DataParallel(nn.Linear(4, 4), comm=comm, schedule=schedule)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(_):
            optimizer.step()

        model.module.weight.register_post_accumulate_grad_hook(step)
        with model.no_sync():
            model(torch.ones(1, 4)).sum().backward()  # nobody averages here
        with pytest.raises(dpcore.Error, match=r"steps within backward.*not averaged yet"):
            model(torch.ones(1, 4)).sum().backward()

    dpcore.spawn(body, 2, mode="threads")


# ---- one gradient ----------------------------------------------------------------------------


def one_backward(comm, schedule):
    """Averages to 1.5 on two ranks."""
    module = nn.Linear(4, 1)
    model = dpcore.DataParallel(module, comm=comm, bucket_cap_mb=0, schedule=schedule)
    model(torch.full((1, 4), comm.rank + 1.0)).sum().backward()
    return model, module.weight


def reloaded(tensor):
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file)


USES = {
    "clone": lambda g: g.clone(),
    "numpy": lambda g: torch.from_numpy(g.numpy().copy()),
    "asarray": lambda g: torch.from_numpy(numpy.array(numpy.asarray(g))),
    "dlpack": lambda g: torch.from_dlpack(g).clone(),
    "stack": lambda g: torch.stack([g]),
    "item": lambda g: torch.tensor([float(g[0, 0])]),
    "view": lambda g: g.view(-1).clone(),
    "data": lambda g: g.data.clone(),
    "iterating": lambda g: torch.stack(list(g)),
    "deepcopy": copy.deepcopy,
    "save": reloaded,
    "copy_": lambda g: torch.empty(1, 4).copy_(g),
    "out": lambda g: torch.add(g, 0, out=torch.empty(1, 4)),
    "foreach": lambda g: torch._foreach_mul([g], 1.0)[0],
    "repr": lambda g: torch.tensor(eval(repr(g), {"tensor": lambda values: values})),
    "address": lambda g: g.data_ptr() and g.clone(),
}


def test_every_use_of_a_gradient_waits_for_it():
    def body(comm):
        for name, use in USES.items():
            _, weight = one_backward(comm, WaitsAtTheOptimizer())
            assert type(weight.grad) is not torch.Tensor
            seen = use(weight.grad)
            assert (seen == 1.5).all(), (name, seen)
            assert type(weight.grad) is torch.Tensor

    dpcore.spawn(body, 2, mode="threads")


def test_a_collective_of_the_program_waits_for_a_gradient_in_flight():
    def body(comm):
        _, weight = one_backward(comm, WaitsAtTheOptimizer())
        comm.all_reduce(weight.grad)
        assert (weight.grad == 3.0).all()

    dpcore.spawn(body, 2, mode="threads")


def test_without_optimizer_step_nothing_is_in_flight_after_backward():
    def body(comm):
        _, weight = one_backward(comm, OnlyLaunches())
        assert type(weight.grad) is torch.Tensor
        assert (weight.grad == 1.5).all()

    dpcore.spawn(body, 2, mode="threads")


def test_a_gradient_in_flight_is_the_same_object_before_and_after():
    def body(comm):
        model, weight = one_backward(comm, WaitsAtTheOptimizer())
        gradient = weight.grad
        assert isinstance(gradient, torch.Tensor)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert weight.grad is gradient
        assert type(gradient) is torch.Tensor

    dpcore.spawn(body, 2, mode="threads")


@pytest.mark.parametrize(
    ("option", "is_deferred"),
    (("gradient_as_bucket_view=False", False), ("find_unused_parameters=True", True)),
)
def test_what_cannot_be_deferred_is_waited_for_at_the_end_of_backward(option, is_deferred):
    """The map of used gradients overtakes the gradients, so these may stay in flight."""
    name, value = option.split("=")

    def body(comm):
        module = nn.Linear(4, 1)
        options = {name: value == "True"}
        model = dpcore.DataParallel(module, comm=comm, schedule=WaitsAtTheOptimizer(), **options)
        model(torch.full((1, 4), comm.rank + 1.0)).sum().backward()
        assert (type(module.weight.grad) is not torch.Tensor) == is_deferred
        assert (module.weight.grad == 1.5).all()

    dpcore.spawn(body, 2, mode="threads")


def test_a_gradient_whose_model_was_dropped_says_so():
    def body(comm):
        model, weight = one_backward(comm, WaitsAtTheOptimizer())
        del model
        with pytest.raises(dpcore.Error, match="keep the model until its optimizer has stepped"):
            weight.grad.sum()

    dpcore.spawn(body, 2, mode="threads")


def test_a_gradient_that_will_never_come_raises_at_its_use():
    in_flight = threading.Event()

    def body(comm):
        model = dpcore.DataParallel(nn.Linear(4, 4), comm=comm, schedule=WaitsAtTheOptimizer())
        if comm.rank == 1:
            assert in_flight.wait(20)
            comm.abort("no more data")
            return
        model(torch.ones(1, 4)).sum().backward()
        in_flight.set()
        for _ in range(2):
            with pytest.raises(dpcore.PeerLost, match=r"bucket 0 .*no more data"):
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    dpcore.spawn(body, 2, mode="threads")


def test_waiting_at_forward_only_is_an_error():
    def body(comm):
        with pytest.raises(
            dpcore.Error, match=r"'WaitsAtForward' leaves bucket 0 .* define optimizer_step"
        ):
            one_backward(comm, WaitsAtForward())

    dpcore.spawn(body, 2, mode="threads")


# ---- what is no schedule ---------------------------------------------------------------------


class MisspeltEvent(OnlyLaunches):
    def bucket_done(self, control, bucket):
        control.wait(bucket)


class WithAHelper(OnlyLaunches):
    @staticmethod
    def helper():
        """Public, and no event."""


class SkipsInSilence(dpcore.LaunchSchedule):
    def backward_end(self, control):
        for bucket in range(control.buckets):
            control.skip(bucket)


@pytest.mark.parametrize(
    ("schedule", "message"),
    (
        (OnlyLaunches, r"OnlyLaunches is a class; pass an instance, schedule=OnlyLaunches\(\)"),
        (MisspeltEvent(), r"MisspeltEvent: bucket_done is not an event, .*is it bucket_ready\?"),
        (WithAHelper(), "WithAHelper: helper is not an event, .* begin with an underscore"),
        (7, "expected a name or a dpcore.LaunchSchedule, not a int"),
    ),
    ids=("class", "misspelt", "helper", "number"),
)
def test_what_is_no_schedule_is_refused_by_name(schedule, message):
    def body(comm):
        with pytest.raises(dpcore.Unsupported, match=message):
            dpcore.DataParallel(nn.Linear(2, 2), comm=comm, schedule=schedule)

    dpcore.spawn(body, 1, mode="threads")


def test_an_event_may_be_an_attribute_of_the_schedule():
    def body(comm):
        seen = []
        schedule = OnlyLaunches()
        schedule.backward_end = lambda control: seen.append(control.buckets)
        one_backward(comm, schedule)
        assert seen == [2]

    dpcore.spawn(body, 1, mode="threads")


def test_leaving_out_communication_is_said():
    def body(comm):
        with pytest.raises(dpcore.Error, match=r"SkipsInSilence.*return False from is_exact"):
            one_backward(comm, SkipsInSilence())
        with pytest.warns(UserWarning, match="'oracle' .* gradients are not averaged") as told:
            model, _ = one_backward(comm, "oracle")
            model(torch.ones(1, 4)).sum().backward()
        assert len(told) == 1

    dpcore.spawn(body, 1, mode="threads")
