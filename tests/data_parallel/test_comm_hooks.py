"""Communication hooks: torch's own, unchanged, and of one's own; against one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    DDPCommHookType,
    default_hooks,
    powerSGD_hook,
    quantization_hooks,
    register_ddp_comm_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

import dpcore
from tests.data_parallel.models import (
    OPTIMIZERS,
    Small,
    assert_same_values,
    batch,
    part,
    train,
    train_alone,
)
from tests.ranks.groups import in_group


def train_with(comm, register, **options):
    """The values after training, with what `register(model)` has put in."""

    def wrap(module, comm):
        model = dpcore.DataParallel(module, comm=comm, bucket_cap_mb=0.01, **options)
        register(model)
        return model

    return train(comm, OPTIMIZERS["momentum"], wrap=wrap)


def averages_as_one_process(register, world=3, **options):
    def body(comm):
        model = train_with(comm, register, **options)
        assert_same_values(model.module, train_alone(OPTIMIZERS["momentum"]))
        return model._get_ddp_logging_data()["comm_hook"]

    return set(dpcore.spawn(body, world, mode="threads"))


@pytest.mark.parametrize("world", (1, 2, 3))
@pytest.mark.parametrize("as_view", (True, False))
def test_the_hook_of_torch_that_averages(world, as_view):
    def register(model):
        model.register_comm_hook(model.process_group, default_hooks.allreduce_hook)

    names = averages_as_one_process(register, world, gradient_as_bucket_view=as_view)
    assert names == {"allreduce_hook"}


@pytest.mark.parametrize("schedule", ("bucketed", "sequential", "per_parameter", "flat"))
def test_hooks_and_schedules(schedule):
    def register(model):
        model.register_comm_hook(None, default_hooks.allreduce_hook)

    averages_as_one_process(register, 2, schedule=schedule)


def test_a_hook_by_torchs_registry():
    averages_as_one_process(
        lambda model: register_ddp_comm_hook(DDPCommHookType.ALLREDUCE, model, model.process_group)
    )


@pytest.mark.parametrize("hook", (powerSGD_hook.powerSGD_hook, powerSGD_hook.batched_powerSGD_hook))
def test_powersgd_before_it_begins_is_an_average(hook):
    def register(model):
        state = powerSGD_hook.PowerSGDState(model.process_group, start_powerSGD_iter=1000)
        model.register_comm_hook(state, hook)

    averages_as_one_process(register, 2)


def gradients_after(comm, steps, register):
    model = dpcore.DataParallel(Small(), comm=comm, bucket_cap_mb=0.01)
    register(model)
    for step in range(steps):
        model.zero_grad()
        x, y = (part(tensor, comm) for tensor in batch(step))
        (model(x) - y).square().sum().backward()
    return {n: p.grad for n, p in model.module.named_parameters() if p.requires_grad}


def alike_on_all_ranks(comm, gradients):
    for gradient in gradients.values():
        flat = gradient.reshape(-1)
        others = torch.empty(comm.world_size * flat.numel(), dtype=flat.dtype)
        comm.all_gather(others, flat.contiguous())
        assert all(torch.equal(flat, other) for other in others.chunk(comm.world_size))


def powersgd(hook):
    def register(model):
        state = powerSGD_hook.PowerSGDState(
            model.process_group, matrix_approximation_rank=1, start_powerSGD_iter=2
        )
        model.register_comm_hook(state, hook)

    return register


def compressed(hook):
    return lambda model: model.register_comm_hook(model.process_group, hook)


LOSSY = {
    "fp16": (compressed(default_hooks.fp16_compress_hook), 2e-3),
    "bf16": (compressed(default_hooks.bf16_compress_hook), 2e-2),
    "fp16 wrapper": (
        compressed(default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
        2e-3,
    ),
    "fp16 in C++": (
        lambda model: model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS),
        2e-3,
    ),
}


@pytest.mark.parametrize("name", LOSSY)
def test_compressions_are_as_exact_as_their_type(name):
    register, tolerance = LOSSY[name]

    def body(comm):
        near = gradients_after(comm, 3, register)
        exact = gradients_after(comm, 3, lambda model: None)
        alike_on_all_ranks(comm, near)
        differ = False
        for key, gradient in exact.items():
            scale = gradient.abs().max()
            assert (near[key] - gradient).abs().max() < tolerance * scale
            differ |= not torch.equal(near[key], gradient)
        assert differ  # something was compressed

    dpcore.spawn(body, 2, mode="threads")


def test_low_rank_compression():
    """A gradient of rank one comes through a compression to rank one unharmed. The batched form is
    left out: in torch 2.13 it fails an assertion of its own in its first step that compresses."""

    def body(comm):
        torch_rank = torch.Generator().manual_seed(3)
        weight = torch.randn(64, 64, generator=torch_rank)
        model = dpcore.DataParallel(nn.Linear(64, 64, bias=False), comm=comm)
        with torch.no_grad():
            model.module.weight.copy_(weight)
        powersgd(powerSGD_hook.powerSGD_hook)(model)
        for step in range(4):
            model.zero_grad()
            x = torch.ones(1, 64) * (comm.rank + 1 + step)
            model(x).sum().backward()
            mean = sum(rank + 1 + step for rank in range(comm.world_size)) / comm.world_size
            torch.testing.assert_close(
                model.module.weight.grad, torch.full((64, 64), mean), rtol=1e-4, atol=1e-4
            )

    dpcore.spawn(body, 2, mode="threads")


@pytest.mark.parametrize("over", ("our core", "gloo"))
@pytest.mark.parametrize("is_named", (False, True))
def test_low_rank_compression_of_many_buckets_over_gloo(is_named, over):
    """Its continuations communicate: torch DDP aborts or hangs in this program. Also as a part."""

    def body():
        torch.manual_seed(0)
        layers = [nn.Linear(32, 32) for _ in range(8)]
        options = {} if over == "our core" else {"comm": dist.group.WORLD}
        model = dpcore.DataParallel(nn.Sequential(*layers), bucket_cap_mb=0.005, **options)
        group = model.process_group if is_named else None
        state = powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2)
        hook = powerSGD_hook.powerSGD_hook
        if is_named:
            hook = dpcore.compose_comm_hooks((None, noop_hook), (state, hook))
        model.register_comm_hook(state, hook)
        for step in range(20):
            model.zero_grad()
            model(torch.full((1, 32), 1.0 + dist.get_rank() + step)).sum().backward()
        assert len(model.bucket_report()) >= 4
        return [p.grad for p in model.parameters()]

    first, second = in_group(body, 2, backend="gloo")
    assert all(torch.equal(*both) for both in zip(first, second, strict=True))


@pytest.mark.parametrize(
    "hook",
    (
        quantization_hooks.quantization_pertensor_hook,
        quantization_hooks.quantization_perchannel_hook,
    ),
)
def test_quantised_gradients_agree(hook):
    def body(comm):
        model = dpcore.DataParallel(nn.Linear(32, 16), comm=comm)
        model.register_comm_hook(model.process_group, hook)
        alone = nn.Linear(32, 16)
        alone.load_state_dict(model.module.state_dict())
        inputs = [torch.linspace(-1, 1, 32) * (rank + 1) for rank in range(comm.world_size)]
        model(inputs[comm.rank]).sum().backward()
        sum(alone(x).sum() for x in inputs).backward()
        expected = alone.weight.grad / comm.world_size
        assert (model.module.weight.grad - expected).abs().max() < 0.02 * expected.abs().max()
        alike_on_all_ranks(comm, {"weight": model.module.weight.grad})

    dpcore.spawn(body, 2, mode="threads")


# ---- what a hook gets and gives --------------------------------------------------------------


def test_what_a_hook_gets():
    """Buckets in their order, not divided, whose gradients are parts of the buffer."""

    def body(comm):
        seen = []

        def hook(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            assert state == "state"
            assert isinstance(bucket, dist.GradBucket)
            seen.append((bucket.index(), bucket.is_last()))
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                assert gradient.shape == parameter.shape
                assert gradient.eq(float(comm.rank + 1)).all()  # this rank's own
            doubled = bucket.buffer() * 2
            bucket.set_buffer(doubled)
            assert bucket.gradients()[0].flatten()[0] == 2.0 * (comm.rank + 1)
            future = torch.futures.Future()
            future.set_result(doubled)
            return future

        class Weights(nn.Module):
            def __init__(self):
                super().__init__()
                self.a = nn.Parameter(torch.ones(3, 5))
                self.b = nn.Parameter(torch.ones(7))

            def forward(self, x):
                return (self.a.sum() + self.b.sum()) * x

        model = dpcore.DataParallel(Weights(), comm=comm, bucket_cap_mb=0)
        model.register_comm_hook("state", hook)
        model(torch.tensor(float(comm.rank + 1))).backward()
        assert seen == [(0, False), (1, True)]
        assert model.module.a.grad.eq(2.0 * (comm.rank + 1)).all()

    dpcore.spawn(body, 2, mode="threads")


def test_a_view_of_the_bucket_in_another_order():
    def body(comm):
        def transposes(state, bucket):
            future = torch.futures.Future()
            future.set_result(bucket.buffer().view(4, 8).t())
            return future

        model = dpcore.DataParallel(nn.Linear(8, 4, bias=False), comm=comm)
        model.register_comm_hook(None, transposes)
        (model(torch.arange(8.0)) * torch.tensor([1.0, 10.0, 100.0, 1000.0])).sum().backward()
        wanted = torch.outer(torch.arange(8.0), torch.tensor([1.0, 10.0, 100.0, 1000.0]))
        assert torch.equal(model.module.weight.grad.flatten(), wanted.flatten())

    dpcore.spawn(body, 1, mode="threads")


def test_a_buffer_of_the_hook_that_is_part_of_another_tensor():
    """And a parameter without numbers."""

    def moves(state, bucket):
        before = bucket.gradients()
        wide = torch.cat([torch.full((5,), 7.0), bucket.buffer()])
        bucket.set_buffer(wide[5:])
        for mine, other in zip(bucket.gradients(), before, strict=True):
            assert torch.equal(mine, other)
        return noop_hook(state, bucket)

    def body(comm):
        module = nn.Module()
        for name, size in (("a", 3), ("empty", 0), ("b", 4)):
            module.register_parameter(name, nn.Parameter(torch.ones(size)))
        module.forward = lambda x: sum((p * x).sum() for p in module.parameters())
        model = dpcore.DataParallel(module, comm=comm)
        model.register_comm_hook(None, moves)
        model(torch.tensor(2.0)).backward()
        assert [p.grad.tolist() for p in module.parameters()] == [[2.0] * 3, [], [2.0] * 4]

    dpcore.spawn(body, 1, mode="threads")


def test_a_hook_that_communicates_nothing():
    def body(comm):
        model = dpcore.DataParallel(nn.Linear(2, 1, bias=False), comm=comm)
        model.register_comm_hook(None, noop_hook)
        before = comm.stats().get("all_reduce")
        model(torch.full((1, 2), float(comm.rank))).sum().backward()
        assert model.module.weight.grad.tolist() == [[float(comm.rank)] * 2]
        assert comm.stats().get("all_reduce") == before

    dpcore.spawn(body, 2, mode="threads")


def test_hooks_after_one_another():
    def halve(state, bucket):
        future = torch.futures.Future()
        future.set_result(bucket.buffer() / 2)
        return future

    def body(comm):
        model = dpcore.DataParallel(nn.Linear(2, 1, bias=False), comm=comm)
        group = model.process_group
        hook = dpcore.compose_comm_hooks(
            (None, halve), (group, default_hooks.allreduce_hook), (None, halve)
        )
        model.register_comm_hook(None, hook)
        model(torch.full((1, 2), comm.rank + 1.0)).sum().backward()
        assert model.module.weight.grad.tolist() == [[1.5 / 4] * 2]

    dpcore.spawn(body, 2, mode="threads")


def test_hooks_that_are_refused():
    def body(comm):
        model = dpcore.DataParallel(nn.Linear(2, 1), comm=comm)
        with pytest.raises(TypeError, match="must be callable"):
            model.register_comm_hook(None, {})
        with pytest.raises(KeyError, match="bucket"):
            model.register_comm_hook(None, lambda state, grads: None)

        def wrong_bucket(state, bucket: int):
            """Says that it takes something else."""

        def wrong_result(state, bucket) -> torch.Tensor:
            """Says that it returns something else."""

        with pytest.raises(ValueError, match="bucket annotation should be"):
            model.register_comm_hook(None, wrong_bucket)
        with pytest.raises(ValueError, match="return annotation should be"):
            model.register_comm_hook(None, wrong_result)
        assert model._get_ddp_logging_data()["has_error"] == 1
        model.register_comm_hook(None, noop_hook)
        with pytest.raises(RuntimeError, match=r"only be called once.*compose_comm_hooks"):
            model.register_comm_hook(None, noop_hook)
        with pytest.raises(RuntimeError, match="only be called once"):
            model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)

    dpcore.spawn(body, 1, mode="threads")


def test_an_error_in_a_hook_arrives():
    def fails(state, bucket):
        raise ValueError("a mistake in the hook")

    def gives_text(state, bucket):
        future = torch.futures.Future()
        future.set_result("text")
        return future

    def gives_a_part(state, bucket):
        future = torch.futures.Future()
        future.set_result(bucket.buffer()[::2])
        return future

    def body(comm):
        for hook, kind, text in (
            (fails, ValueError, "a mistake in the hook"),
            (gives_text, RuntimeError, "must hold one tensor.*holds str"),
            (gives_a_part, dpcore.Error, "gives_a_part: the future holds 16 numbers"),
            (lambda state, bucket: None, TypeError, "return a torch.futures.Future.*not NoneType"),
        ):
            model = dpcore.DataParallel(nn.Linear(2, 1), comm=comm)
            model.register_comm_hook(None, hook)
            with pytest.raises(kind, match=text):
                model(torch.ones(1, 2)).sum().backward()

    dpcore.spawn(body, 1, mode="threads")


# ---- optimizers in backward ------------------------------------------------------------------


@pytest.mark.parametrize("as_view", (True, False))
def test_an_optimizer_in_backward(as_view):
    from torch.distributed.optim import _apply_optimizer_in_backward

    def body(comm):
        model = Small(seed=7 + comm.rank)
        trained = [p for p in model.parameters() if p.requires_grad]
        _apply_optimizer_in_backward(torch.optim.SGD, trained, {"lr": 0.1})
        wrapped = dpcore.DataParallel(
            model, comm=comm, bucket_cap_mb=0.01, gradient_as_bucket_view=as_view
        )
        for step in range(5):
            if step == 3:
                wrapped.refresh()
            x, y = (part(tensor, comm) for tensor in batch(step))
            nn.functional.mse_loss(wrapped(x), y).backward()
            assert all(p.grad is None for p in trained)
        assert_same_values(model, train_alone(OPTIMIZERS["sgd"]))

    dpcore.spawn(body, 2, mode="threads")


def test_a_fused_optimizer():
    def body(comm):
        model = dpcore.DataParallel(Small(seed=7 + comm.rank), comm=comm, bucket_cap_mb=0.01)
        model._register_fused_optim(torch.optim.SGD, 0.1)
        for step in range(5):
            model.zero_grad()
            x, y = (part(tensor, comm) for tensor in batch(step))
            nn.functional.mse_loss(model(x), y).backward()
        assert_same_values(model.module, train_alone(OPTIMIZERS["sgd"]))

    dpcore.spawn(body, 2, mode="threads")
