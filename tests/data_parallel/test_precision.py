"""mixed_precision, delayed parameters, batch normalisation over ranks, buffer hooks."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import _BufferCommHookLocation, _MixedPrecision
from torch.utils.checkpoint import checkpoint

import dpcore
from tests.data_parallel.models import Small, batch, part, seeded


class Looks(nn.Module):
    """Remembers which types forward saw."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.fixed = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("shift", torch.ones(4))
        self.seen = set()

    def forward(self, x):
        self.seen |= {x.dtype, self.shift.dtype, *(p.dtype for p in self.parameters())}
        return self.layer(x) * self.fixed + self.shift


@pytest.mark.parametrize("world", (1, 2, 3))
@pytest.mark.parametrize("as_view", (True, False))
def test_forward_is_narrow_and_everything_else_wide(world, as_view):
    settings = _MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16)

    def body(comm):
        module = Looks()
        model = dpcore.DataParallel(
            module, comm=comm, mixed_precision=settings, gradient_as_bucket_view=as_view
        )
        wide = copy.deepcopy(module.layer)
        for _ in range(3):
            model.zero_grad()
            wide.zero_grad()
            inputs = [torch.full((2, 4), 1.0 + rank) for rank in range(world)]
            model(inputs[comm.rank]).sum().backward()
            assert all(p.dtype == torch.float32 for p in model.parameters())
            (sum(wide(x).sum() for x in inputs) / world).backward()
            for mine, other in zip(module.layer.parameters(), wide.parameters(), strict=True):
                assert mine.grad.dtype == torch.float32
                torch.testing.assert_close(mine.grad, other.grad, rtol=1e-2, atol=0)
        assert module.seen == {torch.bfloat16}

    dpcore.spawn(body, world, mode="threads")


