"""Checks of the exercise beside this file."""

from dpcore.school.exercise import training
from dpcore.school.exercise.judging import need
from dpcore.school.exercise.one_process import (  # noqa: F401 - run by name
    alone,
    check_begin,
    check_gradients,
    check_training,
    check_waits,
)

ALLOWED = ("all_reduce", "broadcast", "barrier")
TRAINED = 6  # parameters of training.Small, and their elements
BYTES = (6 * 16 + 16 + 16 * 16 + 16 + 16 * 3 + 3) * 8


def small(on, student):
    return training.train(on, student.NaiveDDP)


def check_operations(lab):
    """A step has one all-reduce for each parameter that is trained, and nothing else."""
    for rank, found in enumerate(lab.ranks("small", 3)):
        for step, sent in enumerate(found["sent"], 1):
            others = sorted({name for name, _ in sent} - {"all_reduce"})
            need(not others, f"rank {rank}, step {step}: the core has also run {', '.join(others)}")
            need(
                len(sent) == TRAINED,
                f"rank {rank}, step {step}: {len(sent)} operations, and {TRAINED} parameters are "
                "trained",
            )


def check_bytes(lab):
    """Every gradient travels once: a step sends as many bytes as there are gradients."""
    for rank, found in enumerate(lab.ranks("small", 3)):
        for step, sent in enumerate(found["sent"], 1):
            nbytes = sum(nbytes for _, nbytes in sent)
            need(nbytes == BYTES, f"rank {rank}, step {step}: {nbytes} bytes, and not {BYTES}")


def check_own(lab):
    """It is your own: no DataParallel does the work."""
    for rank, found in enumerate(lab.ranks("small", 3)):
        need(not found["has_model"], f"rank {rank}: a dpcore.DataParallel has sent gradients")
