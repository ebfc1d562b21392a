"""Checks of the exercise beside this file."""

import torch
from torch import nn

from dpcore.exercise import training
from dpcore.exercise.judging import need, need_values

ALLOWED = ("all_reduce", "broadcast", "barrier")
STEPS = 10
BYTES = (6 * 16 + 16 + 16 * 16 + 16 + 16 * 3 + 3) * 8  # of what training.Small trains
RATE = 0.1


def batches(rank, world):
    for step in range(STEPS):
        yield tuple(training.part(tensor, rank, world) for tensor in training.batch(step))


def trains(on, student, every):
    """Where it ends, and how many bytes were sent before, between and after the steps."""
    module = training.Small(seed=7 + on.rank)
    moments = []
    module.register_forward_pre_hook(lambda *_: moments.append(on.clock()))
    with on.watch() as seen:
        student.train(on.comm, module, batches(on.rank, on.world_size), RATE, every)
    sent = [0] * (len(moments) + 1)
    names = set()
    for operation in seen.operations:
        place = sum(moment <= operation.begin for moment in moments)
        if place:  # what comes before the first step hands out the values of rank 0
            sent[place] += operation.bytes
            names.add(operation.name)
    return {"end": training.values(module), "sent": sent[1:], "names": sorted(names)}


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
        if step % every == 0 or step == STEPS:
            with torch.no_grad():
                for same in zip(*(model.parameters() for model in models), strict=True):
                    mean = torch.stack([p.detach() for p in same]).mean(0)
                    for parameter in same:
                        parameter.copy_(mean)
    return training.values(models[0])


def need_end(lab, every):
    (expected,) = lab.ranks("simulated", 1, 2, every, alone=True)
    # The last rank first: buffers that were not handed out are wrong there.
    for rank, found in reversed(list(enumerate(lab.ranks("trains", 2, every)))):
        need_values(found["end"], expected, f"rank {rank}, sync_every={every}, values at the end")


def check_each_step(lab):
    """With an average after every step, all ranks end with the values of local SGD."""
    need_end(lab, 1)


def check_every_five(lab):
    """With an average after every fifth of ten steps as well."""
    need_end(lab, 5)


def check_rest(lab):
    """With an average after every fourth of ten steps, the last two are averaged, too."""
    need_end(lab, 4)


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
    """An average sends every parameter once: three averages in ten steps, or two."""
    for every, averages in ((4, 3), (5, 2)):
        for rank, found in enumerate(lab.ranks("trains", 2, every)):
            others = sorted(set(found["names"]) - {"all_reduce"})
            need(not others, f"rank {rank}: the core has also run {', '.join(others)}")
            sent = sum(found["sent"])
            need(
                averages * BYTES <= sent <= 1.02 * averages * BYTES,
                f"rank {rank}, sync_every={every}: {sent} bytes, and {averages} averages have "
                f"{averages * BYTES}",
            )
