"""Assessment (90 minutes)

``train`` below trains a classifier in one process, and works: within 1024 steps it gets 95 of 100
samples right that it has never seen. Let it train on two ranks, in half the steps.

You pass when, on two ranks,

* no sample is used twice in an epoch, and each rank uses its half of them,
* the order of the samples is another one in each epoch,
* both ranks have the same parameters in each step, and after each epoch,
* the model learns from the samples of both ranks,
* the accuracy on the validation samples is 0.95 or more in two epochs running,
* and the ranks have made no more than 512 steps by then.

Batch, learning rate and optimizer are yours to choose, and all of ``train`` may be written anew. A
step is what lies between two changes of the parameters: several backwards without one (gradient
accumulation) are one step. Data and seed are the assessor's, and others in each run. No rank has
the labels of the validation samples: ``end_of_epoch`` notes what the model answers.

    comm.rank, comm.world_size, and its collectives
    model                    64 inputs, 10 classes; each rank's begins with other values
    train_set                a data set of 1024 pairs (x, y); use x as it is
    epochs, seed             the same on all ranks
    end_of_epoch(model)      every rank calls it after each epoch
    dpcore.DataParallel(model), torch.utils.data.DistributedSampler   as in exercise 13

`dpcore exercise check 14 --json > report.json` writes the report that you hand in with your file.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import dpcore

BATCH = 16
RATE = 0.005


def train(comm, model, train_set, epochs, seed, end_of_epoch):
    torch.manual_seed(seed)
    #: solution
    wrapped = dpcore.DataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE * comm.world_size)
    sampler = DistributedSampler(train_set, comm.world_size, comm.rank, shuffle=True, seed=seed)
    batches = DataLoader(train_set, BATCH, sampler=sampler)
    #: instead
    #| optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    #| batches = DataLoader(train_set, BATCH, shuffle=True)
    #: end
    for epoch in range(epochs):
        #: solution
        sampler.set_epoch(epoch)
        #: instead
        #|
        #: end
        for x, y in batches:
            optimizer.zero_grad()
            #: solution
            loss = nn.functional.cross_entropy(wrapped(x), y)
            #: instead
            #| loss = nn.functional.cross_entropy(model(x), y)
            #: end
            loss.backward()
            optimizer.step()
        end_of_epoch(model)


#: hint
#| Begin with what exercise 13 does: DataParallel, a DistributedSampler with the rank, set_epoch.
#: hint
#| A step of two ranks with BATCH samples each sees twice as many. An epoch then has half the steps,
#| so as many epochs as before are half the steps, if each step gets as far as two did.
#: hint
#| Twice the batch has half the noise, and can be followed twice as far: the linear rule is
#| `lr=RATE * comm.world_size`. docs/learn/12-accuracy.md has when it holds.
#: end
