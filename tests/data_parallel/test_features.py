"""What models do: parameters that are unused, tied, sparse, of several types; buffers; views."""

import pytest
import torch
from torch import nn

import dpcore
from tests.data_parallel.models import Small, batch, part


def assert_equal_on_all_ranks(comm, tensor):
    gathered = torch.empty(comm.world_size * tensor.numel(), dtype=tensor.dtype)
    comm.all_gather(gathered, tensor.detach().reshape(-1).contiguous())
    first, *others = gathered.chunk(comm.world_size)
    for other in others:
        assert torch.equal(first, other)


class Branches(nn.Module):
    """Uses one of two branches, as it is told."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x, which):
        return {"out": [self.branches[which](self.trunk(x))]}


# ---- unused parameters -----------------------------------------------------------------------


@pytest.mark.parametrize("as_view", (True, False))
def test_unused_parameters_get_the_average_when_another_rank_used_them(as_view):
    def body(comm):
        model = dpcore.DataParallel(
            Branches(),
            comm=comm,
            find_unused_parameters=True,
            gradient_as_bucket_view=as_view,
            bucket_cap_mb=0,
        )
        x = torch.full((1, 4), float(comm.rank + 1))
        for _ in range(3):
            model.zero_grad()
            model(x, which=comm.rank)["out"][0].sum().backward()
            for branch in model.module.branches:  # each was used by one of two ranks
                assert branch.bias.grad.tolist() == [0.5] * 4
                assert_equal_on_all_ranks(comm, branch.weight.grad)

    dpcore.spawn(body, 2, mode="threads")


def test_what_was_used_under_no_sync_is_used():
    """The synchronised backward reaches other parameters than the ones before it."""

    def body(comm):
        model = dpcore.DataParallel(Branches(), comm=comm, find_unused_parameters=True)
        x = torch.ones(1, 4)
        first, second = model.module.branches
        for _ in range(2):
            model.zero_grad()
            if comm.rank == 0:
                with model.no_sync():
                    model(x, which=1)["out"][0].sum().backward()
            model(x, which=0)["out"][0].sum().backward()
            assert first.bias.grad.tolist() == [1.0] * 4
            assert second.bias.grad.tolist() == [0.5] * 4

    dpcore.spawn(body, 2, mode="threads")


def test_a_parameter_that_no_rank_used_keeps_what_it_had():
    def body(comm):
        model = dpcore.DataParallel(Branches(), comm=comm, find_unused_parameters=True)
        first, second = model.module.branches
        model(torch.ones(1, 4), which=0)["out"][0].sum().backward()
        assert first.bias.grad.tolist() == [1.0] * 4
        assert second.bias.grad is None
        model(torch.ones(1, 4), which=1)["out"][0].sum().backward()
        assert first.bias.grad.tolist() == [1.0] * 4
        assert second.bias.grad.tolist() == [1.0] * 4

    dpcore.spawn(body, 2, mode="threads")


def test_an_unused_parameter_raises_with_its_name():
    """Without the flag. torch names it by a number."""

    def body(comm):
        model = dpcore.DataParallel(Branches(), comm=comm)
        model(torch.ones(1, 4), which=0)["out"][0].sum().backward()
        with pytest.raises(dpcore.Error, match=r"branches\.1\.weight.*find_unused_parameters"):
            model(torch.ones(1, 4), which=0)

    dpcore.spawn(body, 2, mode="threads")


def test_two_backwards_that_reach_every_parameter_together():
    def body(comm):
        model = dpcore.DataParallel(Branches(), comm=comm, bucket_cap_mb=0, schedule="sequential")
        x = torch.full((1, 4), float(comm.rank))
        for _ in range(3):
            model.zero_grad()
            hidden = model.module.trunk(x)
            model(x, which=0)["out"][0].sum().backward()
            model.module.branches[1](hidden.detach()).sum().backward()
            assert_equal_on_all_ranks(comm, model.module.branches[1].weight.grad)
            assert_equal_on_all_ranks(comm, model.module.trunk.weight.grad)

    dpcore.spawn(body, 2, mode="threads")


def test_a_second_gradient_after_the_bucket_was_sent_is_an_error():
    def body(comm):
        model = dpcore.DataParallel(Branches(), comm=comm, bucket_cap_mb=0, schedule="bucketed")
        x = torch.ones(1, 4)
        # The last branch was registered last, so its buckets are the first to be sent.
        model(x, which=1)["out"][0].sum().backward()
        with pytest.raises(dpcore.Error, match=r"branches\.1\.\w+ arrived when its bucket"):
            model.module.branches[1](x).sum().backward()

    dpcore.spawn(body, 2, mode="threads")


# ---- kinds of parameters ---------------------------------------------------------------------


def test_mixed_dtypes():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(
                [nn.Linear(8, 8).double(), nn.Linear(8, 8), nn.Linear(8, 8).bfloat16()]
            )
            self.extra = nn.Linear(8, 8)

        def forward(self, x):
            for layer in [*self.layers, self.extra]:
                x = layer(x.to(layer.weight.dtype))
            return x

    def body(comm):
        model = dpcore.DataParallel(Mixed(), comm=comm)
        for _ in range(2):
            model.zero_grad()
            model(torch.full((2, 8), float(comm.rank))).float().sum().backward()
            for parameter in model.parameters():
                assert parameter.grad.dtype == parameter.dtype
                assert_equal_on_all_ranks(comm, parameter.grad)
        return sorted(line.dtype for line in model.bucket_report())

    for dtypes in dpcore.spawn(body, 2, mode="threads"):
        assert dtypes == ["BFloat16", "Double", "Float"]


@pytest.mark.parametrize("world", (1, 2, 3))
def test_sparse_gradients(world):
    def body(comm):
        torch.manual_seed(3)
        table = nn.Embedding(20, 3, sparse=True, dtype=torch.float64)
        alone = nn.Embedding.from_pretrained(table.weight.detach().clone(), freeze=False)
        head = nn.Linear(3, 2, dtype=torch.float64)
        model = dpcore.DataParallel(nn.Sequential(table, head), comm=comm, bucket_cap_mb=0)
        words = [torch.tensor([3, 5, 5, rank]) for rank in range(world)]
        for _ in range(2):
            model.zero_grad()
            alone.zero_grad()
            model(words[comm.rank]).sum().backward()
            head_copy = [p.detach() for p in head.parameters()]
            nn.functional.linear(alone(torch.cat(words)), *head_copy).sum().backward()
            assert table.weight.grad.is_sparse
            torch.testing.assert_close(table.weight.grad.to_dense() * world, alone.weight.grad)

    dpcore.spawn(body, world, mode="threads")


def test_a_gradient_keeps_the_layout_of_its_parameter():
    def body(comm):
        model = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        wrapped = dpcore.DataParallel(model, comm=comm)
        generator = torch.Generator().manual_seed(comm.rank)
        wrapped(torch.randn(2, 3, 8, 8, generator=generator)).sum().backward()
        assert model.weight.grad.stride() == model.weight.stride()
        assert model.weight.stride() != model.weight.contiguous().stride()
        assert_equal_on_all_ranks(comm, model.weight.grad.contiguous())

    dpcore.spawn(body, 2, mode="threads")


def test_gradients_are_parts_of_buckets_or_not():
    """The same memory in every step, or a tensor of its own. What is kept keeps its numbers."""

    def body(comm):
        for as_view in (True, False):
            model = dpcore.DataParallel(
                Small(), comm=comm, gradient_as_bucket_view=as_view, init_sync=False
            )
            kept = None
            for step in range(3):
                model.zero_grad()
                x, y = (part(tensor, comm) for tensor in batch(step))
                (model(x) - y).square().sum().backward()
                grad = model.module.last.weight.grad
                if step == 1:
                    kept, value, address = grad, grad.clone(), grad.data_ptr()
            assert (grad.data_ptr() == address) == as_view
            assert torch.equal(kept, value)

    dpcore.spawn(body, 2, mode="threads")


# ---- buffers and first values ----------------------------------------------------------------


class Norm(nn.Module):
    def __init__(self, comm):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("flag", torch.tensor([comm.rank == 0]))
        with torch.no_grad():
            self.norm.weight.fill_(float(comm.rank + 1))

    def forward(self, x):
        return self.norm(x)


@pytest.mark.parametrize("broadcast", (True, False))
def test_buffers_are_those_of_rank_0_before_forward(broadcast):
    def body(comm):
        model = dpcore.DataParallel(Norm(comm), comm=comm, broadcast_buffers=broadcast)
        assert model.module.norm.weight.tolist() == [1.0] * 6
        # As in torch, False is about the constructor too; forward_sync_buffers is not.
        assert model.module.flag.item() == (broadcast or comm.rank == 0)
        for step in range(3):
            before = model.module.norm.running_mean.clone()
            model(torch.randn(4, 6, generator=torch.Generator().manual_seed(step * 9 + comm.rank)))
            assert not torch.equal(before, model.module.norm.running_mean)
        model.eval()
        model(torch.zeros(1, 6))
        assert model.module.norm.num_batches_tracked.item() == 3
        return model.module.norm.running_mean.tolist()

    with pytest.warns(FutureWarning, match="forward_sync_buffers"):
        means = dpcore.spawn(body, 3, mode="threads")
    assert (means == [means[0]] * 3) == broadcast


def test_a_first_forward_under_inference_mode():
    """The memory through which it sends buffers is kept for the forwards of training."""

    def body(comm):
        model = dpcore.DataParallel(nn.BatchNorm1d(6), comm=comm)
        with torch.inference_mode():
            model(torch.full((4, 6), float(comm.rank)))
        for _ in range(2):
            model(torch.full((4, 6), float(comm.rank))).sum().backward()
        model._sync_buffers()
        assert_equal_on_all_ranks(comm, model.module.running_mean)

    dpcore.spawn(body, 2, mode="threads", timeout=20)


def test_ranks_may_evaluate_different_numbers_of_batches():
    """As in torch: buffers are sent once after a forward that expects gradients."""

    def body(comm):
        model = dpcore.DataParallel(nn.BatchNorm1d(6), comm=comm)
        x = torch.full((4, 6), float(comm.rank))
        for _ in range(3):
            model(x).sum().backward()
            model.eval()
            with torch.no_grad():
                for _ in range(3 if comm.rank == 0 else 0):
                    model(x)
            model.train()
        model._sync_buffers()
        assert model.module.running_mean.tolist() == [0.0] * 6
        model(x)
        assert_equal_on_all_ranks(comm, model.module.num_batches_tracked)

    dpcore.spawn(body, 2, mode="threads", timeout=20)


def test_a_forward_between_forward_and_backward_leaves_the_graph_usable():
    """The buffers that it writes are saved in the graph of the first."""

    def body(comm):
        model = dpcore.DataParallel(nn.Sequential(nn.BatchNorm1d(6)), comm=comm).eval()
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(comm.rank))
        (model(x) + model(2 * x)).sum().backward()
        assert_equal_on_all_ranks(comm, model.module[0].weight.grad)

    dpcore.spawn(body, 2, mode="threads")


def frozen_head(model):
    model.last.weight.requires_grad_(False)


def other_order(model):
    model.first, model.last = nn.Linear(6, 40).double(), model.last
    first = model._modules.pop("first")
    model._modules["first"] = first


def another_layer(model):
    model.more = nn.Linear(2, 2)


DIFFERENCES = {
    frozen_head: r"Rank 0 has 'last\.weight.*' where rank 1 has 'last\.bias",
    other_order: r"Rank 0 has 'first\.weight.*' where rank 1 has 'norm\.weight",
    another_layer: r"only rank 1 has is 'more\.weight: \[2, 2\] torch\.float32",
}


@pytest.mark.parametrize("change", DIFFERENCES, ids=lambda change: change.__name__)
def test_different_models_are_an_error_that_names_the_parameter(change):
    """torch DDP takes the first two and averages gradients of different parameters."""

    def body(comm):
        model = Small()
        if comm.rank == 1:
            change(model)
        with pytest.raises(dpcore.Mismatch, match=DIFFERENCES[change]):
            dpcore.DataParallel(model, comm=comm)

    dpcore.spawn(body, 3, mode="threads")


def test_different_options_are_an_error():
    def body(comm):
        with pytest.raises(dpcore.Mismatch, match=r"'bucket_cap_mb=0' where rank 1 has '.*=1'"):
            dpcore.DataParallel(Small(), comm=comm, bucket_cap_mb=comm.rank)

    dpcore.spawn(body, 2, mode="threads")


def test_what_nobody_has_checked_is_seen_by_the_first_bucket():
    """Without init_sync, buckets say what they hold when they meet. On every rank, and before a
    gradient is written to."""

    class Swapped(nn.Module):
        """Two parameters of one shape; on odd ranks registered the other way round."""

        def __init__(self, turned):
            super().__init__()
            for name in ("b", "a") if turned else ("a", "b"):
                self.register_parameter(name, nn.Parameter(torch.ones(40)))

        def forward(self):
            return (self.a + 2 * self.b).sum()

    def body(comm):
        model = dpcore.DataParallel(
            Swapped(comm.rank == 1), comm=comm, init_sync=False, schedule="flat"
        )
        with pytest.raises(dpcore.Mismatch, match=r"bucket 0 \(2 gradients, .*: [ab], [ab]\)"):
            model().backward()

    dpcore.spawn(body, 2, mode="threads")


def test_gradients_that_are_no_numbers_arrive_as_such():
    def body(comm):
        model = dpcore.DataParallel(nn.Linear(3, 1, bias=False), comm=comm)
        factors = torch.tensor([[float("nan"), float("inf"), 1e-40]])
        model(factors if comm.rank == 1 else torch.ones(1, 3)).sum().backward()
        assert str(model.module.weight.grad[0, :2].tolist()) == "[nan, inf]"
        assert model.module.weight.grad[0, 2].item() == 0.5

    dpcore.spawn(body, 2, mode="threads")


def test_modules_that_cannot_be_wrapped():
    def body(comm):
        with pytest.raises(dpcore.Error, match="no parameter that requires"):
            dpcore.DataParallel(nn.Linear(2, 2).requires_grad_(False), comm=comm)
        with pytest.raises(dpcore.Error, match="weight has no shape yet"):
            dpcore.DataParallel(nn.LazyLinear(2), comm=comm)
        with pytest.raises(dpcore.Unsupported, match="comm: int lacks"):
            dpcore.DataParallel(nn.Linear(2, 2), comm=3)
        with pytest.raises(dpcore.Unsupported, match="not both"):
            dpcore.DataParallel(nn.Linear(2, 2), comm=comm, process_group=comm)
        with pytest.raises(dpcore.Unsupported, match="there are bucketed, sequential"):
            dpcore.DataParallel(nn.Linear(2, 2), comm=comm, schedule="fastest")

    dpcore.spawn(body, 1, mode="threads")


def test_no_group_at_all():
    dpcore.finalize()
    with pytest.raises(dpcore.Error, match=r"call dpcore\.init\(\)"):
        dpcore.DataParallel(nn.Linear(2, 2))
