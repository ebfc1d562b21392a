"""Find the mistake (30 minutes)

Each of the four programs below trains a model on several ranks, runs to its end, and has one
mistake. Under torch's DDP nothing is said of them: the loss falls, and the ranks train different
models. Find the mistakes, and mend them; none needs more than two lines.

Look at what dpcore says before you read the code: the check runs each program and shows the first
error or warning, with the rank, and the parameter or setting that differs. In a program of your own
this is what DPCORE_MISTAKES and dpcore.check are for (docs/mistakes.md).

When you are done, each program ends on all ranks with the parameters of one process that trains
with the batches of all ranks. Everything outside the four programs is right as it is.

    comm.rank, comm.world_size
    comm.all_reduce(tensor, "max")  or "sum", "mean", in place
"""

from contextlib import nullcontext

import torch
from torch import nn

import dpcore

RATE = 0.1
WINDOW = 3  # micro-batches of a step
LIMIT = 2.0  # of a loss that may change the model


def loss_of(model, x, y):
    return nn.functional.mse_loss(model(x), y)


def prepared(model):
    """A wrapper, in which the model has rank 0's values on all ranks, and an optimizer."""
    wrapped = dpcore.DataParallel(model)
    return wrapped, torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5)


def train_in_windows(comm, model, batches):
    """A step is taken after every WINDOW micro-batches, and only the last of them is sent."""
    wrapped, optimizer = prepared(model)
    for number, (x, y) in enumerate(batches):
        ends_here = (number + 1) % WINDOW == 0
        #: solution
        is_sent = ends_here
        #: instead
        #| is_sent = number % WINDOW == 0
        #: end
        with nullcontext() if is_sent else wrapped.no_sync():
            (loss_of(wrapped, x, y) / WINDOW).backward()
        if ends_here:
            optimizer.step()
            optimizer.zero_grad()


def train_with_a_schedule(comm, model, batches):
    """The learning rate is halved after every second step. Rank 0 returns the rates, for a log."""
    wrapped, optimizer = prepared(model)
    rates = []
    for number, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        loss_of(wrapped, x, y).backward()
        optimizer.step()
        #: solution
        if number % 2 == 1:
            optimizer.param_groups[0]["lr"] /= 2
            if comm.rank == 0:
                rates.append(optimizer.param_groups[0]["lr"])
        #: instead
        #| if number % 2 == 1 and comm.rank == 0:
        #|     optimizer.param_groups[0]["lr"] /= 2
        #|     rates.append(optimizer.param_groups[0]["lr"])
        #: end
    return rates


def resume(comm, model, batches, path):
    """Training goes on from the parameters in a file, which all ranks can read."""
    wrapped, optimizer = prepared(model)
    #: solution
    model.load_state_dict(torch.load(path))
    #: instead
    #| if comm.rank == 0:
    #|     model.load_state_dict(torch.load(path))
    #: end
    for x, y in batches:
        optimizer.zero_grad()
        loss_of(wrapped, x, y).backward()
        optimizer.step()


def train_without_outliers(comm, model, batches):
    """A step is left out if the loss of any rank is above LIMIT."""
    wrapped, optimizer = prepared(model)
    for x, y in batches:
        optimizer.zero_grad()
        loss = loss_of(wrapped, x, y)
        loss.backward()
        #: solution
        worst = loss.detach().clone()
        comm.all_reduce(worst, "max")
        #: instead
        #| worst = loss.detach()
        #: end
        if worst <= LIMIT:
            optimizer.step()


#: hint
#| `train_in_windows`: an optimizer takes what the last backward left in `.grad`. Which micro-batch
#| is that, and is it sent?
#: hint
#| `train_with_a_schedule` and `resume`: what is under `if comm.rank == 0:` that all ranks need?
#: hint
#| `train_without_outliers`: a rank knows its own loss only. All of them have to decide the same.
#: end
