"""Whatever a program does to ``.grad`` between two backwards, the next ones average as one process
with the whole batch does: the bucket goes by addresses, not by the tensor that it handed out."""

import copy
import pickle

import pytest
import torch

import dpcore
from tests.data_parallel.models import Small, batch, part

# ---- what a program does after a backward, to the gradients of trained parameters ------------


def nothing(parameters):
    pass


def assigns_data(parameters):
    """The old way to clip by hand."""
    for p in parameters:
        p.grad.data = p.grad.data.clamp(-0.1, 0.1)


def sets_storage(parameters):
    for p in parameters:
        p.grad.set_(p.grad.clamp(-0.1, 0.1))


def assigns_another(parameters):
    for p in parameters:
        p.grad = p.grad.clamp(-0.1, 0.1)


def assigns_a_view_of_its_own(parameters):
    for p in parameters:
        p.grad = p.grad.view(-1).view(p.shape)


def assigns_a_transposed_one(parameters):
    for p in parameters:
        p.grad = p.grad.t().contiguous().t()


def resizes(parameters):
    for p in parameters:
        size = p.grad.shape
        before = p.grad.clone()
        p.grad.resize_(p.grad.numel() + 100)
        p.grad.resize_(size).copy_(before)


def changes_strides(parameters):
    for p in parameters:
        if p.dim() == 2:
            before = p.grad.clone()
            p.grad.as_strided_(p.shape, (1, p.shape[0])).copy_(before)


def detaches(parameters):
    for p in parameters:
        p.grad.detach_()


def asks_for_its_gradient(parameters):
    for p in parameters:
        p.grad.requires_grad_()


def makes_it_narrower(parameters):
    for p in parameters:
        if hasattr(p, "grad_dtype"):  # torch before 2.10 refuses another type
            p.grad_dtype = None
            p.grad = p.grad.float()


def makes_it_sparse(parameters):
    for p in parameters:
        p.grad = p.grad.to_sparse()


def shares_its_memory(parameters):
    for p in parameters:
        p.grad.share_memory_()


def takes_it_from_numpy(parameters):
    for p in parameters:
        p.grad = torch.from_numpy(p.grad.numpy().copy())


def copies_deeply(parameters):
    for p in parameters:
        p.grad = copy.deepcopy(p.grad)


def pickles(parameters):
    for p in parameters:
        p.grad = pickle.loads(pickle.dumps(p.grad))


def takes_the_last_away(parameters):
    parameters[-1].grad = None


def exchanges(parameters):
    """Gradients of two parameters of one shape change places."""
    for p in parameters:
        for q in parameters:
            if p is not q and p.shape == q.shape:
                p.grad, q.grad = q.grad, p.grad
                return
    raise AssertionError("no two of one shape")


def frees(parameters):
    """As optimizers do that want the memory back."""
    for p in parameters:
        p.grad.untyped_storage().resize_(0)
        p.grad = None


def frees_by_data(parameters):
    for p in parameters:
        p.grad.data = torch.empty(0, dtype=p.dtype)
        p.grad = None


KEPT = (
    nothing,
    assigns_data,
    sets_storage,
    assigns_another,
    assigns_a_view_of_its_own,
    assigns_a_transposed_one,
    resizes,
    changes_strides,
    detaches,
    asks_for_its_gradient,
    makes_it_narrower,
    makes_it_sparse,
    shares_its_memory,
    takes_it_from_numpy,
    copies_deeply,
    pickles,
    takes_the_last_away,
    exchanges,
)
FREED = (frees, frees_by_data)


def zeroed(parameters):
    for p in parameters:
        if p.grad is not None:
            p.grad.requires_grad_(False)
            p.grad.zero_()


def forgotten(parameters):
    for p in parameters:
        p.grad = None


def kept(parameters):
    pass


AFTERWARDS = (forgotten, zeroed, kept)


def dense(grad):
    return None if grad is None else grad.detach().to_dense().double().clone()


def gradients_of_steps(model, x_and_y, act, afterwards, micro_batches):
    """Of each step: the gradients after its synchronised backward."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    seen = []
    for step in range(4):
        for micro in range(micro_batches):
            x, y = x_and_y(step * micro_batches + micro)
            last = micro == micro_batches - 1
            if last or not isinstance(model, dpcore.DataParallel):
                (model(x) - y).square().mean().backward()
            else:
                with model.no_sync():
                    (model(x) - y).square().mean().backward()
        seen.append([dense(p.grad) for p in parameters])
        act(parameters)
        afterwards(parameters)
    return seen


CASES = [(act, afterwards) for act in KEPT for afterwards in AFTERWARDS] + [
    (act, forgotten) for act in FREED
]


@pytest.mark.parametrize("as_view", (True, False), ids=("views", "copies"))
@pytest.mark.parametrize("micro_batches", (1, 2), ids=("each", "no_sync"))
def test_gradients_are_averaged_whatever_was_done_to_the_last_ones(as_view, micro_batches):
    def body(comm):
        wrong = []
        for act, afterwards in CASES:
            model = dpcore.DataParallel(
                Small(), comm=comm, bucket_cap_mb=0.01, gradient_as_bucket_view=as_view
            )
            mine = gradients_of_steps(
                model,
                lambda n: [part(t, comm) for t in batch(n)],
                act,
                afterwards,
                micro_batches,
            )
            wanted = gradients_of_steps(Small(), batch, act, afterwards, micro_batches)
            for step, (got, right) in enumerate(zip(mine, wanted, strict=True)):
                for a, b in zip(got, right, strict=True):
                    if (a is None) != (b is None) or (a is not None and not torch.allclose(a, b)):
                        wrong.append((act.__name__, afterwards.__name__, step))
                        break
        assert not wrong, wrong

    dpcore.spawn(body, 2, mode="threads", timeout=60)
