"""Checks of the exercise beside this file."""

from dpcore.school.exercise import training
from dpcore.school.exercise.judging import in_words, need
from dpcore.school.exercise.one_process import (  # noqa: F401 - run by name
    alone,
    check_begin,
    check_gradients,
    check_training,
    check_waits,
)

ALLOWED = ("all_reduce", "broadcast", "barrier")
BYTES = (6 * 16 + 16 + 16 * 16 + 16 + 16 * 3 + 3) * 8  # of the gradients of training.Small


def small(on, student):
    return training.train(on, student.FlatDDP)


def check_operations(lab):
    """A step has one operation, an all-reduce."""
    for rank, found in enumerate(lab.ranks("small", 3)):
        for step, sent in enumerate(found["sent"], 1):
            need(
                [name for name, _ in sent] == ["all_reduce"],
                f"rank {rank}, step {step} sends {in_words(sent)}; one all_reduce is right",
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
