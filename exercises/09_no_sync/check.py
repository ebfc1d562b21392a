"""Checks of the exercise beside this file."""

from torch import nn

from dpcore.school.exercise import training
from dpcore.school.exercise.explaining import Origin
from dpcore.school.exercise.judging import need, need_values, need_waited
from dpcore.school.exercise.one_process import ROUNDING, check_kept, need_no_wait  # noqa: F401 - by name

ALLOWED = ("all_reduce", "broadcast", "barrier")
MICRO_BATCHES = 3
TRAINED = 6  # parameters of training.Small


def loss_of(model, number, rank, world):
    x, y = (training.part(tensor, rank, world) for tensor in training.batch(number))
    return nn.functional.mse_loss(model(x), y) / MICRO_BATCHES


def small(on, student):
    """Four steps as in exercise 6, after a block of no_sync() in which nothing happens."""

    def make(module, comm):
        model = student.AccumulatingDDP(module, comm)
        with model.no_sync():
            pass
        return model

    return training.train(on, make)


def accumulates(on, student):
    """Two steps of three micro-batches each."""
    module = training.Small(seed=7 + on.rank)
    model = student.AccumulatingDDP(module, on.comm)
    found = {"local": [], "within": [], "after": [], "gradients": []}
    for step in range(2):
        on.step = step + 1
        module.zero_grad()
        with on.watch() as seen:
            with model.no_sync():
                for number in range(MICRO_BATCHES - 1):
                    loss_of(model, 3 * step + number, on.rank, on.world_size).backward()
                local = training.gradients(module)
            end_of_block = on.clock()
            loss_of(model, 3 * step + 2, on.rank, on.world_size).backward()
            model.finish()
        within = seen.launched_before(end_of_block)
        found["local"].append(local)
        found["within"].append(within)
        found["after"].append(seen.sent()[within:])
        found["gradients"].append(training.gradients(module))
    return found | {"misuse": on.misuse()}


class Oops(Exception):
    pass


def leaves(on, student, way):
    """What is sent in a backward after a block that was left in some way; where that block lies in
    another, in one within the outer block and in one after it."""
    module = training.Small(seed=7)
    model = student.AccumulatingDDP(module, on.comm)
    if way == "error":
        has_come = False
        try:
            with model.no_sync():
                raise Oops
        except Oops:
            has_come = True
        with on.watch() as seen:
            loss_of(model, 0, on.rank, on.world_size).backward()
            model.finish()
        return [seen.sent(), has_come]
    if way == "inner error":
        with on.watch() as seen, model.no_sync():
            try:
                with model.no_sync():
                    raise Oops
            except Oops:
                pass
            loss_of(model, 0, on.rank, on.world_size).backward()
            model.finish()
        with on.watch() as after:
            loss_of(model, 0, on.rank, on.world_size).backward()
            model.finish()
        return [seen.sent(), after.sent()]
    with on.watch() as seen, model.no_sync():
        with model.no_sync():
            loss_of(model, 0, on.rank, on.world_size).backward()
        loss_of(model, 0, on.rank, on.world_size).backward()
        model.finish()
    with on.watch() as after:
        loss_of(model, 0, on.rank, on.world_size).backward()
        model.finish()
    return [seen.sent(), after.sent()]


def alone(on, _, world):
    """Gradients of each step in one process; and those of each rank before the last micro-batch."""
    module = training.Small(seed=7)
    found = {"gradients": [], "local": [], "own": []}
    for step in range(2):
        module.zero_grad()
        for number in range(MICRO_BATCHES):
            loss_of(module, 3 * step + number, 0, 1).backward()
        found["gradients"].append(training.gradients(module))
        local, own = [], []
        for rank in range(world):
            module.zero_grad()
            for number in range(MICRO_BATCHES - 1):
                loss_of(module, 3 * step + number, rank, world).backward()
            local.append(training.gradients(module))
            loss_of(module, 3 * step + MICRO_BATCHES - 1, rank, world).backward()
            own.append(training.gradients(module))
        found["local"].append(local)
        found["own"].append(own)
    return found


def check_silent(lab):
    """Nothing is sent within the block."""
    for rank, found in enumerate(lab.ranks("accumulates", 2)):
        for step, sent in enumerate(found["within"], 1):
            need(not sent, f"rank {rank}, step {step}: {sent} operations within no_sync()")


def check_local(lab):
    """Within the block, gradients add up on each rank by itself."""
    (expected,) = lab.ranks("alone", 1, 2, alone=True)
    for rank, found in enumerate(lab.ranks("accumulates", 2)):
        for step, (one, other) in enumerate(zip(found["local"], expected["local"], strict=True), 1):
            means = {name: sum(of[name] for of in other) / len(other) for name in one}
            need_values(
                one,
                other[rank],
                f"rank {rank}, step {step}, gradients after the block",
                ROUNDING,
                Origin(others={"the means of all ranks already": means}),
            )


def check_once(lab):
    """The backward after the block sends every gradient once."""
    for rank, found in enumerate(lab.ranks("accumulates", 2)):
        for step, sent in enumerate(found["after"], 1):
            need(
                [name for name, _ in sent] == ["all_reduce"] * TRAINED,
                f"rank {rank}, step {step}: {len(sent)} operations after the block, and there are "
                f"{TRAINED} gradients",
            )


def check_gradients(lab):
    """Gradients are then those of one process with all micro-batches."""
    (expected,) = lab.ranks("alone", 1, 2, alone=True)
    for rank, found in enumerate(lab.ranks("accumulates", 2)):
        for step, (one, other) in enumerate(
            zip(found["gradients"], expected["gradients"], strict=True), 1
        ):
            origin = Origin(expected["own"][step - 1], rank)
            need_values(one, other, f"rank {rank}, step {step}, gradients", ROUNDING, origin)


def check_error(lab):
    """After a block that was left by an error, gradients are sent again."""
    for rank, (sent, has_come) in enumerate(lab.ranks("leaves", 2, "error")):
        need(has_come, f"rank {rank}: no_sync() swallows the error; its block has to raise it")
        need(len(sent) == TRAINED, f"rank {rank}: {len(sent)} operations, and not {TRAINED}")


def check_nested(lab):
    """The end of a block within a block does not switch communication on, also if it is left by an
    error; the outer end does."""
    for way in ("nested", "inner error"):
        for rank, (sent, after) in enumerate(lab.ranks("leaves", 2, way)):
            need(not sent, f"rank {rank}: {len(sent)} operations within the outer block")
            need(
                len(after) == TRAINED,
                f"rank {rank}: {len(after)} operations after the outer block, and not {TRAINED}",
            )


def check_no_wait(lab):
    """The hook does not wait, and every operation is waited for in `finish`."""
    need_no_wait(lab.ranks("small", 3))
    need_waited([found["misuse"] for found in lab.ranks("accumulates", 2)])
