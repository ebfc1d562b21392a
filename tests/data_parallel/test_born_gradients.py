"""``gradients="born"``: backward makes large gradients in their buckets, and every bit is as with
``gradients="copied"``, whatever a program does between and in its steps.

Each program below runs both ways on the same ranks. It returns tensors, and says by ``born`` and
``moved`` whether the way that it is about was taken.
"""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dpcore as dp
from tests.data_parallel.models import seeded

WORLD = 2
WIDTH = 512  # a weight has 1 MiB, the least that is born in place
LAYERS = 4
STEPS = 6


class Wide(nn.Module):
    def __init__(self, layers=LAYERS):
        super().__init__()
        self.layers = seeded(lambda: nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))

    def forward(self, x, which=None):
        for number in range(len(self.layers)) if which is None else which:
            x = torch.tanh(self.layers[number](x))
        return x


def inputs(comm, step, rows=3):
    generator = torch.Generator().manual_seed(100 * step + comm.rank)
    return torch.randn(rows, WIDTH, generator=generator)


def loss_of(model, comm, step, rows=3, **options):
    return model(inputs(comm, step, rows), **options).square().sum()


def weights(model):
    return [p for p in model.parameters() if p.dim() == 2]


def gradients(model):
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def run_both(run, make=Wide, world=WORLD, **options):
    """The counts of copies of the model with gradients born in place, and its report."""

    def body(comm):
        results = {}
        for way in ("copied", "born"):
            given = {"bucket_cap_mb": 2, "schedule": "bucketed", "mistakes": "ignore", **options}
            model = dp.DataParallel(make(), comm=comm, gradients=way, **given)
            results[way] = [torch.as_tensor(value).clone() for value in run(model, comm)]
            if way == "born":
                counts, report = model._reducer.copies(), model.bucket_report()
        assert len(results["born"]) == len(results["copied"]) > 0
        for number, pair in enumerate(zip(results["born"], results["copied"], strict=True)):
            assert torch.equal(*pair), number
        return counts, report.gradients

    return dp.spawn(body, world, mode="threads")[0]


# ---- plain steps -----------------------------------------------------------------------------


@pytest.mark.parametrize("world", (1, 2, 3))
@pytest.mark.parametrize("cap", (0, 2, 100))
def test_plain_steps_copy_no_large_gradient(world, cap):
    def run(model, comm):
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, comm, step).backward()
            optimizer.step()
        return list(model.parameters())

    counts, ways = run_both(run, world=world, bucket_cap_mb=cap)
    assert ways == {"born": LAYERS, "small": LAYERS}
    assert counts["born"] == (STEPS - 1) * LAYERS and counts["moved"] == 0


@pytest.mark.parametrize("schedule", ("sequential", "flat", "per_parameter"))
def test_under_every_schedule(schedule):
    def run(model, comm):
        for step in range(STEPS):
            model.zero_grad()
            loss_of(model, comm, step).backward()
        return gradients(model)

    assert run_both(run, schedule=schedule)[0]["born"] == (STEPS - 1) * LAYERS


@pytest.mark.parametrize("schedule", ("priority", "dear", "zero1", "zero2"))
def test_across_steps(schedule):
    def run(model, comm):
        optimizer = dp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, comm, step).backward()
            optimizer.step()
        model.module.state_dict()
        optimizer.flush() if hasattr(optimizer, "flush") else None
        return list(model.parameters())

    counts, _ = run_both(run, schedule=schedule)
    assert (counts["born"] == 0) if schedule == "zero2" else counts["born"] > 0


# ---- what a program does with gradients -------------------------------------------------------

HOLDS = {
    "tensor": lambda p: p.grad,
    "view": lambda p: p.grad.view(-1),
    "slice": lambda p: p.grad[1:],
    "detached": lambda p: p.grad.detach(),
    "numpy": lambda p: p.grad.numpy(),
    "copy": lambda p: copy.deepcopy(p.grad),
    "pickled": lambda p: pickle.loads(pickle.dumps(p.grad)),
}


