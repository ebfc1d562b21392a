"""How gradients come into buckets and back, and how often something is launched for it: bodies for
a rank, which run on devices of the host (test_gradient_copies.py) and on GPUs (tests/cuda)."""

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel.distributed import _MixedPrecision

import dpcore
from tests.data_parallel.models import seeded

WIDTH = 16
CAP_MB = 0.004  # a few gradients per bucket
RTOL = {torch.float16: 2e-3, torch.bfloat16: 2e-2}


def layers(count=6, dtype=torch.float32):
    def make():
        parts = [nn.Linear(WIDTH, WIDTH) for _ in range(count)]
        return nn.Sequential(*[m for part in parts for m in (part, nn.Tanh())]).to(dtype)

    return seeded(make)


def inputs_of(step, rank, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, WIDTH, generator=generator).to(dtype)


def expected(module, step, world, dtype=torch.float32, through=None):
    """The average gradient by parameter, computed in one process; ``through``: each rank's rounded
    to this type before."""
    totals = [torch.zeros_like(p) for p in module.parameters()]
    for rank in range(world):
        x = inputs_of(step, rank, dtype).to(totals[0].device)
        found = torch.autograd.grad(module(x).square().sum(), list(module.parameters()))
        for total, gradient in zip(totals, found, strict=True):
            total += (gradient if through is None else gradient.to(through).to(dtype)) / world
    return totals


def counted(model, call):
    """What ``call`` adds to the counters of copies."""
    before = model.stats()["copies"]
    call()
    after = model.stats()["copies"]
    return {name: after[name] - before[name] for name in ("launches", "together", "alone")}


def addresses(model):
    """Of the parts of buckets, by number of the gradient."""
    found = {}
    for number in range(len(model.bucket_report())):
        _, members, parts = model._reducer.bucket(number)
        found.update({i: part.data_ptr() for i, part in zip(members, parts, strict=True)})
    return found


def one_launch_per_bucket(comm, device, as_view, dtype=torch.float32):
    """And one more back, where ``grad`` is no part of the bucket."""
    module = layers(dtype=dtype).to(device)
    model = dpcore.DataParallel(
        module, comm=comm, bucket_cap_mb=CAP_MB, gradient_as_bucket_view=as_view
    )
    count = len(list(module.parameters()))
    directions = 1 if as_view else 2
    fresh = []

    def step(number):
        x = inputs_of(number, comm.rank, dtype).to(device)
        model(x).square().sum().backward()

    hooks = [
        p.register_post_accumulate_grad_hook(
            lambda p: fresh.append(StorageWeakRef(p.grad.untyped_storage()))
        )
        for p in module.parameters()
    ]
    for number in range(4):
        model.zero_grad()
        copies = counted(model, lambda number=number: step(number))
        buckets = len(model.bucket_report())
        assert 1 < buckets < count
        assert copies == {
            "launches": directions * buckets,
            "together": directions * count,
            "alone": 0,
        }
        wanted = expected(module, number, comm.world_size, dtype)
        for i, (p, average) in enumerate(zip(module.parameters(), wanted, strict=True)):
            torch.testing.assert_close(p.grad, average)
            assert (p.grad.data_ptr() == addresses(model)[i]) == as_view
        assert all(ref.expired() for ref in fresh) == as_view, "who keeps autograd's memory?"
        fresh.clear()
    for hook in hooks:
        hook.remove()

    # Gradients that stay are where they should be: autograd adds to the bucket itself.
    model.zero_grad(set_to_none=False)
    copies = counted(model, lambda: step(9))
    assert copies["launches"] == (0 if as_view else 2 * buckets) and copies["alone"] == 0
    for p, average in zip(
        module.parameters(), expected(module, 9, comm.world_size, dtype), strict=True
    ):
        torch.testing.assert_close(p.grad, average)


