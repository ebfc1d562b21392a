"""What is refused, in which words, and what becomes of ranks that differ, raise, leave or die."""

import os
import re
import signal
import time

import pytest
import torch
from torch import nn

import dpcore as dp
from dpcore.comm.launch.spawn import run_processes
from tests.data_parallel.models import Small
from tests.local_updates.twin import distance, inner_sgd, outer_nesterov, outer_sgd, train


def alone(make):
    """In a world of one."""
    dp.spawn(make, 1, mode="threads")


def parts(model=None):
    model = model or Small()
    return model, inner_sgd(model.parameters())


def of_another_module(comm):
    dp.LocalSGD(Small(), parts()[1])


def outer_of_another_module(comm):
    dp.DiLoCo(*parts(), outer_sgd(Small().parameters()))


def outer_with_too_little(comm):
    model, optimizer = parts()
    dp.DiLoCo(model, optimizer, outer_sgd(model.first.parameters()))


def outer_is_the_inner(comm):
    model, optimizer = parts()
    dp.DiLoCo(model, optimizer, optimizer)


def in_data_parallel(comm):
    model = dp.DataParallel(Small())
    dp.LocalSGD(model, inner_sgd(model.parameters()))


def around_data_parallel(comm):
    model = nn.Sequential(dp.DataParallel(Small()))
    dp.LocalSGD(model, inner_sgd(model.parameters()))


def diloco_with(**options):
    def make(comm):
        model, optimizer = parts()
        dp.DiLoCo(model, optimizer, outer_sgd(model.parameters()), **options)

    return make


def across_steps(comm):
    model = dp.DataParallel(Small(), schedule="priority")
    optimizer = dp.DistributedOptimizer(inner_sgd(model.parameters()), model)
    dp.LocalSGD(model.module, optimizer)


def nothing_to_train(comm):
    model, optimizer = parts()
    model.requires_grad_(False)
    dp.LocalSGD(model, optimizer)


def lazy(comm):
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))
    dp.LocalSGD(model, inner_sgd(model[0].parameters()))


def complex_numbers(comm):
    model = nn.ParameterList([nn.Parameter(torch.zeros(3, dtype=torch.complex64))])
    dp.LocalSGD(model, inner_sgd(model.parameters()))


def without_memory(comm):
    model = nn.Linear(2, 2, device="meta")
    dp.LocalSGD(model, inner_sgd(model.parameters()))


def within_another(comm):
    model, optimizer = parts()
    with dp.LocalSGD(model, optimizer), dp.LocalSGD(model, optimizer):
        pass


def loaded_within(comm):
    model, optimizer = parts()
    with dp.LocalSGD(model, optimizer) as block:
        block.load_state_dict(block.state_dict())


def outer_lbfgs(comm):
    model, optimizer = parts()
    dp.DiLoCo(model, optimizer, torch.optim.LBFGS(model.parameters()))


REFUSED = [
    (of_another_module, "optimizer has 10 parameters, the first of shape [40, 6], that are not"),
    (outer_of_another_module, "DiLoCo: outer_optimizer has 10 parameters, the first of shape"),
    (outer_with_too_little, "outer_optimizer lacks norm.weight, norm.bias, shared.weight, sha"),
    (outer_lbfgs, "outer_optimizer is LBFGS, whose step() computes the loss again"),
    (outer_is_the_inner, "outer_optimizer is the optimizer itself; make another one"),
    (in_data_parallel, "LocalSGD: a DataParallel averages the gradients of every step already"),
    (around_data_parallel, "give the bare module"),
    (across_steps, "optimizer is a DistributedOptimizer, which steps each bucket at another time"),
    (lambda comm: dp.LocalSGD(*parts(), 0), "LocalSGD: sync_every=0: it must be a whole"),
    (lambda comm: dp.LocalSGD(*parts(), 2.5), "sync_every=2.5: it must be a whole number"),
    (diloco_with(fragments=0), "fragments=0: it must be a whole number, at least 1"),
    (diloco_with(fragments=9), "of which there are 8, and a step of its own among sync_every=64"),
    (diloco_with(fragments=5, sync_every=4), "sync_every=4: at most 4"),
    (diloco_with(fragment_sync_delay=-1), "fragment_sync_delay=-1: it must be a whole number"),
    (diloco_with(sync_every=8, fragment_sync_delay=8), "a fragment is sent every 8 steps"),
    (diloco_with(sync_every=8, fragments=2, fragment_sync_delay=4), "at most 3"),
    (diloco_with(bits=16), "bits=16: choose 32 or 8"),
    (diloco_with(fragment_update_alpha=1.5), "fragment_update_alpha=1.5 must be a number"),
    (diloco_with(fragment_update_alpha="x"), "fragment_update_alpha='x' must be a number"),
    (nothing_to_train, "no parameter that requires a gradient"),
    (lazy, "1.weight has no shape yet"),
    (complex_numbers, "0 is of torch.complex64; only real numbers"),
    (without_memory, "weight is without memory"),
    (within_another, "counted already, by the block around this one"),
    (loaded_within, "call load_state_dict() before the block, not within it"),
]