@pytest.mark.parametrize("hold", HOLDS.values(), ids=HOLDS)
def test_kept_gradients_keep_their_numbers(hold):
    def run(model, comm):
        kept = []
        for step in range(STEPS):
            model.zero_grad()
            loss_of(model, comm, step).backward()
            kept += [hold(p) for p in weights(model)]
        return kept

    run_both(run)


def test_kept_one_step_in_three():
    def run(model, comm):
        kept = []
        for step in range(9):
            model.zero_grad()
            loss_of(model, comm, step).backward()
            if step % 3 == 1:
                kept += [p.grad for p in weights(model)]
        return kept + gradients(model)

    assert run_both(run)[0]["born"] > 0


def set_by_hand(p):
    p.grad = torch.full_like(p, 0.5)


def set_data(p):
    p.grad.data = p.grad.data.clamp(-0.1, 0.1)


def resized(p):
    before = p.grad.clone()
    p.grad.resize_(2 * WIDTH, WIDTH)
    p.grad.resize_(before.shape).copy_(before)


def transposed(p):
    p.grad = p.grad.t().contiguous().t()


def freed(p):
    p.grad.untyped_storage().resize_(0)
    p.grad = None


def zeroed(p):
    p.grad.zero_()


ACTS = (set_by_hand, set_data, resized, transposed, freed, zeroed)


@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__)
@pytest.mark.parametrize("every", (1, 3))
def test_gradients_that_the_program_changes(act, every):
    def run(model, comm):
        for step in range(9):
            loss_of(model, comm, step).backward()
            if step % every == 0:
                for p in weights(model):
                    act(p)
            else:
                model.zero_grad(set_to_none=step % 2 == 0)
        loss_of(model, comm, 9).backward()
        return gradients(model)

    run_both(run)


@pytest.mark.parametrize("to_none", (True, False))
def test_both_kinds_of_zero_grad(to_none):
    def run(model, comm):
        seen = []
        for step in range(STEPS):
            model.zero_grad(set_to_none=to_none)
            loss_of(model, comm, step).backward()
            seen += gradients(model)
        return seen

    _, ways = run_both(run)
    assert ways["born" if to_none else "kept"] == LAYERS


# ---- backwards that differ ---------------------------------------------------------------------


def test_shapes_that_change():
    """With 512 rows, an activation has the size of a weight."""

    def run(model, comm):
        seen = []
        for step, rows in enumerate((3, 512, 3, 512, 512, 7, 512, 512, 3, 3)):
            model.zero_grad()
            loss_of(model, comm, step, rows).backward()
            seen += gradients(model)
        return seen

    assert run_both(run)[0]["born"] > 0


def test_layers_in_another_order_and_unused_ones():
    def run(model, comm):
        seen = []
        orders = [(0, 1, 2, 3)] * 3 + [(3, 2, 1, 0), (0, 1), (2, 3, 2), (1, 0, 2, 3), (3,)] * 2
        for step, which in enumerate(orders):
            model.zero_grad()
            loss_of(model, comm, step, which=which).backward()
            seen += gradients(model)
        return seen

    assert run_both(run, find_unused_parameters=True)[0]["born"] > 0


class Checkpointed(Wide):
    reentrant = False

    def forward(self, x):
        x = x.clone().requires_grad_()
        for layer in self.layers:
            x = checkpoint(lambda y, of=layer: torch.tanh(of(y)), x, use_reentrant=self.reentrant)
        return x


class Reentrant(Checkpointed):
    reentrant = True


@pytest.mark.parametrize("make", (Checkpointed, Reentrant))
@pytest.mark.parametrize("static", (False, True))
def test_checkpoints(make, static):
    def run(model, comm):
        seen = []
        for step in range(STEPS):
            model.zero_grad()
            loss_of(model, comm, step).backward()
            seen += gradients(model)
        return seen

    run_both(run, make, static_graph=static)


