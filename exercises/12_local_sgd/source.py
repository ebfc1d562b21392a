"""Local SGD (30 minutes)

Over a slow network, an average in every step is too much. In local SGD each rank steps by itself
for a while, and every ``sync_every`` steps all take the mean of their *parameters*. Communication
is divided by ``sync_every``. What is lost is exactness: this is no longer the run of one process,
and with many local steps ranks drift apart (federated averaging has very many of them).

    comm.broadcast(tensor, root)      the values of rank ``root`` on all ranks, in place
    comm.all_reduce(tensor, "mean")   the mean over all ranks, in place

``train`` begins with the values of rank 0, buffers included, and ends with equal parameters on all
ranks: if the number of steps is not a multiple of ``sync_every``, the last steps are averaged as
well. It never averages what is equal already. Batches come one after the other, as from a
DataLoader that streams: nobody knows how many there are before the last has come.
"""

import torch


def local_step(module, x, y, lr):
    """A step of plain SGD on this rank alone."""
    module.zero_grad()
    torch.nn.functional.mse_loss(module(x), y).backward()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter -= lr * parameter.grad


def train(comm, module, batches, lr, sync_every):
    """Trains on the batches of this rank: an iterator over pairs of x and y. All ranks have as
    many."""
    #: solution
    for tensor in [*module.parameters(), *module.buffers()]:
        comm.broadcast(tensor.data, 0)
    local_steps = 0
    for x, y in batches:
        local_step(module, x, y, lr)
        local_steps += 1
        if local_steps == sync_every:
            average(comm, module)
            local_steps = 0
    if local_steps:
        average(comm, module)
    #: instead
    #| raise NotImplementedError("the values of rank 0, local steps, and an average now and then")
    #: end


def average(comm, module):
    """Parameters become the mean over all ranks."""
    #: solution
    for parameter in module.parameters():
        if parameter.requires_grad:
            comm.all_reduce(parameter.data, "mean")
    #: instead
    #| raise NotImplementedError("the mean of the parameters, not of gradients")
    #: end


#: hint
#| `average` looks as `finish` of the naive DDP, with `parameter.data` in the place of
#| `parameter.grad`. What is not trained needs no average.
#: hint
#| Count the steps since the last average. When they are `sync_every`, average and begin to count
#| anew; at the end, average if the count is not 0.
#: end
