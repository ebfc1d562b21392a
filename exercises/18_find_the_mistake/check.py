"""Checks of the exercise beside this file.

Values are those of one process, which knows the batches of both ranks. What dpcore says is heard in
a second run, since an error would end the first one before there are values.
"""

import os
import warnings

import torch
from torch import nn

import dpcore
from dpcore.school.exercise.judging import need, need_values
from dpcore.school.exercise.lab import NotSeen, Wrong

ALLOWED = None  # DataParallel needs a whole communicator
OPEN = ("DataParallel",)
WORLD, STEPS = 2, 6
RATE, MOMENTUM, WINDOW, LIMIT = 0.1, 0.5, 3, 2.0  # as in the task
PROGRAMS = ("train_in_windows", "train_with_a_schedule", "resume", "train_without_outliers")
ROUNDING = 1e-9
SHOWN = 400  # characters of what dpcore says


def made(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def batches_of(rank, program):
    """Each rank has an outlier, for one of the programs: above the limit, while the mean of both
    ranks' losses is below it."""
    generator = torch.Generator().manual_seed(50 + rank)
    count = STEPS * (WINDOW if program == "train_in_windows" else 1)
    found = []
    for number in range(count):
        x, y = (torch.randn(5, width, generator=generator).double() for width in (4, 2))
        is_outlier = program == "train_without_outliers" and (number, rank) in ((2, 1), (4, 0))
        found.append((x, 0.3 * y + 1.6 * is_outlier))
    return found


def trained(on, student, program):
    """Runs the program on this rank: its model, and what it returns."""
    model = made(on.rank)
    more = []
    if program == "resume":
        path = on.folder / f"saved.{on.rank}"
        torch.save(made(7).state_dict(), path)
        more = [path]
    returned = getattr(student, program)(on.comm, model, batches_of(on.rank, program), *more)
    return model, returned


def trains(on, student, program):
    os.environ["DPCORE_MISTAKES"] = "ignore"
    model, returned = trained(on, student, program)
    return {"end": dict(model.state_dict()), "returned": returned}


def listens(on, student, program):
    """What dpcore says of it."""
    os.environ["DPCORE_MISTAKES"] = "warn"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained(on, student, program)
    return [str(w.message) for w in caught if issubclass(w.category, dpcore.MistakeWarning)]


def alone(on, _, program):
    """One process with the batches of both ranks."""
    model = made(7 if program == "resume" else 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    rates = []
    window = WINDOW if program == "train_in_windows" else 1
    for number, both in enumerate(
        zip(*(batches_of(rank, program) for rank in range(WORLD)), strict=True)
    ):
        losses = [nn.functional.mse_loss(model(x), y) / window for x, y in both]
        (sum(losses) / WORLD).backward()
        is_left_out = program == "train_without_outliers" and max(losses) > LIMIT
        if (number + 1) % window == 0:
            if not is_left_out:
                optimizer.step()
            optimizer.zero_grad()
        if program == "train_with_a_schedule" and number % 2 == 1:
            optimizer.param_groups[0]["lr"] /= 2
            rates.append(optimizer.param_groups[0]["lr"])
    return {"end": dict(model.state_dict()), "rates": rates}


def said_of(lab, program):
    """The first error or warning, in words, or ""."""
    try:
        said = [text for rank in lab.ranks("listens", WORLD, program) for text in rank]
    except (Wrong, NotSeen) as problem:
        said = [str(problem)]
    return said[0][:SHOWN] if said else ""


def need_trained(lab, program):
    ranks = lab.ranks("trains", WORLD, program)
    (expected,) = lab.ranks("alone", 1, program, alone=True)
    try:
        for rank, found in enumerate(ranks):
            what = f"{program}, rank {rank}, at the end"
            need_values(found["end"], expected["end"], what, ROUNDING)
    except Wrong as problem:
        said = said_of(lab, program)
        raise Wrong(f"{problem}. dpcore says: {said}" if said else str(problem)) from None
    return ranks, expected


def check_windows(lab):
    """`train_in_windows` takes steps with averages of whole windows."""
    need_trained(lab, "train_in_windows")


def check_schedule(lab):
    """`train_with_a_schedule` has one learning rate on all ranks, and rank 0 returns the rates."""
    ranks, expected = need_trained(lab, "train_with_a_schedule")
    need(
        ranks[0]["returned"] == expected["rates"],
        f"rank 0 returns {ranks[0]['returned']}, and the rates are {expected['rates']}",
    )


def check_resume(lab):
    """`resume` goes on from the file on all ranks."""
    need_trained(lab, "resume")


def check_outliers(lab):
    """`train_without_outliers` leaves out the same steps on all ranks."""
    need_trained(lab, "train_without_outliers")


def check_quiet(lab):
    """dpcore has nothing to say of any of the four."""
    for program in PROGRAMS:
        said = said_of(lab, program)
        need(not said, f"{program}: {said}")