def in_a_narrow_type(comm, device, as_view, narrow):
    """Cast on the way in by the same launch, and on the way out by one more; main gradients are in
    float32 for whoever looks."""
    module = layers().to(device)
    model = dpcore.DataParallel(
        module,
        comm=comm,
        bucket_cap_mb=CAP_MB,
        gradient_as_bucket_view=as_view,
        mixed_precision=_MixedPrecision(reduce_dtype=narrow),
    )
    count = len(list(module.parameters()))
    world = comm.world_size
    kept = [torch.zeros_like(p) for p in module.parameters()]
    for step, keeps in enumerate((False, False, False, True, True)):
        if not keeps:
            model.zero_grad()
            kept = [torch.zeros_like(p) for p in module.parameters()]
        x = inputs_of(step, comm.rank).to(device)
        copies = counted(model, lambda x=x: model(x).square().sum().backward())
        buckets = len(model.bucket_report())
        assert buckets > 1
        assert copies == {"launches": 2 * buckets, "together": 2 * count, "alone": 0}
        own = inputs_of(step, comm.rank).to(device)
        mine = torch.autograd.grad(module(own).square().sum(), list(module.parameters()))
        wanted = expected(module, step, world, through=narrow)
        for p, average, gradient, earlier in zip(
            module.parameters(), wanted, mine, kept, strict=True
        ):
            assert p.grad.dtype == torch.float32
            if world == 1:  # no more than one cast there and back
                assert torch.equal(p.grad, (earlier + gradient).to(narrow).float())
            scale = float((earlier + average).abs().max())
            torch.testing.assert_close(
                p.grad, earlier + average, rtol=RTOL[narrow], atol=RTOL[narrow] * scale
            )
            assert torch.equal(p.grad, p.grad.to(narrow).float()), "travelled in a wider type"
        kept = [p.grad.clone() for p in module.parameters()]


def forward_in_a_narrow_type(comm, device, narrow):
    """Forward and backward in ``param_dtype``, the rest as above."""
    module = layers().to(device)
    settings = _MixedPrecision(param_dtype=narrow, reduce_dtype=narrow, buffer_dtype=narrow)
    model = dpcore.DataParallel(module, comm=comm, bucket_cap_mb=CAP_MB, mixed_precision=settings)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    for step in range(3):
        wanted = expected(module, step, comm.world_size)
        optimizer.zero_grad()
        output = model(inputs_of(step, comm.rank).to(device))
        assert output.dtype == narrow
        output.float().square().sum().backward()
        for p, average in zip(module.parameters(), wanted, strict=True):
            assert p.dtype == p.grad.dtype == torch.float32
            scale = float(average.abs().max())
            torch.testing.assert_close(p.grad, average, rtol=0.1, atol=0.1 * scale)
        optimizer.step()
    assert model.stats()["copies"]["alone"] == 0


