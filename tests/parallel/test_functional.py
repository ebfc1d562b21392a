"""Every collective is what it says, and its backward is its transpose."""

import numpy as np
import pytest
import torch

import dpcore as dp
from dpcore.parallel import functional

WORLD = 3


def threads(body, world=WORLD, *args, **options):
    return dp.spawn(body, world, *args, mode="threads", **options)


def numbers(seed, *shape):
    made = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=made)


# name -> (call, shape of a rank's x, which may differ); all lengths are uneven.
EXTENTS = [4, 1, 2]
CALLS = {
    "gather": (lambda x, c: functional.gather(x, c, 1), lambda r: (2, 3)),
    "gather uneven": (lambda x, c: functional.gather(x, c, -1, EXTENTS), lambda r: (2, EXTENTS[r])),
    "reduce_scatter": (lambda x, c: functional.reduce_scatter(x, c, 1), lambda r: (2, 7)),
    "reduce_scatter even": (functional.reduce_scatter, lambda r: (6, 2)),
    "all_to_all": (lambda x, c: functional.all_to_all(x, c, 1, 2), lambda r: (2, 5, 3)),
    "all_to_all uneven": (
        lambda x, c: functional.all_to_all(x, c, 0, 1, join_sizes=EXTENTS),
        lambda r: (4, EXTENTS[r]),
    ),
    "shift": (functional.shift, lambda r: (2, 3)),
    "shift back": (lambda x, c: functional.shift(x, c, -2), lambda r: (3,)),
}


@pytest.mark.parametrize("name", CALLS)
def test_backward_is_the_transpose(name):
    """<A x, w> = <x, A' w> over all ranks, for A and, since A' is differentiated too, for A'."""
    call, shape = CALLS[name]

    def body(comm):
        x = numbers(comm.rank, *shape(comm.rank)).requires_grad_()
        y = call(x, comm)
        w = numbers(10 + comm.rank, *y.shape).requires_grad_()
        (back,) = torch.autograd.grad(y, x, w, create_graph=True)
        u = numbers(20 + comm.rank, *x.shape)
        (again,) = torch.autograd.grad(back, w, u)
        assert torch.equal(again, call(u, comm))
        return (y * w).sum().item(), (x * back).sum().item()

    found = np.array(threads(body))
    assert abs(found[:, 0].sum() - found[:, 1].sum()) < 1e-12
    assert abs(found[:, 0].sum()) > 1e-3


def test_what_they_give():
    def body(comm):
        rank, world = comm.rank, comm.world_size
        x = torch.arange(3) + 10 * rank
        everything = [torch.arange(3) + 10 * r for r in range(world)]
        assert torch.equal(functional.gather(x, comm), torch.cat(everything))
        assert torch.equal(functional.reduce_from(x, comm), sum(everything))
        assert torch.equal(functional.copy_to(x, comm), x)
        assert torch.equal(functional.reduce_scatter(x, comm), sum(everything)[rank : rank + 1])
        assert torch.equal(functional.shift(x, comm), everything[rank - 1])
        square = x.expand(2, 3)
        exchanged = functional.all_to_all(square, comm, split=1, join=0)
        assert exchanged.tolist() == [[10 * r + rank] for r in range(world) for _ in range(2)]

    threads(body)


def test_a_layer_of_two_halves_has_the_gradients_of_one_process():
    """gradcheck over ranks: the difference quotient of one loss by each rank's own weights."""
    whole, x = numbers(1, 4, 6), numbers(2, 5, 4)

    def loss_of(weight, comm):
        hidden = torch.tanh(functional.copy_to(x, comm) @ weight)
        return functional.reduce_from(hidden @ weight.T, comm).square().sum()

    def body(comm):
        columns = slice(2 * comm.rank, 2 * comm.rank + 2)
        weight = whole[:, columns].clone().requires_grad_()
        loss_of(weight, comm).backward()
        differences = torch.zeros(comm.world_size, *weight.shape, dtype=torch.float64)
        for rank in range(comm.world_size):  # whose weight changes: all compute the loss
            for place in np.ndindex(*weight.shape):
                losses = []
                for step in (1e-6, -1e-6):
                    changed = weight.detach().clone()
                    changed[place] += step * (rank == comm.rank)
                    losses.append(loss_of(changed, comm).item())
                differences[rank][place] = (losses[0] - losses[1]) / 2e-6
        torch.testing.assert_close(weight.grad, differences[comm.rank], rtol=1e-6, atol=1e-6)
        return weight.grad

    one = whole.clone().requires_grad_()
    (torch.tanh(x @ one) @ one.T).square().sum().backward()
    torch.testing.assert_close(torch.cat(threads(body), 1), one.grad, rtol=1e-12, atol=1e-12)


def test_x_that_all_hold_gets_the_gradients_of_all():
    def body(comm):
        x = numbers(3, 4).requires_grad_()
        (functional.copy_to(x, comm) * (comm.rank + 1)).sum().backward()
        assert x.grad.tolist() == [6.0] * 4

    threads(body)


def test_what_makes_no_sense_is_refused():
    def body(comm):
        with pytest.raises(dp.Unsupported, match="both dimension 1"):
            functional.all_to_all(torch.ones(2, 3), comm, 1, -1)
        with pytest.raises(dp.Unsupported, match="must be at least 0 and below 1"):
            functional.dropout(torch.ones(2), 1.0, torch.Generator())
        for wrong in (functional.gather, functional.reduce_scatter):
            with pytest.raises(dp.Unsupported, match=r"shape \[2, 3\] has no dimension 2"):
                wrong(torch.ones(2, 3), comm, 2)
            with pytest.raises(TypeError, match="expected a tensor, not a list"):
                wrong([1.0], comm)
        with pytest.raises(dp.Unsupported, match=r"shape \[\] has no dimension 0"):
            functional.gather(torch.ones(()), comm)
        with pytest.raises(TypeError, match="expected a tensor, not a float"):
            functional.shift(1.0, comm)

    threads(body, 1)


def test_dropout_of_parts_differs_and_of_what_all_hold_does_not():
    def body(comm):
        mesh = dp.mesh(comm, data=2, tensor=2)
        x = torch.ones(64)
        alike = functional.dropout(x, 0.5, mesh.generator(1, "data"))
        own = functional.dropout(x, 0.5, mesh.generator(1, "data", "tensor"))
        assert torch.equal(alike, functional.dropout(x, 0.5, mesh.generator(1, "data")))
        assert set(alike.tolist()) == {0.0, 2.0}
        return mesh.coordinates, alike.tolist(), own.tolist()

    found = threads(body, 4)
    for place, alike, _ in found:
        for other, others, _ in found:
            assert (alike == others) == (place["data"] == other["data"])
    assert len({tuple(own) for _, _, own in found}) == 4
