"""Checks of the exercise beside this file."""

import torch

import dpcore
from dpcore.exercise import training
from dpcore.exercise.judging import need, need_values

ALLOWED = None  # DataParallel needs a whole communicator
OPEN = ("DataParallel",)
LINK = "100mbit,100us"  # a matrix of 256 KiB takes 21 ms, as long as a layer's backward
BUCKET = 256 * 256 * 4  # a layer of SlowLayers, which is a bucket


def small(on, student):
    def make(module, comm):
        return dpcore.DataParallel(module, comm=comm, schedule=student.Pairs(), bucket_cap_mb=0.001)

    return training.train(on, make)


def turned(on, student):
    def make(module, comm):
        return dpcore.DataParallel(module, comm=comm, schedule=student.Pairs(), bucket_cap_mb=0.001)

    return training.train_turned(on, make)


def slow(on, student, layers):
    def make(module, comm):
        return dpcore.DataParallel(module, comm=comm, schedule=student.Pairs(), bucket_cap_mb=0.2)

    torch.set_num_threads(1)
    return training.train_slowly(on, make, layers=layers)


def alone(on, _):
    return training.train_alone()


def turned_alone(on, _, world):
    return training.turned_alone(world)


def check_gradients(lab):
    """Gradients are those of one process with the whole batch, in each step."""
    (expected,) = lab.ranks("alone", 1, alone=True)
    for rank, found in enumerate(lab.ranks("small", 2)):
        for step, (one, other) in enumerate(
            zip(found["gradients"], expected["gradients"], strict=True), 1
        ):
            need_values(one, other, f"rank {rank}, step {step}, gradients")


def check_other_order(lab):
    """So they are where gradients arrive in another order on odd ranks."""
    (expected,) = lab.ranks("turned_alone", 1, 2, alone=True)
    for rank, steps in enumerate(lab.ranks("turned", 2)):
        for step, found in enumerate(steps, 1):
            need_values(found, expected, f"rank {rank}, step {step}, gradients")


def need_sizes(found, right, which):
    sent = [nbytes / BUCKET for _, nbytes in found["sent"]]
    shown = ", ".join(f"{size:.3g}" for size in sent) or "no"
    words = ", ".join(map(str, right))
    need(sent == right, f"{which}: operations of {shown} buckets, and {words} are right")


def check_pairs(lab):
    """Six buckets are three operations of two buckets each."""
    for rank, steps in enumerate(lab.ranks("slow", 2, 6, link=LINK)):
        for step, found in enumerate(steps, 1):
            need_sizes(found, [2, 2, 2], f"rank {rank}, step {step}")


def check_odd(lab):
    """Five buckets are three operations, and the last has one."""
    for rank, steps in enumerate(lab.ranks("slow", 2, 5, link=LINK)):
        for step, found in enumerate(steps, 1):
            need_sizes(found, [2, 2, 1], f"rank {rank}, step {step}")


def check_early(lab):
    """Pairs are sent as soon as they are complete: two of three before the gradient of the first
    layer is computed."""
    for rank, steps in enumerate(lab.ranks("slow", 2, 6, link=LINK)):
        for step, found in enumerate(steps, 1):
            need(
                found["early"] == 2,
                f"rank {rank}, step {step}: {found['early']} operations were sent by then",
            )


def check_hidden(lab):
    """On a slow link, most of the communication is hidden behind backward."""
    for rank, steps in enumerate(lab.ranks("slow", 2, 6, link=LINK)):
        best = min(found["step_ms"] for found in steps)
        need(
            best < 205,
            f"rank {rank}: the best step took {best:.0f} ms. Computing takes 120 ms, the link 126; "
            "with pairs that overlap it is about 165",
        )
