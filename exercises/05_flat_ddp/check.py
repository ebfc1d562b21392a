"""Checks of the exercise beside this file."""

from dpcore.exercise import training
from dpcore.exercise.judging import need, need_values

ALLOWED = ("all_reduce", "broadcast", "barrier")
BYTES = (6 * 16 + 16 + 16 * 16 + 16 + 16 * 3 + 3) * 8  # of the gradients of training.Small


def small(on, student):
    return training.train(on, student.FlatDDP)


def alone(on, _):
    return training.train_alone()


def check_begin(lab):
    """Every rank begins with the values of rank 0, buffers included."""
    (expected,) = lab.ranks("alone", 1, alone=True)
    for rank, found in enumerate(lab.ranks("small", 3)):
        need_values(found["begin"], expected["begin"], f"values of rank {rank}")


def check_gradients(lab):
    """After finish(), gradients are those of one process with the whole batch, in each step."""
    (expected,) = lab.ranks("alone", 1, alone=True)
    for rank, found in enumerate(lab.ranks("small", 3)):
        for step, (one, other) in enumerate(
            zip(found["gradients"], expected["gradients"], strict=True), 1
        ):
            need_values(one, other, f"rank {rank}, step {step}, gradients")


def check_training(lab):
    """Four steps with momentum end where one process ends."""
    (expected,) = lab.ranks("alone", 1, alone=True)
    for rank, found in enumerate(lab.ranks("small", 3)):
        need_values(found["end"], expected["end"], f"values of rank {rank}")


def check_operations(lab):
    """A step has one operation, an all-reduce."""
    for rank, found in enumerate(lab.ranks("small", 3)):
        for step, sent in enumerate(found["sent"], 1):
            names = [name for name, _ in sent]
            need(
                names == ["all_reduce"],
                f"rank {rank}, step {step}: {len(names)} operations ({', '.join(names)})",
            )


def check_bytes(lab):
    """It has as many bytes as there are gradients."""
    for rank, found in enumerate(lab.ranks("small", 3)):
        for step, sent in enumerate(found["sent"], 1):
            nbytes = sum(nbytes for _, nbytes in sent)
            need(nbytes == BYTES, f"rank {rank}, step {step}: {nbytes} bytes, and not {BYTES}")


def check_own(lab):
    """It is your own: no DataParallel does the work."""
    for rank, found in enumerate(lab.ranks("small", 3)):
        need(not found["has_model"], f"rank {rank}: a dpcore.DataParallel has sent gradients")
