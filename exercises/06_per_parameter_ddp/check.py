"""Checks of the exercise beside this file."""

from dpcore.school.exercise import training
from dpcore.school.exercise.judging import in_words, need
from dpcore.school.exercise.one_process import (  # noqa: F401 - run by name
    alone,
    check_begin,
    check_gradients,
    check_kept,
    check_training,
    check_waits,
    need_at_once,
    need_no_wait,
)

ALLOWED = ("all_reduce", "broadcast", "barrier")
LINK = "100mbit,100us"  # a matrix of 256 KiB takes 21 ms, as long as a layer's backward


def small(on, student):
    return training.train(on, student.PerParameterDDP)


def slow(on, student):
    return training.train_slowly(on, student.PerParameterDDP)


def steps_of(lab):
    return [
        (f"step {step} of rank {rank}", found)
        for rank, steps in enumerate(lab.ranks("slow", 2, link=LINK))
        for step, found in enumerate(steps, 1)
    ]


def check_operations(lab):
    """A step has one all-reduce for each gradient, and nothing else."""
    for which, found in steps_of(lab):
        expected = [("all_reduce", nbytes) for nbytes in found["sizes"]]
        sent = [tuple(operation) for operation in found["sent"]]
        need(
            sent == expected,
            f"{which} sends {in_words(sent)}; {in_words(expected)} is right",
        )


def check_same_order(lab):
    """All ranks send the same operations in the same order."""
    first, *others = lab.ranks("slow", 2, link=LINK)
    for rank, steps in enumerate(others, 1):
        for step, (one, other) in enumerate(zip(first, steps, strict=True), 1):
            need(
                one["sent"] == other["sent"],
                f"step {step}: rank 0 sends {in_words(one['sent'])}; rank {rank} "
                f"{in_words(other['sent'])}",
            )


def check_early(lab):
    """Each gradient is sent as soon as it is there, while backward goes on."""
    for which, found in steps_of(lab):
        total, early = len(found["sent"]), found["early"]
        need(
            early >= total - 2 and early > 0,
            f"{which}: {early} of {total} operations were sent by then, and "
            f"{found['in_backward']} by the end of backward",
        )
    ranks = lab.ranks("small", 3)
    need_at_once(ranks, [[name] for name, _ in ranks[0]["begun"][0]])


def check_no_wait(lab):
    """The hook does not wait, not even for an earlier operation: communication does not hold up
    backward."""
    need_no_wait(lab.ranks("small", 3))
    for which, found in steps_of(lab):
        waited = found["waited_in_backward_ms"]
        need(waited < 30, f"{which}: {waited:.0f} ms of backward were spent in communication calls")


def check_hidden(lab):
    """On a slow link, most of the communication is hidden behind backward."""
    for rank, steps in enumerate(lab.ranks("slow", 2, link=LINK)):
        best = min(steps, key=lambda found: found["step_ms"])
        link_ms = sum(best["sizes"]) / 12.5e3
        most = 120 + 0.5 * link_ms  # six layers of 20 ms
        need(
            best["step_ms"] < most,
            f"rank {rank}: the best step took {best['step_ms']:.0f} ms. Computing takes 120 ms, "
            f"the link {link_ms:.0f}; with overlap it is about 150",
        )


def check_own(lab):
    """It is your own: no DataParallel does the work."""
    for rank, found in enumerate(lab.ranks("small", 3)):
        need(not found["has_model"], f"rank {rank}: a dpcore.DataParallel has sent gradients")