@pytest.mark.parametrize(
    ("make", "text"), REFUSED, ids=lambda value: value[:30] if isinstance(value, str) else ""
)
def test_refused_by_name(make, text):
    with pytest.raises(dp.Error, match=re.escape(text)):
        alone(make)


def test_other_things_than_modules_and_optimizers():
    model, optimizer = parts()
    with pytest.raises(TypeError, match="module is a SGD, not a"):
        dp.LocalSGD(optimizer, model)
    with pytest.raises(TypeError, match="optimizer is list, not a"):
        dp.LocalSGD(model, list(model.parameters()))
    with pytest.raises(TypeError, match="outer_optimizer is type, not a"):
        alone(lambda comm: dp.DiLoCo(model, optimizer, torch.optim.SGD))


def test_without_any_group():
    with pytest.raises(dp.Error, match=r"call dpcore\.init\(\)"):
        dp.LocalSGD(*parts())


def test_a_communicator_that_cannot_gather_later():
    class Few:
        def __init__(self, comm):
            self.comm, self.rank, self.world_size = comm, comm.rank, comm.world_size

        def all_reduce(self, tensor, op, *, async_op):
            return self.comm.all_reduce(tensor, op, async_op=async_op)

        def broadcast(self, tensor, root):
            self.comm.broadcast(tensor, root)

        def all_gather(self, output, input, *, sizes=None):
            self.comm.all_gather(output, input, sizes=sizes)

    def body(comm):
        model, optimizer = parts()
        outer = outer_sgd(model.parameters())
        with pytest.raises(dp.Unsupported, match="whose all_gather takes async_op"):
            dp.DiLoCo(model, optimizer, outer, 4, 1, 1, bits=8, comm=Few(comm))
        train(dp.DiLoCo(model, optimizer, outer, 4, bits=8, comm=Few(comm)), model, optimizer, comm)
        return model

    first, second = dp.spawn(body, 2, mode="threads")
    assert distance(first, second) == 0


# ---- ranks that differ -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("differ", "text"),
    [
        (lambda rank: {"sync_every": 4 + rank}, "Rank 0 has 'sync_every=4' where rank 1 has"),
        (lambda rank: {"bits": 32 if rank else 8}, "'bits=8'"),
        (lambda rank: {"fragments": 1 + rank}, "'fragments=1'"),
        (lambda rank: {"lr": 0.7 + rank}, "'lr': 0.7"),
        (lambda rank: {"freeze": bool(rank)}, "parameter that only rank 0 has|where rank 1 has"),
    ],
)
def test_options_and_models_that_differ(differ, text):
    def body(comm):
        options = differ(comm.rank)
        model, optimizer = parts()
        model.last.bias.requires_grad_(not options.pop("freeze", False))
        outer = torch.optim.SGD(model.parameters(), lr=options.pop("lr", 1.0))
        block = dp.DiLoCo(model, optimizer, outer, **options)
        with pytest.raises(dp.Mismatch, match=f"models or options of .*({text}).*Give DiLoCo"):
            block.__enter__()
        return True

    assert dp.spawn(body, 2, mode="threads") == [True, True]


def test_a_rank_that_leaves_the_block_earlier():
    """Its last sync meets another one of a rank that goes on: both are told."""

    def body(comm):
        model, optimizer = parts()
        block = dp.LocalSGD(model, optimizer, 4)
        try:
            train(block, model, optimizer, comm, range(8 if comm.rank == 0 else 6))
        except dp.Mismatch as problem:
            return str(problem)
        return ""

    for said, steps in zip(dp.spawn(body, 2, mode="threads"), (8, 6), strict=True):
        assert said.startswith(f"LocalSGD, after step {steps} of this rank: ")
        assert "all must make the same number of syncs" in said


def test_ranks_may_leave_within_the_same_interval():
    """One has had a batch more: the last sync takes all in."""

    def body(comm):
        model, optimizer = parts()
        train(dp.LocalSGD(model, optimizer, 4), model, optimizer, comm, range(4 + comm.rank))
        return model

    models = dp.spawn(body, 3, mode="threads")
    assert distance(models[0], models[2]) == distance(models[1], models[2]) == 0


def test_a_parameter_that_is_replaced():
    def body(comm):
        model, optimizer = parts()
        with dp.LocalSGD(model, optimizer, 1):
            model.last = nn.Linear(40, 3).double()
            optimizer.step()

    with pytest.raises(dp.Error, match=r"last\.weight, last\.bias, last\.weight.*Make a new one"):
        alone(body)


# ---- the end of the block --------------------------------------------------------------------


