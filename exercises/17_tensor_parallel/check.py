"""Checks of the exercise beside this file."""

import torch
from torch.nn.functional import mse_loss

from dpcore.exercise import training
from dpcore.exercise.judging import in_words, need, need_values

ALLOWED = ("all_reduce",)
TOKENS, WIDTH, INNER = 5, 4, 12  # INNER: for 2, 3 and 4 ranks
WHOLE = 2 * WIDTH * INNER + INNER + WIDTH  # elements of matrices and biases
NAMES = ("up", "up_bias", "down", "down_bias")
CUT_ALONG = (1, 0, 0, None)


def given():
    """up, up_bias, down, down_bias, x and y."""
    numbers = torch.Generator().manual_seed(17)
    shapes = ((WIDTH, INNER), (INNER,), (INNER, WIDTH), (WIDTH,), (TOKENS, WIDTH), (TOKENS, WIDTH))
    return [torch.randn(*shape, generator=numbers, dtype=torch.float64) for shape in shapes]


def alone():
    """y, dx and the gradients of one process, by autograd."""
    *weights, x, target = (tensor.requires_grad_() for tensor in given())
    up, up_bias, down, down_bias = weights
    y = torch.relu(x @ up + up_bias) @ down + down_bias
    mse_loss(y, target.detach(), reduction="sum").backward()
    return y.detach(), x.grad, [weight.grad for weight in weights]


def runs(on, student):
    """Forward and backward, what each has sent, and what is kept of the matrices."""
    *weights, x, target = given()
    layer = student.TwoMatrices(on.comm, *weights)
    kept = training.elements_of(vars(layer))
    with on.watch() as forward:
        y = layer.forward(x)
    dy = 2 * (alone()[0] - target)
    before = dy.clone()
    with on.watch() as backward:
        dx = layer.backward(dy)
    return {
        "y": y,
        "dx": dx,
        "gradients": list(layer.gradients),
        "forward": forward.sent(),
        "backward": backward.sent(),
        "kept": kept,
        "dy_is_as_it_was": bool(torch.equal(dy, before)),
    }


def check_parts(lab):
    """Each rank keeps its parts of both matrices and of up_bias, and down_bias, and no more."""
    for world in (2, 3):
        most = (WHOLE - WIDTH) // world + WIDTH
        for rank, found in enumerate(lab.ranks("runs", world)):
            need(
                found["kept"] <= most,
                f"rank {rank} of {world} keeps {found['kept']} elements, and its parts have {most} "
                "(a view keeps what it is a view of)",
            )


def need_forward(lab, world):
    for rank, found in enumerate(lab.ranks("runs", world)):
        need_values(found["y"], alone()[0].numpy(), f"y on rank {rank} of {world}", 1e-12)


def check_forward(lab):
    """Two ranks have the y of one process, up to rounding."""
    need_forward(lab, 2)


def check_more(lab):
    """So have three ranks, and four, and one."""
    for world in (3, 4, 1):
        need_forward(lab, world)


def check_one_sum(lab):
    """Forward sends one all-reduce of the size of y."""
    need_one_sum(lab, "forward", "y")


def check_dx(lab):
    """All ranks have the dx of one process."""
    for world in (2, 3):
        for rank, found in enumerate(lab.ranks("runs", world)):
            need_values(found["dx"], alone()[1].numpy(), f"dx on rank {rank} of {world}", 1e-12)


def check_gradients(lab):
    """Gradients of the parts are parts of one process's gradients, and down_bias has all of its."""
    for world in (2, 3):
        wanted = alone()[2]
        for rank, found in enumerate(lab.ranks("runs", world)):
            need(
                len(found["gradients"]) == 4,
                f"rank {rank} has {len(found['gradients'])} gradients and not {len(NAMES)}",
            )
            for name, along, got, whole in zip(
                NAMES, CUT_ALONG, found["gradients"], wanted, strict=True
            ):
                part = whole if along is None else whole.chunk(world, along)[rank]
                what = f"the gradient of {name} on rank {rank} of {world}"
                need_values(got, part.numpy(), what, 1e-12)


def check_one_sum_back(lab):
    """Backward sends one all-reduce of the size of dx: gradients of matrices are not sent."""
    need_one_sum(lab, "backward", "dx")


def need_one_sum(lab, where, what):
    wanted = [["all_reduce", TOKENS * WIDTH * 8]]
    for rank, found in enumerate(lab.ranks("runs", 2)):
        need(
            [list(one) for one in found[where]] == wanted,
            f"{where} of rank {rank} runs {in_words(found[where])}; one all_reduce of {what}, "
            f"{wanted[0][1]} bytes, is enough and needed",
        )


def check_dy(lab):
    """dy is as it was: it belongs to whoever called."""
    for rank, found in enumerate(lab.ranks("runs", 2)):
        need(found["dy_is_as_it_was"], f"rank {rank}: backward has changed dy")
