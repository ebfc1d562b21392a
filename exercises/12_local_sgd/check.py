"""Checks of the exercise beside this file."""

import torch
from torch import nn

from dpcore.school.exercise import training
from dpcore.school.exercise.explaining import Origin
from dpcore.school.exercise.judging import need, need_values, need_waited
from dpcore.school.exercise.one_process import ROUNDING

ALLOWED = ("all_reduce", "broadcast", "barrier")
STEPS = 10
BYTES = (6 * 16 + 16 + 16 * 16 + 16 + 16 * 3 + 3) * 8  # of what training.Small trains
RATE = 0.1


def batches(rank, world, taken=None):
    """A stream of batches; the number that was taken is added to a list for each."""
    for step in range(STEPS):
        if taken is not None:
            taken.append(step + 1)
        yield tuple(training.part(tensor, rank, world) for tensor in training.batch(step))


def trains(on, student, every):
    """Where it ends, and how many bytes were sent before, between and after the steps."""
    module = training.Small(seed=7 + on.rank)
    moments, taken, ahead = [], [], []

    def note(*_):
        moments.append(on.clock())
        ahead.append(len(taken) - len(moments))

    module.register_forward_pre_hook(note)
    with on.watch() as seen:
        student.train(on.comm, module, batches(on.rank, on.world_size, taken), RATE, every)
    sent = [0] * (len(moments) + 1)
    names = set()
    for operation in seen.operations:
        place = sum(moment <= operation.begin for moment in moments)
        if place:  # what comes before the first step hands out the values of rank 0
            sent[place] += operation.bytes
            names.add(operation.name)
    return {
        "end": training.values(module),
        "sent": sent[1:],
        "names": sorted(names),
        "ahead": max(ahead, default=0),
        "misuse": on.misuse(),
    }


def simulated(on, _, world, every):
    """All ranks in one process."""
    models = [training.Small(seed=7) for _ in range(world)]
    feeds = [batches(rank, world) for rank in range(world)]
    for step in range(1, STEPS + 1):
        for model, feed in zip(models, feeds, strict=True):
            x, y = next(feed)
            model.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter -= RATE * parameter.grad
        if step == STEPS:
            own = [training.values(model) for model in models]
        if step % every == 0 or step == STEPS:
            with torch.no_grad():
                for same in zip(*(model.parameters() for model in models), strict=True):
                    mean = torch.stack([p.detach() for p in same]).mean(0)
                    for parameter in same:
                        parameter.copy_(mean)
    begin = [training.values(training.Small(seed=7 + rank)) for rank in range(world)]
    return {"end": training.values(models[0]), "own": own, "begin": begin}


def need_end(lab, every, world=2):
    (expected,) = lab.ranks("simulated", 1, world, every, alone=True)
    # The last rank first: buffers that were not handed out are wrong there.
    for rank, found in reversed(list(enumerate(lab.ranks("trains", world, every)))):
        what = f"rank {rank} of {world}, sync_every={every}, values at the end"
        others = {
            "still those that this rank began with": expected["begin"][rank],
            "this rank's own: the last steps are not averaged": expected["own"][rank],
        }
        origin = Origin(others=others)
        need_values(found["end"], expected["end"], what, ROUNDING, origin)


def check_each_step(lab):
    """With an average after every step, all ranks end with the values of local SGD."""
    need_end(lab, 1)


def check_every_five(lab):
    """With an average after every fifth of ten steps as well."""
    need_end(lab, 5)


def check_rest(lab):
    """With an average after every fourth of ten steps, the last two are averaged, too."""
    need_end(lab, 4)


def check_more(lab):
    """So it is with three ranks, and where fewer steps than `sync_every` come."""
    need_end(lab, 4, world=3)
    need_end(lab, 25)


def check_streams(lab):
    """Batches are taken as they are used, and not all at the beginning."""
    for rank, found in enumerate(lab.ranks("trains", 2, 4)):
        need(
            found["ahead"] <= 1,
            f"rank {rank} has taken {found['ahead']} batches more than it has used: a stream can "
            "be longer than memory",
        )
    need_waited([found["misuse"] for found in lab.ranks("trains", 2, 4)])


def check_quiet(lab):
    """Nothing is sent between averages."""
    for every in (4, 5):
        right = [step % every == 0 or step == STEPS for step in range(1, STEPS + 1)]
        for rank, found in enumerate(lab.ranks("trains", 2, every)):
            for step, (sent, may) in enumerate(zip(found["sent"], right, strict=False), 1):
                need(
                    may or not sent,
                    f"rank {rank}, sync_every={every}: {sent} bytes were sent after step {step}",
                )


def check_bytes(lab):
    """An average sends every parameter that is trained once, and nothing else: three averages in
    ten steps, or two."""
    for every, averages in ((4, 3), (5, 2)):
        for rank, found in enumerate(lab.ranks("trains", 2, every)):
            others = sorted(set(found["names"]) - {"all_reduce"})
            need(not others, f"rank {rank}: the core has also run {', '.join(others)}")
            sent = sum(found["sent"])
            need(
                sent == averages * BYTES,
                f"rank {rank}, sync_every={every}: {sent} bytes, and {averages} averages have "
                f"{averages * BYTES}",
            )
