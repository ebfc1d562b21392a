"""What docs/across_steps.md says of parameters, gradients and the optimizer."""

import copy

import pytest
import torch
from torch import nn

import dpcore
from tests.across_steps.test_equal import SCHEDULES, WHOLE
from tests.data_parallel.models import seeded


def made(comm, schedule, optimizer=torch.optim.AdamW):
    module = seeded(lambda: nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 3)))
    model = dpcore.DataParallel(module, comm=comm, schedule=schedule)
    return model, dpcore.DistributedOptimizer(optimizer(model.parameters(), lr=0.1), model)


def backward(model):
    model(torch.ones(4, 6)).square().mean().backward()


def two_steps(model, optimizer):
    for _ in range(2):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()


def in_ranks(body, *arguments):
    return dpcore.spawn(body, 2, *arguments, mode="threads", timeout=20)


@pytest.mark.parametrize("schedule", WHOLE)
def test_a_kept_list_lags_one_step(schedule):
    def body(comm):
        model, optimizer = made(comm, schedule)
        kept = list(model.parameters())
        two_steps(model, optimizer)
        before = [parameter.clone() for parameter in kept]
        asked = [parameter.clone() for parameter in model.parameters()]
        for old, new, parameter in zip(before, asked, kept, strict=True):
            assert not torch.equal(old, new)
            assert torch.equal(parameter, new)

    in_ranks(body)


def evaluate(model):
    with torch.no_grad():
        model(torch.ones(1, 6))


SHOW = {
    "parameters": lambda model: list(model.parameters()),
    "state_dict": lambda model: model.state_dict(),
    "state_dict of the module": lambda model: model.module.state_dict(),
    "eval": lambda model: model.eval(),
    "flush": lambda model: model.flush(),
    "forward": evaluate,
}


@pytest.mark.parametrize("show", SHOW)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_whoever_asks_the_model_sees_the_last_step(schedule, show):
    def body(comm):
        model, optimizer = made(comm, schedule)
        weights = list(model.parameters())
        two_steps(model, optimizer)
        SHOW[show](model)
        shown = [weight.detach().clone() for weight in weights]
        model.flush()
        assert all(map(torch.equal, shown, weights))
        return shown

    first, second = in_ranks(body)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_full_gradients_are_those_of_bucketed(schedule):
    def body(comm):
        model, _ = made(comm, schedule)
        other = dpcore.DataParallel(
            seeded(lambda: nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 3))), comm=comm
        )
        for one in (model, other):
            backward(one)
        mine, others = model.full_gradients(), other.full_gradients()
        assert list(mine) == list(others) == ["0.weight", "0.bias", "1.weight", "1.bias"]
        assert all(torch.equal(mine[name], others[name]) for name in mine)

    in_ranks(body)


@pytest.mark.parametrize("schedule", ["zero1", "zero2"])
def test_a_gradient_in_parts_says_what_to_call_instead(schedule):
    def body(comm):
        model, _ = made(comm, schedule)
        backward(model)
        gradient = model.module[0].weight.grad
        assert gradient.shape == (9, 6) and gradient.dtype == torch.float32
        for read in ("norm", "data", "T", "mT", "real"):
            with pytest.raises(dpcore.Unsupported, match=r"clip_grad_norm_.*full_gradients"):
                getattr(gradient, read)()

    in_ranks(body)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_module_that_stays_what_it_is_may_be_converted_after_a_step(schedule):
    def body(comm):
        def weights(between):
            model, optimizer = made(comm, schedule)
            for _ in range(3):
                optimizer.zero_grad()
                backward(model)
                optimizer.step()
                between(model)
            return model.state_dict()

        plain = weights(lambda model: None)
        converted = weights(lambda model: model.to("cpu").float().module.to(torch.float32))
        assert all(torch.equal(plain[name], converted[name]) for name in plain)

    in_ranks(body)


