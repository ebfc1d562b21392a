"""Checks of the exercise beside this file."""

import torch
from torch.nn.functional import mse_loss

from dpcore.school.exercise import training
from dpcore.school.exercise.explaining import Origin
from dpcore.school.exercise.judging import in_words, need, need_values, need_waited

ALLOWED = ("all_reduce",)
TOKENS, WIDTH, INNER = 5, 4, 12  # INNER: for 2, 3 and 4 ranks
WHOLE = 2 * WIDTH * INNER + INNER + WIDTH  # elements of matrices and biases
NAMES = ("up", "up_bias", "down", "down_bias")
CUT_ALONG = (1, 0, 0, None)


def given(call=0):
    """up, up_bias, down, down_bias, x and y; x and y are others in each call."""
    numbers = torch.Generator().manual_seed(17)
    shapes = ((WIDTH, INNER), (INNER,), (INNER, WIDTH), (WIDTH,))
    weights = [torch.randn(*shape, generator=numbers, dtype=torch.float64) for shape in shapes]
    numbers = torch.Generator().manual_seed(18 + call)
    return [*weights, *torch.randn(2, TOKENS, WIDTH, generator=numbers, dtype=torch.float64)]


def alone(call=0):
    """y, dx and the gradients of one process, by autograd."""
    *weights, x, target = (tensor.requires_grad_() for tensor in given(call))
    up, up_bias, down, down_bias = weights
    y = torch.relu(x @ up + up_bias) @ down + down_bias
    mse_loss(y, target.detach(), reduction="sum").backward()
    return y.detach(), x.grad, [weight.grad for weight in weights]


def terms(world):
    """Of y without its bias, and of dx: what the parts of each rank give."""
    up, up_bias, down, _, x, target = given()
    dy, found = 2 * (alone()[0] - target), []
    for rank in range(world):
        mine = slice(rank * INNER // world, (rank + 1) * INNER // world)
        features = torch.relu(x @ up[:, mine] + up_bias[mine])
        inner = dy @ down[mine].T * (features > 0)
        found.append({"y": (features @ down[mine]).numpy(), "dx": (inner @ up[:, mine].T).numpy()})
    return found


def runs(on, student):
    """Forward and backward, what each has sent, and what is kept of the matrices. Then both once
    more, with another x."""
    *weights, x, target = given()
    layer = student.TwoMatrices(on.comm, *weights)
    kept = training.elements_of([vars(layer), dict(vars(type(layer))), vars(student)])
    x_before = x.clone()
    with on.watch() as forward:
        y = layer.forward(x)
    dy = 2 * (alone()[0] - target)
    before = dy.clone()
    with on.watch() as backward:
        dx = layer.backward(dy)
    found = {
        "y": y.clone(),
        "dx": dx.clone(),
        "gradients": [gradient.clone() for gradient in layer.gradients],
        "forward": forward.sent(),
        "backward": backward.sent(),
        "kept": kept,
        "dy_is_as_it_was": bool(torch.equal(dy, before)),
        "x_is_as_it_was": bool(torch.equal(x, x_before)),
    }
    *_, x, target = given(1)
    y = layer.forward(x)
    dx = layer.backward(2 * (alone(1)[0] - target))
    again = {"y": y, "dx": dx, "gradients": list(layer.gradients)}
    return found | {"again": again, "misuse": on.misuse()}


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
        right, bias = alone()[0].numpy(), given()[3].numpy()
        others = {
            "too large by down_bias, which was added once for each rank": right
            + (world - 1) * bias,
            "without down_bias": right - bias,
            "this rank's term, without those of the others": terms(world)[rank]["y"] + bias,
            "the mean of the ranks' terms, and not the sum": (right - bias) / world + bias,
        }
        what = f"y on rank {rank} of {world}"
        need_values(found["y"], right, what, 1e-12, Origin(rank=rank, others=others))


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
            origin = Origin([one["dx"] for one in terms(world)], rank)
            what = f"dx on rank {rank} of {world}"
            need_values(found["dx"], alone()[1].numpy(), what, 1e-12, origin)


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
                others = {}
                if along is not None:
                    both = sum(whole.chunk(world, along)).numpy()
                    others = {"sums over ranks, whose parts are of different features": both}
                need_values(got, part.numpy(), what, 1e-12, Origin(others=others))


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


def check_again(lab):
    """A second forward and backward, with another x, are right as well."""
    y, dx, gradients = alone(1)
    for rank, found in enumerate(lab.ranks("runs", 2)):
        again, what = found["again"], f"rank {rank}, second time,"
        need_values(again["y"], y.numpy(), f"{what} y", 1e-12)
        need_values(again["dx"], dx.numpy(), f"{what} dx", 1e-12)
        for name, along, got, whole in zip(
            NAMES, CUT_ALONG, again["gradients"], gradients, strict=True
        ):
            part = whole if along is None else whole.chunk(2, along)[rank]
            once = Origin(others={"added to those of the first time": part_of_sum(name, rank)})
            need_values(got, part.numpy(), f"{what} gradient of {name}", 1e-12, once)


def part_of_sum(name, rank):
    """Of two ranks' gradients, those of both times together."""
    number = NAMES.index(name)
    whole = alone()[2][number] + alone(1)[2][number]
    along = CUT_ALONG[number]
    return (whole if along is None else whole.chunk(2, along)[rank]).numpy()


def check_dy(lab):
    """dy and x are as they were: they belong to the caller."""
    need_waited([found["misuse"] for found in lab.ranks("runs", 2)])
    for rank, found in enumerate(lab.ranks("runs", 2)):
        need(found["x_is_as_it_was"], f"rank {rank}: x was changed")
        need(found["dy_is_as_it_was"], f"rank {rank}: backward has changed dy")