def test_gradients_travel_in_the_type_that_was_asked_for():
    """1/3 in float16 is another number than in float32."""

    def body(comm):
        found = {}
        for dtype in (torch.float16, torch.float32):
            model = dpcore.DataParallel(
                nn.Linear(1, 1, bias=False),
                comm=comm,
                mixed_precision=_MixedPrecision(reduce_dtype=dtype),
            )
            model(torch.full((1, 1), 1 / 3)).sum().backward()
            found[dtype] = model.module.weight.grad.item()
        assert found[torch.float32] == torch.tensor(1 / 3).item()
        assert found[torch.float16] == torch.tensor(1 / 3).half().item()

    dpcore.spawn(body, 2, mode="threads")


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.scale = nn.Parameter(torch.linspace(1, 2, 4))
        self.last = nn.Linear(4, 1)
        self.reentrant = reentrant  # None: no checkpointing
        self.fails = False

    def run_first(self, x):
        if self.fails and torch._C._current_graph_task_id() >= 0:
            raise KeyboardInterrupt
        return self.first(x) * self.scale

    def forward(self, x):
        if self.reentrant is None:
            return self.last(self.run_first(x))
        return self.last(checkpoint(self.run_first, x, use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", (True, False))
def test_narrow_forward_under_activation_checkpointing(reentrant):
    """On GPUs, torch's can do without reentrant; on the CPU it has no mixed precision."""
    settings = _MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16)

    def body(comm):
        plain = dpcore.DataParallel(
            seeded(lambda: Checkpointed(None)), comm=comm, mixed_precision=settings
        )
        module = seeded(lambda: Checkpointed(reentrant))
        model = dpcore.DataParallel(module, comm=comm, mixed_precision=settings)
        wide = [(name, id(p)) for name, p in module.named_parameters()]
        x = torch.linspace(-1, 1, 4).mul(1 + comm.rank).view(1, 4).requires_grad_()
        plain(x).sum().backward()
        for fails in (False, True, False):
            model.zero_grad()
            module.fails = fails
            loss = model(x).sum()
            with pytest.raises(KeyboardInterrupt) if fails else nullcontext():
                loss.backward(retain_graph=True)
            assert [(name, id(p)) for name, p in module.named_parameters()] == wide
        model.zero_grad()
        loss.backward()
        for mine, other in zip(module.parameters(), plain.module.parameters(), strict=True):
            assert torch.equal(mine.grad, other.grad)

    dpcore.spawn(body, 2, mode="threads")


# ---- delayed parameters ----------------------------------------------------------------------


@pytest.mark.parametrize("everything", (False, True))
def test_delayed_parameters_are_averaged_in_one_piece(everything):
    def body(comm):
        module = Small()
        names = [n for n, p in module.named_parameters() if p.requires_grad]
        late = names if everything else ["last.weight", "last.bias"]
        own = dict(module.named_parameters())
        model = dpcore.DataParallel(
            module,
            comm=comm,
            delay_all_reduce_named_params=[(name, own[name]) for name in late],
            param_to_hook_all_reduce=module.first.weight,
        )
        alone = Small()
        for step in range(3):
            model.zero_grad()
            alone.zero_grad()
            x, _ = batch(step)
            (model(part(x, comm)).square().sum() * comm.world_size).backward()
            alone(x).square().sum().backward()
            for name in ["last.weight", "last.bias"]:
                theirs = dict(alone.named_parameters())[name].grad
                torch.testing.assert_close(own[name].grad, theirs)

    dpcore.spawn(body, 2, mode="threads")


@pytest.mark.parametrize("forward_again", (True, False))
def test_delayed_parameters_are_averaged_after_an_exception_in_backward(forward_again):
    def body(comm):
        layer = nn.Linear(2, 1)
        model = dpcore.DataParallel(
            layer,
            comm=comm,
            delay_all_reduce_named_params=list(layer.named_parameters()),
            param_to_hook_all_reduce=layer.weight,
        )
        fails = True

        def check(_):
            if fails:
                raise ArithmeticError

        layer.weight.register_post_accumulate_grad_hook(check)  # after that of the moment
        x = torch.full((1, 2), 1.0 + comm.rank)
        loss = model(x).sum()
        with pytest.raises(ArithmeticError):
            loss.backward(retain_graph=True)
        fails = False
        model.zero_grad()
        (model(x).sum() if forward_again else loss).backward()
        return layer.weight.grad.tolist()

    assert dpcore.spawn(body, 2, mode="threads") == [[[1.5, 1.5]]] * 2


def test_delayed_parameters_need_a_moment():
    def body(comm):
        module = Small()
        with pytest.raises(ValueError, match="give both or neither"):
            dpcore.DataParallel(module, comm=comm, param_to_hook_all_reduce=module.last.bias)

    dpcore.spawn(body, 1, mode="threads")


# ---- batch normalisation over ranks ----------------------------------------------------------


class Normalised(nn.Module):
    def __init__(self, momentum=0.1, affine=True):
        super().__init__()
        self.layer = nn.Conv2d(3, 5, 3)
        self.norm = nn.BatchNorm2d(5, momentum=momentum, affine=affine)
        self.double()

    def forward(self, x):
        return self.norm(self.layer(x)).tanh()


@pytest.mark.parametrize("world", (1, 2, 3))
@pytest.mark.parametrize("momentum", (0.1, None))
@pytest.mark.parametrize("affine", (True, False))
def test_batch_normalisation_over_ranks_on_the_cpu(world, momentum, affine):
    """Ranks have batches of different sizes."""

    def body(comm):
        with torch.random.fork_rng():
            alone = Normalised(momentum, affine)
        module = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(alone))
        model = dpcore.DataParallel(module, comm=comm)
        alone.load_state_dict(module.state_dict())
        for step in range(3):
            model.zero_grad()
            alone.zero_grad()
            generator = torch.Generator().manual_seed(step)
            batches = [
                torch.randn(2 + rank, 3, 6, 6, dtype=torch.float64, generator=generator)
                for rank in range(world)
            ]
            out = model(batches[comm.rank])
            expected = alone(torch.cat(batches))
            torch.testing.assert_close(out, expected.split([len(b) for b in batches])[comm.rank])
            (out.square().sum() * world).backward()
            expected.square().sum().backward()
            for mine, other in zip(module.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, other.grad)
            for mine, other in zip(module.buffers(), alone.buffers(), strict=True):
                torch.testing.assert_close(mine, other)
        model.eval()
        alone.eval()
        x = torch.ones(1, 3, 6, 6, dtype=torch.float64)
        torch.testing.assert_close(model(x), alone(x))

    dpcore.spawn(body, world, mode="threads")


# ---- hooks for buffers -----------------------------------------------------------------------


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        self.count = self.count + x.detach()  # another tensor each time
        return self.weight * x


@pytest.mark.parametrize("where", _BufferCommHookLocation)
@pytest.mark.parametrize("later", (True, False))
def test_a_hook_in_the_place_of_the_broadcast(where, later):
    def body(comm):
        def add_up(state, buffers):
            assert list(buffers) == ["count"]
            work = dist.all_reduce(buffers["count"], group=state, async_op=True)
            return [work.get_future()] if later else None

        model = dpcore.DataParallel(Counts(), comm=comm)
        model._register_buffer_comm_hook(model.process_group, add_up, where)
        counts = []
        for _ in range(2):
            model(torch.tensor([comm.rank + 1.0])).backward()
            counts.append(model.module.count.item())
        after = where == _BufferCommHookLocation.POST_FORWARD
        mine = comm.rank + 1.0
        # 1 + 2, then twice that and 1 + 2; or before forward: what was there, then this rank's.
        assert counts == ([3.0, 9.0] if after else [mine, 3.0 + mine])

    dpcore.spawn(body, 2, mode="threads")


def test_buffers_that_a_module_replaces_are_broadcast():
    def body(comm):
        model = dpcore.DataParallel(Counts(), comm=comm)
        for step in range(3):
            model(torch.tensor([comm.rank + 1.0])).backward()
            assert model.module.count.item() == step * 1.0 + comm.rank + 1.0

    dpcore.spawn(body, 2, mode="threads")