class Fork(nn.Module):
    """Two outputs over one parameter."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.left = nn.Parameter(torch.full((WIDTH,), 2.0))
        self.right = nn.Parameter(torch.full((WIDTH,), 3.0))

    def forward(self, x):
        x = x * self.shared
        return x * self.left, x * self.right


def two_backwards_of_one_forward(comm, device, as_view, narrow):
    """The second adds to a gradient whose bucket was complete."""
    options = {} if narrow is None else {"mixed_precision": _MixedPrecision(reduce_dtype=narrow)}
    model = dpcore.DataParallel(
        Fork().to(device),
        comm=comm,
        bucket_cap_mb=1e-6,
        schedule="sequential",
        gradient_as_bucket_view=as_view,
        **options,
    )
    for _ in range(3):
        model.zero_grad()
        x = torch.full((WIDTH,), 1.0 + comm.rank, device=device)
        left, right = model(x)
        left.sum().backward(retain_graph=True)
        right.sum().backward()
        mean = (1.0 + comm.world_size) / 2
        for p, each in zip(model.parameters(), (5.0, 0.5, 0.5), strict=True):
            assert torch.equal(p.grad, torch.full_like(p, each * mean)), (p.grad, each * mean)


def other_layouts_are_copied_alone(comm, device):
    """A gradient that the program has put there, with strides of its own."""
    module = layers(2).to(device)
    model = dpcore.DataParallel(module, comm=comm)
    weight = module[0].weight
    for step in range(3):
        model.zero_grad()
        weight.grad = torch.zeros(WIDTH, WIDTH, device=device).t()
        x = inputs_of(step, comm.rank).to(device)
        copies = counted(model, lambda x=x: model(x).square().sum().backward())
        assert copies["alone"] == 1 and copies["together"] == 3
        wanted = expected(module, step, comm.world_size)
        for p, average in zip(module.parameters(), wanted, strict=True):
            torch.testing.assert_close(p.grad, average)
            assert p.grad.stride() == p.stride()


def more_than_a_launch_can_carry(comm, device):
    """1,024 gradients go into one."""

    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ParameterList([torch.full((3,), float(i)) for i in range(1030)])

        def forward(self, x):
            return torch.stack([p * x for p in self.parts]).sum()

    model = dpcore.DataParallel(Many().to(device), comm=comm, bucket_cap_mb=100)
    for _ in range(2):
        model.zero_grad()
        x = torch.full((3,), 1.0 + comm.rank, device=device)
        copies = counted(model, lambda x=x: model(x).backward())
        assert copies == {"launches": 2, "together": 1030, "alone": 0}
        for p in model.parameters():
            assert torch.equal(p.grad, torch.full_like(p, (1.0 + comm.world_size) / 2))


def unused_gradients(comm, device, as_view, narrow):
    """What only some ranks have is the average everywhere; what nobody has stays away."""
    options = {} if narrow is None else {"mixed_precision": _MixedPrecision(reduce_dtype=narrow)}

    class Chooses(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ParameterList([torch.ones(WIDTH) for _ in range(3)])

        def forward(self, x, which):
            return (self.parts[0] * x + (self.parts[1] * x if which else 0)).sum()

    model = dpcore.DataParallel(
        Chooses().to(device),
        comm=comm,
        find_unused_parameters=True,
        gradient_as_bucket_view=as_view,
        **options,
    )
    always, sometimes, never = model.module.parts
    for step in range(3):
        model.zero_grad()
        chosen = step == 1 or comm.rank == 0
        model(torch.full((WIDTH,), 2.0, device=device), chosen).backward()
        share = 1.0 if step == 1 else 1 / comm.world_size
        torch.testing.assert_close(always.grad, torch.full_like(always, 2.0))
        torch.testing.assert_close(
            sometimes.grad, torch.full_like(sometimes, 2.0 * share), rtol=1e-2, atol=0
        )
        assert never.grad is None


def ranks_without_inputs(comm, device, narrow):
    """Join: a rank that has no more batches contributes zeros, and the average is that of the
    others."""
    options = {} if narrow is None else {"mixed_precision": _MixedPrecision(reduce_dtype=narrow)}
    module = layers(2).to(device)
    model = dpcore.DataParallel(module, comm=comm, **options)
    world = comm.world_size
    with model.join(divide_by_initial_world_size=False):
        for step in range(2 + comm.rank):
            model.zero_grad()
            model(inputs_of(step, comm.rank).to(device)).square().sum().backward()
            ranks = [rank for rank in range(world) if 2 + rank > step]
            totals = [torch.zeros_like(p) for p in module.parameters()]
            for rank in ranks:
                x = inputs_of(step, rank).to(device)
                found = torch.autograd.grad(module(x).square().sum(), list(module.parameters()))
                for total, gradient in zip(totals, found, strict=True):
                    total += gradient / len(ranks)
            for p, average in zip(module.parameters(), totals, strict=True):
                scale = float(average.abs().max())
                torch.testing.assert_close(p.grad, average, rtol=2e-2, atol=2e-2 * scale)
