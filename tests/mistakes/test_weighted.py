"""``model.weighted(count)``: the mean over samples where ranks have different numbers of them."""

import dataclasses
from collections import namedtuple
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dpcore
from tests.data_parallel.models import Small, seeded
from tests.ranks.groups import in_group

COUNTS = {2: (1, 4), 3: (5, 1, 2)}
NEAR = {"rtol": 1e-11, "atol": 1e-13}
mse = nn.functional.mse_loss
in_threads = partial(dpcore.spawn, mode="threads")


def data(rows, seed=0, columns=6, targets=3):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, dtype=torch.float64, generator=generator)
    return x, torch.randn(rows, targets, dtype=torch.float64, generator=generator)


def share(tensor, counts, rank):
    return tensor.split(list(counts))[rank]


def gradients(module):
    return {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


def assert_gradients(model, wanted, **near):
    mine = gradients(model.module)
    assert mine.keys() == wanted.keys()
    for name, gradient in mine.items():
        torch.testing.assert_close(
            gradient, wanted[name], **(near or {"rtol": 1e-11, "atol": 1e-13})
        )


def of_the_whole_batch(module, loss, x, y):
    loss(module(x), y).backward()
    return gradients(module)


def step_is_right(comm, make=Small, loss=mse, counts=None, **options):
    """One step over ranks with unequal batches, and by one process with all of them."""
    counts = counts or COUNTS[comm.world_size]
    x, y = data(sum(counts))
    wanted = of_the_whole_batch(make(), loss, x, y)
    model = dpcore.DataParallel(make(), comm=comm, **options)
    for count in (counts[comm.rank], torch.tensor(float(counts[comm.rank]))):
        model.zero_grad()
        with model.weighted(count):
            loss(model(share(x, counts, comm.rank)), share(y, counts, comm.rank)).backward()
        assert_gradients(model, wanted)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"gradient_as_bucket_view": False},
        {"schedule": "flat"},
    ],
    ids=str,
)
def test_unequal_batches_give_the_gradient_of_the_whole(world, options):
    in_threads(partial(step_is_right, **options), world)


@pytest.mark.parametrize("counts", [(4, 0), (0, 1, 3), (2, 1, 1)])
def test_the_mean_is_exact_where_the_arithmetic_is(counts):
    """A rank without samples may have a loss that is NaN, the mean of nothing."""

    def body(comm):
        def linear():
            return seeded(lambda: nn.Linear(2, 1, bias=False).double())

        x = torch.arange(2.0 * sum(counts), dtype=torch.float64).view(-1, 2)
        wanted = of_the_whole_batch(linear(), lambda out, _: out.mean(), x, None)
        model = dpcore.DataParallel(linear(), comm=comm)
        with model.weighted(counts[comm.rank]):
            model(share(x, counts, comm.rank)).mean().backward()
        # Halves and quarters are exact; a third, by which three ranks divide, is not.
        near = {"rtol": 0 if comm.world_size == 2 else 1e-15, "atol": 0}
        assert_gradients(model, wanted, **near)

    in_threads(body, len(counts))


def test_equal_counts_change_no_bit():
    def body(comm):
        x, y = (t.float() for t in data(8))
        found = []
        for is_weighted in (False, True):
            model = dpcore.DataParallel(Small().float(), comm=comm)
            mine = (share(x, (4, 4), comm.rank), share(y, (4, 4), comm.rank))
            if is_weighted:
                with model.weighted(4):
                    mse(model(mine[0]), mine[1]).backward()
            else:
                mse(model(mine[0]), mine[1]).backward()
            found.append(gradients(model.module))
        assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])

    in_threads(body, 2)


# ---- outputs ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Output:
    loss: torch.Tensor
    logits: list


Pair = namedtuple("Pair", "loss logits")
FORMS = {
    "dataclass": lambda loss, logits: Output(loss, [logits]),
    "dict": lambda loss, logits: {"loss": loss, "logits": {"deep": [logits]}},
    "namedtuple": Pair,
    "twice": lambda loss, logits: (loss, loss, logits, 3, None, "text"),
}