@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_with_gradients_that_were_not_sent(schedule, steps_before):
    """With `bucketed` each rank then steps by its own gradients. A rank that keeps a part of the
    optimizer's state can't."""

    def body(comm):
        model, optimizer = made(comm, schedule, torch.optim.SGD)
        for _ in range(steps_before):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
        before = copy.deepcopy(model.state_dict())
        optimizer.zero_grad()
        with model.no_sync():
            backward(model)
        if schedule in WHOLE:
            gradients = {f"module.{name}": p.grad for name, p in model.module.named_parameters()}
            optimizer.step()
            for name, value in model.state_dict().items():
                torch.testing.assert_close(value, before[name] - 0.1 * gradients[name])
        else:
            with pytest.raises(dpcore.Error, match=r"not sent; .*outside no_sync\(\)"):
                optimizer.step()

    in_ranks(body)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_optimizer_may_have_frozen_parameters(schedule):
    def body(comm):
        module = seeded(lambda: nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 3)))
        module[0].requires_grad_(False)
        start = copy.deepcopy(module.state_dict())
        model = dpcore.DataParallel(module, comm=comm, schedule=schedule)
        plain = torch.optim.AdamW(model.parameters(), lr=0.1)
        two_steps(model, dpcore.DistributedOptimizer(plain, model))
        for name, value in model.module.state_dict().items():
            assert torch.equal(value, start[name]) == name.startswith("0")

    in_ranks(body)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_state_of_another_type_is_converted(schedule):
    """As torch's optimizers do."""

    def body(comm):
        model, optimizer = made(comm, schedule)
        two_steps(model, optimizer)
        saved = optimizer.full_state_dict()
        module = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 3)).double()
        wide = dpcore.DataParallel(module, comm=comm, schedule=schedule)
        other = dpcore.DistributedOptimizer(torch.optim.AdamW(wide.parameters()), wide)
        other.load_state_dict(saved)
        wide(torch.ones(4, 6, dtype=torch.float64)).sum().backward()
        other.step()
        state = other.full_state_dict()["state"][0]
        assert (state["step"].item(), state["exp_avg"].dtype) == (3, torch.float64)

    in_ranks(body)


class Own(torch.optim.SGD):
    """Nobody knows which kind it is."""


class PerParameter(torch.optim.SGD):
    per_parameter = True


class ElementWise(torch.optim.SGD):
    element_wise = True


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_optimizer_of_ones_own_says_which_kind_it_is(schedule):
    def body(comm):
        with pytest.raises(dpcore.Unsupported, match=r"Own\.element_wise = True"):
            made(comm, schedule, Own)
        two_steps(*made(comm, schedule, ElementWise))
        if schedule in WHOLE:
            two_steps(*made(comm, schedule, PerParameter))
        else:
            with pytest.raises(dpcore.Unsupported, match="use schedule='priority' or 'dear'"):
                made(comm, schedule, PerParameter)

    in_ranks(body)


def without_the_line(model, optimizer):
    other = dpcore.DataParallel(nn.Linear(6, 3), comm=model.group, schedule=model.schedule)
    backward(other)


def a_closure(model, optimizer):
    backward(model)
    optimizer.step(lambda: None)


def a_second_optimizer(model, optimizer):
    dpcore.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)


def an_optimizer_that_steps_all_at_once(model, optimizer):
    dpcore.DistributedOptimizer(torch.optim.LBFGS(model.parameters()), model)


def a_model_of_another_schedule(model, optimizer):
    other = dpcore.DataParallel(nn.Linear(6, 3), comm=model.group, schedule="bucketed")
    dpcore.DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=0.1), other)


def a_second_backward(model, optimizer):
    loss = model(torch.ones(4, 6)).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def a_hook(model, optimizer):
    model.register_comm_hook(None, lambda state, bucket: None)


def state_of_one_rank(model, optimizer):
    """A script that saves state_dict() on rank 0, and loads it before it wraps the optimizer."""
    plain = torch.optim.SGD(nn.Linear(6, 3).parameters(), lr=0.1, momentum=0.9)
    part = {0: {"momentum_buffer": torch.ones(9)}, 1: {"momentum_buffer": torch.ones(3)}}
    plain.load_state_dict({"state": part, "param_groups": plain.state_dict()["param_groups"]})
    dpcore.DistributedOptimizer(plain, model)


