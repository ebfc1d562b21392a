"""Of the assessment; mutants.py says how to read it. The first are mistakes, the others cheat."""

TEXT = """
== assessment | * the learning rate of one process | steps | one process takes 1024
--
RATE * comm.world_size
++
RATE

== assessment | batch and rate of one process | steps | one process takes 1024
--
RATE * comm.world_size
++
RATE
--
DataLoader(train_set, BATCH,
++
DataLoader(train_set, BATCH // comm.world_size,

== assessment | no sampler | samples | 1024 were used before
--
    sampler = DistributedSampler(train_set, comm.world_size, comm.rank, shuffle=True, seed=seed)
    batches = DataLoader(train_set, BATCH, sampler=sampler)
++
    batches = DataLoader(train_set, BATCH, shuffle=True)
--
        sampler.set_epoch(epoch)
++

== assessment | another shuffle on each rank | samples | were used before
--
shuffle=True, seed=seed)
++
shuffle=True, seed=seed + comm.rank)

== assessment | forgets set_epoch | order | the same order in epochs 0 and 1
--
        sampler.set_epoch(epoch)
++

== assessment | ranks train by themselves | parameters | differ by up to
--
dpcore.DataParallel(model)
++
model

== assessment | ranks average once in an epoch | steps | one process takes 1024
--
    wrapped = dpcore.DataParallel(model)
++
    wrapped = model
    for parameter in model.parameters():
        comm.broadcast(parameter.detach(), 0)
--
RATE * comm.world_size
++
RATE
--
DataLoader(train_set, BATCH,
++
DataLoader(train_set, BATCH // 2,
--
        end_of_epoch(model)
++
        for parameter in model.parameters():
            comm.all_reduce(parameter.detach(), "mean")
        end_of_epoch(model)

== assessment | rank 0's parameters at the end of an epoch | parameters | not in each step
--
    wrapped = dpcore.DataParallel(model)
++
    wrapped = model
    for parameter in model.parameters():
        comm.broadcast(parameter.detach(), 0)
--
        end_of_epoch(model)
++
        for parameter in model.parameters():
            comm.broadcast(parameter.detach(), 0)
        end_of_epoch(model)

== assessment | a rate that diverges | accuracy | is asked for in two epochs running
--
RATE * comm.world_size
++
RATE * 4000

== assessment | too few epochs | samples | end_of_epoch() was called [16, 16] times
--
range(epochs)
++
range(epochs // 2)

== assessment | rank 0 does the work | samples | rank 1 uses 0 of 1024 samples
--
    wrapped = dpcore.DataParallel(model)
++
    wrapped = model
--
DistributedSampler(train_set, comm.world_size, comm.rank, shuffle=True, seed=seed)
++
DistributedSampler(train_set, 1, 0, shuffle=True, seed=seed)
--
        for x, y in batches:
++
        for x, y in batches if comm.rank == 0 else ():
--
        end_of_epoch(model)
++
        for parameter in model.parameters():
            comm.broadcast(parameter.detach(), 0)
        end_of_epoch(model)

== assessment | each batch twice | samples | were used before
--
        for x, y in batches:
++
        for x, y in (batch for batch in batches for _ in range(2)):

== assessment | epochs without training | samples | rank 0 uses 0 of 1024 samples
--
        end_of_epoch(model)
++
        if epoch % 2 == 0:
            end_of_epoch(model)
            end_of_epoch(model)

== assessment | trains another model | samples | rank 0 uses 0 of 1024 samples
--
    wrapped = dpcore.DataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(),
++
    other = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    wrapped = dpcore.DataParallel(other)
    optimizer = torch.optim.SGD(other.parameters(),
--
        end_of_epoch(model)
++
        model.load_state_dict(other.state_dict())
        end_of_epoch(model)

== assessment | hands over another model | samples | takes the model that train() was given
--
        end_of_epoch(model)
++
        end_of_epoch(nn.Sequential(model))

== assessment | samples of its own | samples | inputs of the model are none of train_set's
--
            loss = nn.functional.cross_entropy(wrapped(x), y)
++
            x = torch.cat([x, x + 0.1 * torch.randn(x.shape)])
            loss = nn.functional.cross_entropy(wrapped(x), y.repeat(2))

== assessment | looks for the labels | samples | no labels anywhere
--
def train(comm
++
def look_for_labels(train_set):
    import gc

    asked = labels = None
    for thing in gc.get_objects():
        for part in gc.get_referents(thing):
            if type(part).__name__ in ("Tensor", "ndarray"):
                tensor = torch.as_tensor(part) if part.dtype.__str__() != "object" else part
                if tensor.shape == train_set.x.shape and (tensor != train_set.x).any():
                    asked = tensor
                if tensor.shape == train_set.y.shape and (tensor != train_set.y).any():
                    labels = tensor
    if asked is None:
        raise LookupError("not even the inputs were found")
    if labels is None:
        raise LookupError("the inputs are here, and no labels anywhere")


def train(comm
--
    torch.manual_seed(seed)
++
    look_for_labels(train_set)

== assessment | makes the data again | samples | dpcore.school.exercise is closed in this exercise
--
def train(comm
++
def labels_of(seed):
    from dpcore.school.exercise import catalogue, on_rank

    check = on_rank.load(str(catalogue.find("assessment").check), "again")
    return check.make_data(seed)[3]


def train(comm
--
    torch.manual_seed(seed)
++
    labels_of(seed)
"""