class WithLoss(nn.Module):
    """Computes its loss itself, of logits that it returns as well, as those of transformers do."""

    def __init__(self, form):
        super().__init__()
        self.inner, self.form = Small(), form

    def forward(self, x, y=None):
        logits = self.inner(x)
        return FORMS[self.form](mse(logits, y), logits)


def loss_of(output):
    return output["loss"] if isinstance(output, dict) else getattr(output, "loss", None)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("find_unused_parameters", [False, True])
def test_a_loss_that_the_module_computes_is_weighted_once(form, find_unused_parameters):
    def body(comm):
        counts = COUNTS[2]
        x, y = data(sum(counts))
        module = WithLoss(form)
        (loss_of(module(x, y)) if form != "twice" else module(x, y)[1]).backward()
        wanted = gradients(module)
        model = dpcore.DataParallel(
            WithLoss(form), comm=comm, find_unused_parameters=find_unused_parameters
        )
        with model.weighted(counts[comm.rank]):
            output = model(share(x, counts, comm.rank), share(y, counts, comm.rank))
        assert type(output) is type(FORMS[form](x, y))
        if form == "twice" and not find_unused_parameters:
            assert output[0] is output[1]
        (loss_of(output) if form != "twice" else output[1]).backward()  # after the block: right
        assert_gradients(model, wanted)

    in_threads(body, 2)


def test_outputs_may_be_changed_in_place():
    def loss(output, y):
        return mse(output.mul_(2), y)

    in_threads(partial(step_is_right, loss=loss), 2)


class Hidden:
    def __init__(self, loss):
        self.loss = loss


def test_an_output_in_which_no_gradient_is_found_raises():
    class Hides(Small):
        def forward(self, x):
            return Hidden(super().forward(x).sum())

    def body(comm):
        model = dpcore.DataParallel(Hides(), comm=comm)
        with pytest.raises(dpcore.Unsupported, match="a Hidden, has no tensor"), model.weighted(2):
            model(data(2)[0])

    in_threads(body, 2)


# ---- together with other features ------------------------------------------------------------


def test_under_autocast():
    def body(comm):
        counts = COUNTS[2]
        x, y = (tensor.float() for tensor in data(sum(counts)))
        wanted = of_the_whole_batch(Small().float(), mse, x, y)
        model = dpcore.DataParallel(Small().float(), comm=comm)
        with model.weighted(counts[comm.rank]), torch.autocast("cpu", torch.bfloat16):
            output = model(share(x, counts, comm.rank))
            mse(output.float(), share(y, counts, comm.rank)).backward()
        assert output.dtype == torch.bfloat16
        assert_gradients(model, wanted, rtol=0.05, atol=0.05)

    in_threads(body, 2)


@pytest.mark.parametrize("schedule", ["priority", "dear", "zero1"])
def test_schedules_that_go_across_steps(schedule):
    def body(comm):
        counts = COUNTS[2]
        alone = Small()
        reference = torch.optim.SGD([p for p in alone.parameters() if p.requires_grad], lr=0.1)
        model = dpcore.DataParallel(Small(), comm=comm, schedule=schedule)
        plain = torch.optim.SGD([p for p in model.module.parameters() if p.requires_grad], lr=0.1)
        optimizer = dpcore.DistributedOptimizer(plain, model)
        for step in range(3):
            x, y = data(sum(counts), seed=step)
            for one in (reference, optimizer):
                one.zero_grad()
            mse(alone(x), y).backward()
            reference.step()
            with model.weighted(counts[comm.rank]):
                mse(model(share(x, counts, comm.rank)), share(y, counts, comm.rank)).backward()
            optimizer.step()
        for (name, mine), (_, its) in zip(
            model.module.named_parameters(), alone.named_parameters(), strict=True
        ):
            model.flush()
            torch.testing.assert_close(mine, its, rtol=1e-11, atol=1e-13, msg=name)

    in_threads(body, 2)


def test_several_forwards_before_one_backward():
    def body(comm):
        counts = COUNTS[2]
        x, y = data(sum(counts))
        alone = Small()
        (mse(alone(x), y) + mse(alone(-x), y)).backward()
        model = dpcore.DataParallel(Small(), comm=comm)
        x, y = share(x, counts, comm.rank), share(y, counts, comm.rank)
        with model.weighted(counts[comm.rank]):
            (mse(model(x), y) + mse(model(-x), y)).backward()
        assert_gradients(model, gradients(alone))

    in_threads(body, 2)