def test_layers_used_twice_in_a_static_graph():
    def run(model, comm):
        for step in range(STEPS):
            model.zero_grad()
            loss_of(model, comm, step, which=(0, 1, 2, 3, 1, 0)).backward()
        return gradients(model)

    assert run_both(run, static_graph=True)[0]["born"] > 0


def test_several_backwards():
    def run(model, comm):
        seen = []
        for step in range(STEPS):
            model.zero_grad()
            loss = loss_of(model, comm, step)
            loss.backward(retain_graph=True)
            if step % 2:
                loss.backward()
            with model.no_sync():
                loss_of(model, comm, step + 50).backward()
            loss_of(model, comm, step + 100).backward()
            seen += gradients(model)
        return seen

    run_both(run)


def test_gradients_that_autograd_returns_or_that_have_a_graph():
    def run(model, comm):
        seen = []
        for step in range(STEPS):
            model.zero_grad()
            loss = loss_of(model, comm, step)
            seen += torch.autograd.grad(loss, weights(model), retain_graph=True)
            loss.backward(create_graph=step == 3)
            seen += [g.detach() for g in gradients(model)]
            model.zero_grad()
            with model.no_sync():
                loss = loss_of(model, comm, step)
            first = torch.autograd.grad(loss, weights(model), create_graph=True)
            seen += torch.autograd.grad(sum(g.square().sum() for g in first), weights(model))
        return seen

    run_both(run)


