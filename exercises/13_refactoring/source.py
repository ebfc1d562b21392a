"""The refactoring lab (60 minutes)

``train`` below trains a small classifier in one process, and works. Let it train on several ranks:
in ten places, marked TODO, something has to change. Each is a mistake that real scripts have had,
and most of them stay unnoticed: the loss falls all the same.

When you are done, each epoch uses every sample once over all ranks, a step sees ``BATCH`` samples
as before, and all ranks end with the same model, losses and accuracies. With one rank, everything
is as it is now, but for the order of the samples (TODO 6). Ranks have the same number of batches.

    comm.rank, comm.world_size
    comm.all_reduce(tensor, "mean")  or "sum", in place
    comm.barrier()                                   returns when every rank has called it
    dpcore.DataParallel(model)                       averages gradients in backward (exercise 8),
                                                     over all ranks: it finds them by itself
    torch.utils.data.DistributedSampler(dataset, world_size, rank, shuffle=True, seed=SEED)
                                                     its set_epoch(epoch) changes the order
    torch.utils.data.Subset(dataset, indices)        some samples of a data set

The functions above ``train`` are right as they are.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Subset

import dpcore

BATCH = 32  # samples of a step, over all ranks
SEED = 1
RATE = 0.2


def make_model():
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))


def add_noise(x, generator):
    """Augmentation: no two ranks should add the same noise."""
    return x + 0.1 * torch.randn(x.shape, generator=generator)


def loss_of(model, x, y):
    return nn.functional.cross_entropy(model(x), y)


def make_step(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= RATE * parameter.grad


def save(model, path):
    torch.save(model.state_dict(), path)


def load(model, path):
    model.load_state_dict(torch.load(path))


def train(comm, train_set, test_set, path, epochs):
    """Returns the model of the best epoch, and the mean loss and the accuracy of each epoch."""
    torch.manual_seed(SEED)
    model = make_model()  # the same on all ranks, by the seed
    #: solution
    wrapped = dpcore.DataParallel(model)
    noise = torch.Generator().manual_seed(SEED + comm.rank)
    sampler = DistributedSampler(
        train_set, comm.world_size, comm.rank, shuffle=True, seed=SEED, drop_last=True
    )
    batches = DataLoader(train_set, BATCH // comm.world_size, sampler=sampler)
    mine = Subset(test_set, range(comm.rank, len(test_set), comm.world_size))
    tests = DataLoader(mine, BATCH)
    #: instead
    #| wrapped = model  # TODO 1: gradients of all ranks are averaged
    #| noise = torch.Generator().manual_seed(SEED)  # TODO 2: ranks add different noise
    #| # TODO 3: a rank trains on its share of the samples
    #| sampler = DistributedSampler(train_set, 1, 0, shuffle=True, seed=SEED)
    #| batches = DataLoader(train_set, BATCH, sampler=sampler)  # TODO 4: BATCH is of all ranks
    #| mine = test_set  # TODO 5: a rank tests its share: each sample once, and none twice
    #| tests = DataLoader(mine, BATCH)
    #: end
    losses, accuracies = [], []
    for epoch in range(epochs):
        #: solution
        sampler.set_epoch(epoch)
        #: instead
        #| # TODO 6: another order in each epoch, also with one rank
        #: end
        total = torch.zeros(1)
        for x, y in batches:
            model.zero_grad()
            loss = loss_of(wrapped, add_noise(x, noise), y)
            loss.backward()
            make_step(model)
            total += loss.detach()
        mean_loss = total / len(batches)
        #: solution
        comm.all_reduce(mean_loss, "mean")
        #: instead
        #| # TODO 7: the mean loss of all ranks
        #: end
        losses.append(mean_loss.item())
        correct = torch.zeros(1)
        with torch.no_grad():
            for x, y in tests:
                correct += (model(x).argmax(1) == y).sum()
        #: solution
        comm.all_reduce(correct, "sum")
        #: instead
        #| # TODO 8: the accuracy over all test samples
        #: end
        accuracies.append(correct.item() / len(test_set))
        is_best = accuracies[-1] == max(accuracies)
        #: solution
        if comm.rank == 0:
            print(f"epoch {epoch}: loss {losses[-1]:.3f}, accuracy {accuracies[-1]:.3f}")
            if is_best:
                save(model, path)
        #: instead
        #| # TODO 9: one rank prints, and one rank writes the file
        #| print(f"epoch {epoch}: loss {losses[-1]:.3f}, accuracy {accuracies[-1]:.3f}")
        #| if is_best:
        #|     save(model, path)
        #: end
    #: solution
    comm.barrier()
    load(model, path)
    #: instead
    #| load(model, path)  # TODO 10: not before it is written
    #: end
    return model, losses, accuracies


#: hint
#| TODO 1, 2: `wrapped = dpcore.DataParallel(model)`, and a seed for the noise that has the rank in
#| it. The seed of the model stays the same on all ranks.
#: hint
#| TODO 3, 4: the sampler takes `comm.world_size, comm.rank`. `BATCH // comm.world_size` samples on
#| each rank are BATCH in a step.
#: hint
#| TODO 5, 8: every world_size-th sample, beginning with the rank, is `Subset(test_set,
#| range(comm.rank, len(test_set), comm.world_size))`. DistributedSampler would use some samples
#| twice, to give all ranks as many. Ranks may have different numbers here, so add up the correct
#| answers ("sum") and divide by the number of all.
#: hint
#| TODO 6: without `sampler.set_epoch(epoch)` the order is the same in every epoch.
#: hint
#| TODO 7: `comm.all_reduce(mean_loss, "mean")` on all ranks: it is a collective, so it must not
#| stand in a branch that only one rank takes.
#: hint
#| TODO 9, 10: `if comm.rank == 0:` around print and save. The others go on meanwhile, so a
#| `comm.barrier()` has to stand before what reads the file.
#: end
