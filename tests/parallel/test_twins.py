"""The twins in dpcore/reference against one process of torch in float64."""

import os
import re
import signal
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, layer_norm

import dpcore as dp
from dpcore.comm.launch.spawn import run_processes
from dpcore.parallel.pipeline_plans import PipelinePlan
from dpcore.reference.element_wise import adamw
from dpcore.reference.pipeline import Pipeline
from dpcore.reference.tensor_parallel import (
    ColumnParallel,
    Norm,
    RowParallel,
    VocabularyParallelCrossEntropy,
    part_of,
)
from dpcore.reference.zero import Zero, formula
from tests.faults.tries import in_time, three_tries

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def threads(body, world, *args, **options):
    return dp.spawn(body, world, *args, mode="threads", **options)


def numbers(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


# ---- tensor parallel -----------------------------------------------------------------------------

TOKENS, WIDTH, INNER, WORDS = 8, 6, 12, 20


@pytest.mark.parametrize("by_tokens", [False, True])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_shared_layers_are_those_of_one_process(world, by_tokens):
    norm, first, second = numbers(1, WIDTH), numbers(2, INNER, WIDTH), numbers(3, WIDTH, INNER)
    biases, words = (numbers(4, INNER), numbers(5, WIDTH)), numbers(6, WORDS, WIDTH)
    x, targets = numbers(7, TOKENS, WIDTH), np.arange(TOKENS) * 2 % WORDS

    def body(comm):
        mine = part_of(TOKENS, comm) if by_tokens else slice(None)
        normed = Norm(norm, comm, by_tokens)
        up = ColumnParallel(first, biases[0], comm, by_tokens)
        down = RowParallel(second, biases[1], comm, by_tokens)
        head = ColumnParallel(words, np.zeros(WORDS), comm, by_tokens)
        judge = VocabularyParallelCrossEntropy(WORDS, comm)
        inner = up.forward(normed.forward(x[mine]))
        logits = head.forward(down.forward(np.tanh(inner)))
        loss = judge.forward(logits, targets)
        dinner = down.backward(head.backward(judge.backward()))
        dx = normed.backward(up.backward(dinner * (1 - np.tanh(inner) ** 2)))
        layers = (normed.weight_gradient, up.weight_gradient, up.bias_gradient)
        layers += (down.weight_gradient, down.bias_gradient, head.weight_gradient, dx)
        return loss, layers, comm.stats()

    at = {n: torch.tensor(v, requires_grad=True) for n, v in enumerate((norm, first, biases[0]))}
    at |= {3 + n: torch.tensor(v, requires_grad=True) for n, v in enumerate((second, biases[1]))}
    at |= {5: torch.tensor(words, requires_grad=True), 6: torch.tensor(x, requires_grad=True)}
    hidden = torch.tanh(layer_norm(at[6], (WIDTH,), at[0]) @ at[1].T + at[2])
    loss = cross_entropy((hidden @ at[3].T + at[4]) @ at[5].T, torch.tensor(targets))
    loss.backward()
    found = threads(body, world)
    for said, _, _ in found:
        assert said == pytest.approx(loss.item(), abs=1e-12)
    for number, axis in enumerate((None, 0, 0, 1, None, 0, 0 if by_tokens else None)):
        parts = [layers[number] for _, layers, _ in found]
        for part in parts if axis is None else [np.concatenate(parts, axis)]:
            np.testing.assert_allclose(part, at[number].grad.numpy(), **CLOSE)
    stats = found[0][2]  # by tokens, nothing of an activation's size is all-reduced
    counts = {name: sum(path["operations"] for path in stats.get(name, {}).values())
              for name in ("all_reduce", "reduce_scatter", "all_gather")}  # fmt: skip
    assert counts == (
        {"all_reduce": 5, "reduce_scatter": 3, "all_gather": 3}
        if by_tokens
        else {"all_reduce": 6, "reduce_scatter": 0, "all_gather": 0}
    )


def test_what_cannot_be_cut_is_refused():
    def body(comm):
        with pytest.raises(ValueError, match="7 can't be cut into 2"):
            ColumnParallel(numbers(1, 7, 2), numbers(1, 7), comm)

    threads(body, 2)


# ---- pipeline ------------------------------------------------------------------------------------


def stages_of(count):
    made = torch.Generator().manual_seed(3)
    stages = []
    for _ in range(count):
        layer = nn.utils.skip_init(nn.Linear, 4, 4, dtype=torch.float64)
        for parameter in layer.parameters():
            nn.init.normal_(parameter, generator=made)
        stages.append(nn.Sequential(layer, nn.Tanh()))
    return stages


def batch_of(rows):
    made = torch.Generator().manual_seed(4)
    return [torch.randn(sum(rows), 4, generator=made, dtype=torch.float64) for _ in range(2)]


PLANS = {
    "GPipe": {"stages": 3, "microbatches": 4},
    "1F1B": {"stages": 3, "microbatches": 5},
    "Interleaved1F1B": {"stages": 4, "microbatches": 4, "ranks": 2},
}
V_SHAPED = "0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0"  # neighbours on one rank send no message


@pytest.mark.parametrize("name", [*PLANS, "V"])
def test_a_pipeline_is_one_process(name):
    """Also with micro-batches of different sizes: the loss is the mean over the batch."""
    if name == "V":
        plan = PipelinePlan.from_csv(V_SHAPED, "V")
    else:
        plan = dp.pipeline_plan(name, **PLANS[name])
    rows = [2 + m % 3 for m in range(plan.microbatches)]
    x, y = batch_of(rows)
    one = nn.Sequential(*stages_of(plan.stages))
    loss = nn.functional.mse_loss(one(x), y)
    loss.backward()

    def body(comm):
        stages = stages_of(plan.stages)
        mine = {s: stages[s] for s, rank in plan.rank_of.items() if rank == comm.rank}
        pipe = Pipeline(plan, mine, comm, lambda m: x.new_empty(rows[m], 4), nn.functional.mse_loss)
        said = pipe.step(x.split(rows), y.split(rows))
        assert not pipe.kept and not pipe.here and not pipe.sending
        return said, {s: [p.grad for p in stage.parameters()] for s, stage in mine.items()}

    found = threads(body, len(plan.actions))
    losses = [said for said, _ in found if said is not None]
    assert len(losses) == 1
    torch.testing.assert_close(losses[0], loss.detach(), **CLOSE)
    gradients = {stage: grads for _, of_rank in found for stage, grads in of_rank.items()}
    for stage, module in enumerate(one):
        for got, wanted in zip(gradients[stage], module.parameters(), strict=True):
            torch.testing.assert_close(got, wanted.grad, **CLOSE)


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None, None


@pytest.mark.alone
@three_tries
@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_the_measured_bubble_is_the_priced_one(name, tmp_path):
    plan = dp.pipeline_plan(name, stages=3, microbatches=4)
    forward, backward = 0.04, 0.08

    def body(comm):
        def stage(x):
            return Sleep.apply(x * 1.0, forward, backward)

        x = list(torch.ones(4, 1, 2))
        pipe = None
        comm.barrier()
        with dp.trace(tmp_path / "run.json", comm=comm) as trace:
            pipe = Pipeline(
                plan, {comm.rank: stage}, comm, lambda m: torch.empty(1, 2),
                nn.functional.mse_loss, trace.span,
            )  # fmt: skip
            if comm.rank == 0:
                x = [tensor.requires_grad_() for tensor in x]
            pipe.step(x, x)
        return [e for e in trace.events if e.kind == "compute"]

    found = threads(body, 3)
    names = [[e.name for e in events] for events in found]
    assert names == [[str(action) for action in row] for row in plan.actions]
    begin = min(e.begin_ns for events in found for e in events)
    end = max(e.end_ns for events in found for e in events)
    busy = sum(e.end_ns - e.begin_ns for events in found for e in events)
    measured = 1 - busy / (3 * (end - begin))
    priced = plan.price(forward, backward).bubble
    in_time(abs(measured / priced - 1) < 0.05, f"{measured} and {priced}")


def test_a_lost_rank_is_named_with_stage_and_micro_batch():
    plan = dp.pipeline_plan("1F1B", stages=2, microbatches=3)

    def body(comm):
        def breaks(x):
            raise KeyError("broken") if comm.rank else AssertionError

        modules = {comm.rank: breaks if comm.rank else nn.Linear(2, 2)}
        pipe = Pipeline(plan, modules, comm, lambda m: torch.empty(1, 2), None)
        x = [torch.ones(1, 2)] * 3
        with pytest.raises((dp.PeerLost, KeyError)) as caught:
            pipe.step(x, x)
        if comm.rank:
            comm.abort("it broke")
        return type(caught.value).__name__, str(caught.value)

    (kind, said), (_, cause) = threads(body, 2)
    assert "in the forward of micro-batch 0, stage 1" in cause
    assert kind == "PeerLost" and "in the backward of micro-batch 0, stage 0" in said


def test_a_killed_process_is_named_with_stage_and_micro_batch():
    """The first stage has sent all, and waits for a gradient that will not come."""
    plan = dp.pipeline_plan("1F1B", stages=2, microbatches=3)

    def body(comm):
        def dies_at_the_second(x, seen=[]):  # noqa: B006
            seen.append(x)
            if len(seen) == 2:
                time.sleep(0.2)  # the other rank waits by now
                os.kill(os.getpid(), signal.SIGKILL)
            return x * 2

        modules = {comm.rank: dies_at_the_second if comm.rank else nn.Linear(2, 2)}
        loss = nn.functional.mse_loss
        pipe = Pipeline(plan, modules, comm, lambda m: torch.empty(1, 2), loss)
        x = [torch.ones(1, 2)] * 3
        with pytest.raises(dp.PeerLost) as caught:
            pipe.step(x, x)
        return str(caught.value)

    survivor, victim = run_processes(body, 2)
    assert victim.exit_code == -signal.SIGKILL
    assert survivor.error is None, survivor.traceback
    assert re.search(r"rank 1 \(process \d+\) died", survivor.result), survivor.result
    assert "(in the backward of micro-batch 1, stage 0)" in survivor.result


def test_a_pipeline_says_what_does_not_fit():
    def body(comm):
        plan = dp.pipeline_plan("GPipe", stages=2, microbatches=2)
        with pytest.raises(ValueError, match="for 2 ranks, not 1"):
            Pipeline(plan, {}, comm, None, None)
        halves = PipelinePlan.from_csv("0F0,0I0,0W0", "halves")
        with pytest.raises(ValueError, match="torch's executor"):
            Pipeline(halves, {0: None}, comm, None, None)
        alone = dp.pipeline_plan("GPipe", stages=1, microbatches=2)
        with pytest.raises(ValueError, match=r"has the stages \[0\], not \[1\]"):
            Pipeline(alone, {1: None}, comm, None, None)
        with pytest.raises(ValueError, match="has 2 micro-batches"):
            Pipeline(alone, {0: None}, comm, None, None).step([1], [torch.ones(1)])

    threads(body, 1)


# ---- ZeRO ----------------------------------------------------------------------------------------


class Layer:
    def forward(self, weights, x):
        return np.tanh(x @ weights)

    def backward(self, weights, x, dy):
        inner = dy * (1 - np.tanh(x @ weights) ** 2)
        return inner @ weights.T, x.T @ inner


SIZES = [(6, 10), (10, 9), (9, 4)]  # none of the layers can be cut evenly by 4


@pytest.mark.parametrize("world", [1, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_trains_as_one_process_and_keeps_what_the_formula_says(stage, world):
    weights = [numbers(n, *shape) / 3 for n, shape in enumerate(SIZES)]
    x, y = numbers(8, 8, 6), numbers(9, 8, 4)

    def body(comm):
        rows = slice(comm.rank * 8 // world, (comm.rank + 1) * 8 // world)
        layers = [Layer() for _ in SIZES]
        zero = Zero(stage, layers, [w.copy() for w in weights], comm, adamw, lr=0.01)
        for _ in range(5):
            zero.step(x[rows], lambda said: 2 * (said - y[rows]) / said.size)
        return [zero.whole(n).copy() for n in range(len(layers))], zero.peak

    one = [torch.tensor(w, requires_grad=True) for w in weights]
    optimizer = torch.optim.AdamW(one, lr=0.01)
    for _ in range(5):
        optimizer.zero_grad()
        said = torch.tensor(x)
        for weight in one:
            said = torch.tanh(said @ weight)
        (said - torch.tensor(y)).square().mean().backward()
        optimizer.step()
    wanted = formula(stage, world, [-(-a * b // world) * world for a, b in SIZES])
    for trained, peak in threads(body, world):
        for got, weight in zip(trained, one, strict=True):
            np.testing.assert_allclose(got, weight.detach().numpy(), rtol=0, atol=1e-12)
        assert peak == {name: 8 * count for name, count in wanted.items()}


def test_zero_has_four_stages():
    with pytest.raises(ValueError, match=r"0 \(none of it\) to 3, and not 4"):
        Zero(4, [], [], None, adamw)