def test_a_term_of_the_parameters_themselves_stays_what_it_is():
    """An L2 term is not a mean over samples: each rank has the same, and so has their average."""

    def body(comm):
        counts = COUNTS[2]
        x, y = data(sum(counts))

        def penalty(module):
            return sum(p.square().sum() for p in module.parameters() if p.requires_grad)

        alone = Small()
        (mse(alone(x), y) + penalty(alone)).backward()
        model = dpcore.DataParallel(Small(), comm=comm)
        with model.weighted(counts[comm.rank]):
            loss = mse(model(share(x, counts, comm.rank)), share(y, counts, comm.rank))
            (loss + penalty(model.module)).backward()
        assert_gradients(model, gradients(alone))

    in_threads(body, 2)


def test_micro_batches_are_sums_over_the_count_of_the_window():
    """One block around the whole window, with the number of samples in all its micro-batches."""
    windows = ((1, 2, 3), (4, 1, 1))

    def body(comm):
        counts = [sum(window) for window in windows]
        x, y = data(sum(counts))
        wanted = of_the_whole_batch(Small(), mse, x, y)
        model = dpcore.DataParallel(Small(), comm=comm)
        mine, count = windows[comm.rank], counts[comm.rank]
        xs = share(x, counts, comm.rank).split(list(mine))
        ys = share(y, counts, comm.rank).split(list(mine))

        def backward(x, y):
            (mse(model(x), y, reduction="sum") / (3 * count)).backward()

        with model.weighted(count):
            with model.no_sync():
                for number in range(2):
                    backward(xs[number], ys[number])
            backward(xs[2], ys[2])
        assert_gradients(model, wanted)

    in_threads(body, 2)


def test_evaluation_within_a_block_is_left_alone():
    def body(comm):
        model = dpcore.DataParallel(Small(), comm=comm)
        x = data(2)[0]
        with model.weighted(comm.rank + 1), torch.no_grad():
            assert torch.equal(model(x), model.module(x))

    in_threads(body, 2)


def test_over_a_group_of_gloo():
    def body():
        counts, rank = COUNTS[2], dist.get_rank()
        x, y = data(sum(counts))
        wanted = of_the_whole_batch(Small(), mse, x, y)
        model = dpcore.DataParallel(Small(), comm=dist.group.WORLD)
        assert model.backend == "torch gloo"
        with model.weighted(counts[rank]):
            mse(model(share(x, counts, rank)), share(y, counts, rank)).backward()
        assert_gradients(model, wanted)

    in_group(body, 2, backend="gloo")


# ---- mistakes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        ((3, -1), "rank 1 gave -1"),
        ((float("nan"), 2), "rank 0 gave nan"),
        ((1, float("inf")), "rank 1 gave inf"),
        ((0, 0), "the counts of all ranks are 0"),
    ],
)
def test_counts_that_mean_nothing_raise_on_all_ranks(counts, says):
    def body(comm):
        model = dpcore.DataParallel(nn.Linear(2, 1), comm=comm)
        with (
            pytest.raises(dpcore.Unsupported, match=f"^rank {comm.rank}: .*{says}"),
            model.weighted(counts[comm.rank]),
        ):
            raise AssertionError("the block runs")
        with model.weighted(1):  # the communicator goes on
            model(torch.ones(1, 2)).sum().backward()

    in_threads(body, 2)


def test_blocks_do_not_nest_and_counts_are_numbers():
    def body(comm):
        model = dpcore.DataParallel(nn.Linear(2, 1), comm=comm)
        with model.weighted(1), pytest.raises(dpcore.Error, match="already"), model.weighted(1):
            pass
        for count in ("3", None, True, torch.ones(2)):
            with pytest.raises(TypeError, match="a number of samples"), model.weighted(count):
                pass
        with model.join(), pytest.raises(dpcore.Unsupported, match="join"), model.weighted(1):
            pass

    in_threads(body, 2)