def state_of_one_rank_without_its_name(model, optimizer):
    """As torch.distributed.checkpoint saves it, and loads it on all ranks."""
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    saved = optimizer.full_state_dict()
    for values in saved["state"].values():
        values["exp_avg"] = values["exp_avg"].flatten()[:-1]
    optimizer.load_state_dict(saved)


def a_conversion(model, optimizer):
    two_steps(model, optimizer)
    optimizer.zero_grad()
    model.double()
    model(torch.ones(4, 6, dtype=torch.float64))


def a_norm_of_order_zero(model, optimizer):
    backward(model)
    optimizer.clip_grad_norm_(1, norm_type=0)


def a_conversion_behind_the_wrapper(model, optimizer):
    backward(model)
    optimizer.step()
    model.module.half()
    model(torch.ones(4, 6, dtype=torch.float16))


REFUSED = {
    without_the_line: "optimizer = dpcore.DistributedOptimizer",
    a_closure: r"call step\(\) without one",
    a_second_optimizer: "as parameter groups",
    an_optimizer_that_steps_all_at_once: "LBFGS steps all parameters together",
    a_model_of_another_schedule: "'zero1' or 'zero2', and this is schedule='bucketed'",
    a_second_backward: r"no_sync\(\)",
    a_hook: "hook",
    a_norm_of_order_zero: "norm_type=0 must be positive",
    a_conversion: "was Float on cpu when the model was wrapped",
    a_conversion_behind_the_wrapper: r"convert the module, call|call flush\(\) .* before",
    state_of_one_rank: r"\[3, 6\] has the shape \[9\], as in the part of one rank",
    state_of_one_rank_without_its_name: r"\], as in the part of one rank",
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_largest_gradient_has_a_name(schedule):
    """As in torch, whose documents write the order of that norm "inf"."""

    def body(comm):
        model, optimizer = made(comm, schedule)
        backward(model)
        norms = [optimizer.clip_grad_norm_(1e9, norm) for norm in ("inf", float("inf"), 2)]
        assert norms[0] == norms[1] != norms[2]

    in_ranks(body)


@pytest.mark.parametrize("mistake", REFUSED, ids=lambda mistake: mistake.__name__)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_refused_by_name(schedule, mistake):
    def body(comm):
        with pytest.raises(dpcore.Error, match=REFUSED[mistake]):
            mistake(*made(comm, schedule))

    in_ranks(body)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_state_by_names_is_loaded(schedule):
    """torch matches parameters by their place in the groups: torch.distributed.checkpoint writes
    names where torch.optim writes numbers."""

    def body(comm):
        model, optimizer = made(comm, schedule)
        two_steps(model, optimizer)
        optimizer.zero_grad()
        before = copy.deepcopy(optimizer.full_state_dict())
        names = [name for name, _ in model.named_parameters()]
        named = {
            "state": {names[n]: copy.deepcopy(values) for n, values in before["state"].items()},
            "param_groups": [{**before["param_groups"][0], "params": names}],
        }
        named["state"]["of no group"] = {}
        two_steps(model, optimizer)
        optimizer.zero_grad()
        optimizer.load_state_dict(named)
        after = optimizer.full_state_dict()
        for number, values in before["state"].items():
            for key, value in values.items():
                assert torch.equal(after["state"][number][key], value), (names[number], key)

    in_ranks(body)


def test_a_norm_of_complex_gradients_is_real():
    def body(comm):
        norms = []
        for schedule in SCHEDULES:
            module = nn.Linear(4, 4, dtype=torch.complex64)
            model = dpcore.DataParallel(module, comm=comm, schedule=schedule)
            plain = torch.optim.Adam(model.parameters())
            optimizer = dpcore.DistributedOptimizer(plain, model)
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.fill_(1)
            model(torch.ones(2, 4, dtype=torch.complex64)).abs().sum().backward()
            norms.append(optimizer.clip_grad_norm_(0.5))
            optimizer.step()
        assert {norm.dtype for norm in norms} == {torch.float32}
        torch.testing.assert_close(torch.stack(norms), norms[0].expand(len(norms)))

    in_ranks(body)