def test_sparse_gradients_beside_them():
    class Embedded(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = seeded(lambda: nn.Embedding(600, WIDTH, sparse=True))
            self.wide = Wide(2)

        def forward(self, x):
            return self.wide(self.table((x[:, :4].abs() * 100).long() % 600).sum(1))

    def run(model, comm):
        for step in range(STEPS):
            model.zero_grad()
            loss_of(model, comm, step).backward()
        return [p.grad.to_dense() for p in model.parameters()]

    assert run_both(run, Embedded)[0]["born"] > 0


# ---- hooks -------------------------------------------------------------------------------------


def test_tensors_of_hooks_that_take_the_places():
    """A hook makes tensors of the size of a weight in some steps and keeps them. The plan takes
    them for gradients: the buckets move, and the tensors keep their numbers."""

    def run(model, comm):
        kept, step = [], 0

        def hook(grad):
            if step % 3 == 2:
                kept.extend(torch.full((WIDTH, WIDTH), float(step + i)) for i in range(2))

        model.module.layers[1].register_full_backward_hook(lambda *_: hook(None))
        seen = []
        for step in range(9):
            model.zero_grad()
            loss_of(model, comm, step).backward()
            seen += gradients(model)
        return kept + seen

    assert run_both(run)[0]["moved"] > 0


def test_a_tensor_that_is_freed_before_the_gradient_comes():
    def run(model, comm):
        step = 0

        def hook(*_):
            if step % 3 == 2:
                torch.full((WIDTH, WIDTH), 7.0).sum()

        model.module.layers[2].register_full_backward_hook(hook)
        seen = []
        for step in range(9):
            model.zero_grad()
            loss_of(model, comm, step).backward()
            seen += gradients(model)
        return seen

    run_both(run)


WAYS_OF_HOOKS = {
    "tensor": lambda g: g,
    "detached": lambda g: g.detach(),
    "slice": lambda g: g[1:],
    "numpy": lambda g: g.numpy(),
}


@pytest.mark.parametrize("keep", WAYS_OF_HOOKS.values(), ids=WAYS_OF_HOOKS)
@pytest.mark.parametrize("where", ("before", "accumulated", "after"))
@pytest.mark.parametrize("late", (False, True), ids=("from the first step", "later"))
def test_hooks_that_keep_what_comes(keep, where, late):
    """Local gradients stay local in what a hook has kept of them."""

    def run(model, comm):
        kept, seen = [], []

        def install():
            for p in weights(model):
                if where == "before":
                    p.register_hook(lambda g: kept.append(keep(g)))
                elif where == "accumulated":
                    p.register_post_accumulate_grad_hook(lambda p: kept.append(keep(p.grad)))
                else:
                    node = torch.autograd.graph.get_gradient_edge(p).node
                    nodes.append(node)
                    node.register_hook(lambda _, incoming: kept.append(keep(incoming[0])))

        nodes = []
        for step in range(STEPS):
            if step == (3 if late else 0):
                install()
            model.zero_grad()
            loss_of(model, comm, step).backward()
            seen += gradients(model)
        return [torch.from_numpy(k) if isinstance(k, np.ndarray) else k for k in kept] + seen

    run_both(run)


def test_a_hook_that_replaces_gradients():
    def run(model, comm):
        for p in weights(model):
            p.register_hook(lambda g: g * 2)
        for step in range(STEPS):
            model.zero_grad()
            loss_of(model, comm, step).backward()
        return gradients(model)

    assert run_both(run)[0]["born"] > 0


# ---- groups and settings -----------------------------------------------------------------------


def test_narrow_buckets_and_own_memory_copy():
    def run(model, comm):
        for step in range(STEPS):
            model.zero_grad()
            loss_of(model, comm, step).backward()
        return gradients(model)

    assert run_both(run, gradient_as_bucket_view=False)[0]["born"] == 0

    def narrow(model, comm):
        model._reducer.reduce_as(torch.bfloat16)
        return run(model, comm)

    assert run_both(narrow)[0]["born"] == 0


def test_two_wrappers_of_one_module():
    def run(model, comm):
        other = dp.DataParallel(model.module, comm=comm, gradients=model._gradients)
        seen = []
        for step in range(STEPS):
            model.zero_grad()
            loss_of(model if step % 2 else other, comm, step).backward()
            seen += gradients(model)
        return seen

    run_both(run)


def test_two_models_in_one_backward():
    def run(model, comm):
        other = dp.DataParallel(Wide(), comm=comm, gradients=model._gradients)
        seen = []
        for step in range(STEPS):
            model.zero_grad()
            other.zero_grad()
            x = inputs(comm, step)
            (model(x) * other(x) + other(model(x))).sum().backward() if step < 0 else (
                model(other(x)).sum().backward()
            )
            seen += gradients(model) + gradients(other)
        return seen

    run_both(run)


def test_the_report_says_how_gradients_came():
    def body(comm):
        model = dp.DataParallel(Wide(), comm=comm, gradients="born")
        assert model.bucket_report().gradients == {}
        for step in range(2):
            model.zero_grad()
            loss_of(model, comm, step).backward()
            if step == 0:
                assert model.bucket_report().gradients == {"small": 4, "watched": 4}
        assert "gradients: 4 born in place, 4 copied: under 1 MiB" in repr(model.bucket_report())
        copied = dp.DataParallel(Wide(), comm=comm, gradients="copied")
        loss_of(copied, comm, 0).backward()
        assert copied.bucket_report().gradients == {}

    dp.spawn(body, WORLD, mode="threads")


def test_the_variable_and_what_it_refuses(monkeypatch):
    def way(comm):
        return dp.DataParallel(nn.Linear(2, 2), comm=comm)._gradients

    monkeypatch.delenv("DPCORE_GRADIENTS", raising=False)
    assert dp.spawn(way, 1, mode="threads") == ["born"]
    monkeypatch.setenv("DPCORE_GRADIENTS", "copied")
    assert dp.spawn(way, 1, mode="threads") == ["copied"]
    monkeypatch.setenv("DPCORE_GRADIENTS", "stolen")
    with pytest.raises(dp.Unsupported, match="DPCORE_GRADIENTS='stolen': use born or copied"):
        dp.spawn(way, 1, mode="threads")
