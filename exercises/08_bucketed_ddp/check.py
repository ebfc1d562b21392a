"""Checks of the exercise beside this file."""

from dpcore.school.exercise import training
from dpcore.school.exercise.judging import in_words, need, need_values
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
SMALL_CAP_MB = 0.002  # of Small: some buckets with several members
ONE_LAYER_MB = 0.25  # of SlowLayers: a bucket is a layer
TWO_LAYERS_MB = 0.5


def small(on, student):
    return training.train(on, lambda module, comm: student.BucketedDDP(module, comm, SMALL_CAP_MB))


def turned(on, student):
    def make(module, comm):
        return student.BucketedDDP(module, comm, SMALL_CAP_MB)

    return training.train_turned(on, make)


def slow(on, student, cap_mb):
    return training.train_slowly(on, lambda module, comm: student.BucketedDDP(module, comm, cap_mb))


def turned_alone(on, _, world):
    return training.turned_alone(world)


def plan_of_small():
    """The names of the parameters in each bucket, as the task plans them."""
    buckets, room = [], 0
    for name, parameter in reversed(list(training.Small(0).named_parameters())):
        if parameter.requires_grad:
            if room <= 0:
                buckets.append([])
                room = int(SMALL_CAP_MB * 2**20)
            buckets[-1].append(name)
            room -= parameter.numel() * parameter.element_size()
    return buckets


def steps_of(lab, cap_mb=ONE_LAYER_MB):
    return [
        (f"step {step} of rank {rank}", found)
        for rank, steps in enumerate(lab.ranks("slow", 2, cap_mb, link=LINK))
        for step, found in enumerate(steps, 1)
    ]


def check_pairs(lab):
    """Where gradients arrive in another order on odd ranks, the same ones are still added."""
    (expected,) = lab.ranks("turned_alone", 1, 2, alone=True)
    for rank, steps in enumerate(lab.ranks("turned", 2)):
        for step, found in enumerate(steps, 1):
            need_values(found, expected, f"rank {rank}, step {step}, gradients")


def check_buckets(lab):
    """A step has one all-reduce for each bucket of the plan, and nothing else."""
    for cap_mb, buckets in ((ONE_LAYER_MB, 6), (TWO_LAYERS_MB, 3)):
        for which, found in steps_of(lab, cap_mb):
            sent = found["sent"]
            others = sorted({name for name, _ in sent} - {"all_reduce"})
            need(not others, f"{which}: the core has also run {', '.join(others)}")
            need(
                len(sent) == buckets,
                f"{which}: {len(sent)} operations with a cap of {cap_mb} MiB, and the plan has "
                f"{buckets} buckets",
            )


def check_bytes(lab):
    """Every gradient travels once: a step sends as many bytes as there are gradients."""
    for which, found in steps_of(lab):
        sent, whole = sum(nbytes for _, nbytes in found["sent"]), sum(found["sizes"])
        need(
            whole <= sent <= 1.01 * whole,
            f"{which}: {sent} bytes were sent, and the gradients have {whole}",
        )


def check_same_order(lab):
    """All ranks send the same operations in the same order."""
    first, *others = lab.ranks("slow", 2, TWO_LAYERS_MB, link=LINK)
    for rank, steps in enumerate(others, 1):
        for step, (one, other) in enumerate(zip(first, steps, strict=True), 1):
            need(
                one["sent"] == other["sent"],
                f"step {step}: rank 0 sends {in_words(one['sent'])}; rank {rank} "
                f"{in_words(other['sent'])}",
            )


def check_early(lab):
    """Each bucket is sent as soon as it is full and those before it are sent, while backward goes
    on."""
    for which, found in steps_of(lab):
        total, early = len(found["sent"]), found["early"]
        need(
            early >= total - 2 and early > 0,
            f"{which}: {early} of {total} operations were sent by then, and "
            f"{found['in_backward']} by the end of backward",
        )
    need_at_once(lab.ranks("small", 3), plan_of_small())


def check_no_wait(lab):
    """The hook does not wait, not even for an earlier operation: communication does not hold up
    backward."""
    need_no_wait(lab.ranks("small", 3))
    for which, found in steps_of(lab):
        waited = found["waited_in_backward_ms"]
        need(waited < 30, f"{which}: {waited:.0f} ms of backward were spent in communication calls")


def check_hidden(lab):
    """On a slow link, most of the communication is hidden behind backward."""
    for rank, steps in enumerate(lab.ranks("slow", 2, ONE_LAYER_MB, link=LINK)):
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
