"""Checks of the exercise beside this file."""

from torch import nn

from dpcore.school.exercise import training
from dpcore.school.exercise.explaining import Origin
from dpcore.school.exercise.judging import need, need_values, need_waited
from dpcore.school.exercise.one_process import ROUNDING

ALLOWED = ("reduce_scatter", "all_gather", "all_reduce", "broadcast", "barrier")
ELEMENTS = 6 * 16 + 16 + 16 * 16 + 16 + 16 * 3 + 3  # of training.Small: 3 * 145, and odd
STEPS = 4


def trains(on, student):
    module = training.Small(seed=7)
    trained = [p for p in module.parameters() if p.requires_grad]
    zero = student.Zero1(trained, on.comm, training.LEARNING_RATE, training.MOMENTUM)
    found = {"sent": [], "values": []}
    for step in range(STEPS):
        on.step = step + 1
        module.zero_grad()
        x, y = (training.part(tensor, on.rank, on.world_size) for tensor in training.batch(step))
        nn.functional.mse_loss(module(x), y).backward()
        with on.watch() as seen:
            zero.step()
        found["sent"].append(seen.sent())
        found["values"].append(training.values(module))
    kept = [vars(zero), vars(type(zero)).copy(), vars(student)]
    found["state"] = training.elements_of(kept, {p.data_ptr() for p in trained})
    return found | {"misuse": on.misuse()}


def alone(on, _):
    """Parameters before, and after each step, in one process with the whole batch."""
    module = training.Small(seed=7)
    optimizer, found = training.Momentum(module), [training.values(module)]
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = training.batch(step)
        nn.functional.mse_loss(module(x), y).backward()
        optimizer.step()
        found.append(training.values(module))
    return found


def need_steps(lab, world, steps):
    (expected,) = lab.ranks("alone", 1, alone=True)
    for rank, found in enumerate(lab.ranks("trains", world)):
        for step in steps:
            what = f"rank {rank} of {world}, after step {step + 1}, parameters"
            before, right = expected[step], expected[step + 1]
            others = {
                "what they were before": before,
                "those of the step before": expected[max(0, step - 1)],
                "what the sums of the gradients give, and not the means": {
                    name: value + world * (right[name] - value) for name, value in before.items()
                },
            }
            origin = Origin((), rank, others, before)
            need_values(found["values"][step], right, what, ROUNDING, origin)


def check_first_step(lab):
    """After the first step, two ranks, between which the parameters cannot be divided evenly, have
    those of one process."""
    need_steps(lab, 2, [0])


def check_momentum(lab):
    """So they have after further steps: the momentum is kept."""
    need_steps(lab, 2, range(1, STEPS))


def check_three(lab):
    """Three ranks have them as well, and four."""
    need_steps(lab, 3, range(STEPS))
    need_steps(lab, 4, range(STEPS))


def check_state(lab):
    """Each rank keeps the state of its own part, and no more."""
    for world in (2, 3):
        part = -(-ELEMENTS // world)
        for rank, found in enumerate(lab.ranks("trains", world)):
            need(
                found["state"] <= part,
                f"rank {rank} of {world} keeps {found['state']} elements, and its part has {part}",
            )
            need(found["state"] >= part - world, f"rank {rank} keeps {found['state']} elements")


def check_operations(lab):
    """A step is a reduce-scatter and an all-gather, and is over when it returns."""
    need_waited([found["misuse"] for found in lab.ranks("trains", 3)])
    for rank, found in enumerate(lab.ranks("trains", 3)):
        for step, sent in enumerate(found["sent"], 1):
            names = [name for name, _ in sent]
            need(
                names == ["reduce_scatter", "all_gather"],
                f"rank {rank}, step {step}: it runs {', '.join(names) or 'nothing'}",
            )


def check_bytes(lab):
    """Both have the size of the model, rounded up to whole parts."""
    whole = -(-ELEMENTS // 2) * 2 * 8
    for rank, found in enumerate(lab.ranks("trains", 2)):
        for step, sent in enumerate(found["sent"], 1):
            sizes = [nbytes for _, nbytes in sent]
            need(sizes == [whole] * 2, f"rank {rank}, step {step}: {sizes} bytes, and not {whole}")
