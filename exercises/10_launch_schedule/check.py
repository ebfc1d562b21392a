"""Checks of the exercise beside this file."""

import torch

import dpcore
from dpcore.school.exercise import training
from dpcore.school.exercise.judging import need, need_values
from dpcore.school.exercise.one_process import need_gradients

ALLOWED = None  # DataParallel needs a whole communicator
OPEN = ("DataParallel",)
LINK = "100mbit,100us"  # a matrix of 256 KiB takes 21 ms, as long as a layer's backward
STEPS = 4  # of training.train
BUCKET = 256 * 256 * 4  # a layer of SlowLayers, which is a bucket


class Noting:
    """A launch control that writes down what is asked of it."""

    def __init__(self, control, event, notes):
        self._control, self._event, self._notes = control, event, notes

    def __getattr__(self, name):
        asked = getattr(self._control, name)
        if not callable(asked):
            return asked

        def noted(*args, **options):
            self._notes.append([self._event, name, args[0] if args else None])
            return asked(*args, **options)

        return noted


def noted(student, notes):
    """The student's schedule; ``notes`` gets which event has called what."""

    class Noted(student.Pairs):
        def bucket_ready(self, control, bucket):
            super().bucket_ready(Noting(control, "bucket_ready", notes), bucket)

        def backward_end(self, control):
            super().backward_end(Noting(control, "backward_end", notes))

    return Noted()


def small(on, student):
    notes = []

    def make(module, comm):
        schedule = noted(student, notes)
        return dpcore.DataParallel(module, comm=comm, schedule=schedule, bucket_cap_mb=0.001)

    return training.train(on, make) | {"notes": notes}


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
    return training.train_alone(2)


def turned_alone(on, _, world):
    return training.turned_alone(world)


def check_gradients(lab):
    """Gradients are those of one process with the whole batch, in each step."""
    (expected,) = lab.ranks("alone", 1, alone=True)
    need_gradients(lab.ranks("small", 2), expected)


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
    """Six buckets are three operations of two buckets each, and each is launched once."""
    for rank, found in enumerate(lab.ranks("small", 2)):
        launched = [what for _, asked, what in found["notes"] if asked == "launch"]
        buckets = [n for what in launched for n in (what if isinstance(what, list) else [what])]
        most = max(map(buckets.count, buckets), default=0)
        need(
            most <= STEPS,
            f"rank {rank}: in {STEPS} steps, bucket {most and max(buckets, key=buckets.count)} was "
            f"launched {most} times",
        )
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


def check_no_wait(lab):
    """`bucket_ready` does not wait: that would hold up backward."""
    for rank, found in enumerate(lab.ranks("small", 2)):
        waits = [asked for event, asked, _ in found["notes"] if event == "bucket_ready"]
        waits = [asked for asked in waits if "wait" in asked]
        need(not waits, f"rank {rank}: bucket_ready calls {waits and waits[0]} within backward")


def check_hidden(lab):
    """On a slow link, most of the communication is hidden behind backward."""
    for rank, steps in enumerate(lab.ranks("slow", 2, 6, link=LINK)):
        best = min(found["step_ms"] for found in steps)
        need(
            best < 205,
            f"rank {rank}: the best step took {best:.0f} ms. Computing takes 120 ms, the link 126; "
            "with pairs that overlap it is about 165",
        )