def test_an_exception_within_the_block():
    """Nothing is sent, each rank keeps its own, and the block may be entered again."""

    def body(comm):
        model, optimizer = parts()
        block = dp.DiLoCo(model, optimizer, outer_nesterov(model.parameters()), 4, 1, 2)
        with pytest.raises(ValueError, match="no more data"), block:
            for _ in range(5):  # the fragment is under way
                optimizer.zero_grad()
                model(torch.full((2, 6), comm.rank + 1.0).double()).square().sum().backward()
                optimizer.step()
            raise ValueError("no more data")
        own = Small()
        own.load_state_dict(model.state_dict())
        optimizer.step()  # nobody counts it
        assert block._steps == 5
        train(block, model, optimizer, comm)
        return own, model

    (own, model), (other_own, other) = dp.spawn(body, 2, mode="threads")
    assert distance(own, other_own) > 0
    assert distance(model, other) == 0


def test_no_step_no_sync():
    """An outer step without a way would still move the parameters, by the momentum."""

    def body(comm):
        model, optimizer = parts()
        outer = outer_nesterov(model.parameters())
        train(dp.DiLoCo(model, optimizer, outer, 4), model, optimizer, comm, range(4))
        before = Small()
        before.load_state_dict(model.state_dict())
        with dp.DiLoCo(model, optimizer, outer, 4) as block:
            block.sync()
        with pytest.raises(dp.Error, match=r"DiLoCo.sync\(\) comes within the block"):
            block.sync()
        return distance(model, before)

    assert dp.spawn(body, 2, mode="threads") == [0, 0]


def test_it_says_what_it_is():
    def body(comm):
        model, optimizer = parts()
        with dp.LocalSGD(model, optimizer, 2) as block:
            for _ in range(5):
                optimizer.step()
            assert repr(block) == "<LocalSGD(sync_every=2) after step 5, 2 syncs>"
        outer = dp.DiLoCo(model, optimizer, outer_sgd(model.parameters()), bits=8)
        assert "sync_every=64, fragments=1, fragment_sync_delay=0" in repr(outer)

    alone(body)


def test_sync_in_the_middle():
    def body(comm):
        model, optimizer = parts()
        found = Small()
        with dp.LocalSGD(model, optimizer, 100) as block:
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.full((2, 6), comm.rank + 1.0).double()).square().sum().backward()
                optimizer.step()
            block.sync()
            found.load_state_dict(model.state_dict())
            optimizer.step()
        return found, model

    (found, model), (other, _) = dp.spawn(body, 2, mode="threads")
    assert distance(found, other) == 0
    assert distance(found, model) > 0


# ---- deaths ----------------------------------------------------------------------------------


@pytest.mark.hurried
@pytest.mark.parametrize("delay", (0, 2))
@pytest.mark.parametrize("world", (2, 3))
def test_a_rank_that_dies_in_a_sync(world, delay):
    """The others raise PeerLost out of optimizer.step(); their own parameters are whole, and the
    outer ones those of the sync before."""

    def body(comm):
        model, optimizer = parts()
        outer = outer_sgd(model.parameters())
        block = dp.DiLoCo(model, optimizer, outer, 4, fragment_sync_delay=delay, comm=comm)
        if comm.rank == 1:  # in the second sync, when the others are in it
            start = block._start

            def die_in_the_second(fragment, number):
                if block._syncs == 1:
                    time.sleep(0.3)
                    os.kill(os.getpid(), signal.SIGKILL)
                return start(fragment, number)

            block._start = die_in_the_second
        before = []
        begin = 0.0
        try:
            with block:
                for _ in range(20):
                    begin = time.monotonic()
                    weight = model.first.weight
                    weight.grad = torch.full_like(weight, comm.rank + 1.0)
                    optimizer.step()
                    before.append(model.first.weight.detach().clone())
        except dp.PeerLost as problem:
            own = model.first.weight.detach() - before[-1]
            agreed = block._outer_parameters[0][0].detach() - before[3]
            return str(problem), own, agreed, time.monotonic() - begin, block._steps
        return None

    outcomes = run_processes(body, world, timeout=20)
    assert outcomes[1].exit_code == -signal.SIGKILL
    for survivor in (outcomes[0], *outcomes[2:]):
        assert survivor.error is None, survivor.traceback
        said, own, agreed, seconds, steps = survivor.result
        assert said.startswith(f"DiLoCo, after step {8 + delay} of this rank: ")
        assert "rank 1" in said and said.endswith("from before the sync or from after it")
        assert seconds < 5
        assert steps == 8 + delay
        # One step of its own further on, by its own gradient.
        torch.testing.assert_close(own, torch.full_like(own, -0.1 * (survivor.rank + 1)))
        if delay == 0:
            assert agreed.abs().max() < 1e-12


@pytest.mark.hurried
def test_a_rank_that_never_comes():
    def body(comm):
        model, optimizer = parts()
        with dp.LocalSGD(model, optimizer, 2):
            for _ in range(2):
                if comm.rank == 1:
                    time.sleep(2.5)
                optimizer.step()

    with pytest.raises(dp.Timeout, match=r"LocalSGD, after step 2 of this rank: .*rank 1"):
        dp.spawn(body, 2, mode="threads", timeout=1.5)
