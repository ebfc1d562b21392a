"""Checks that several exercises share: a DDP ends where one process with the whole batch ends.

An exercise imports them into its ``check.py``, where ``small`` trains with the student's class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dpcore.school.exercise import training
from dpcore.school.exercise.explaining import Origin
from dpcore.school.exercise.judging import need, need_values, need_waited

if TYPE_CHECKING:
    from dpcore.school.exercise.lab import Lab


WORLD = 3
ROUNDING = 1e-10  # models are in double precision


def alone(on: Any, _: Any) -> dict[str, Any]:
    """Runs in a process of its own, without the student's code."""
    return training.train_alone(WORLD)


def check_begin(lab: Lab) -> None:
    """Every rank begins with the values of rank 0, buffers included."""
    (expected,) = lab.ranks("alone", 1, alone=True)
    for rank, found in enumerate(lab.ranks("small", WORLD)):
        own = Origin(others={"still this rank's own": expected["own"][rank]})
        need_values(found["begin"], expected["begin"], f"values of rank {rank}", ROUNDING, own)


def check_gradients(lab: Lab) -> None:
    """After finish(), gradients are those of one process with the whole batch, in each step."""
    (expected,) = lab.ranks("alone", 1, alone=True)
    need_gradients(lab.ranks("small", WORLD), expected)


def need_gradients(ranks: list[Any], expected: dict[str, Any]) -> None:
    """Raises ``Wrong`` unless the gradients of all ranks are the means in each step."""
    for rank, found in enumerate(ranks):
        for step, gradients in enumerate(found["gradients"]):
            before = {f"those of step {step}": expected["gradients"][step - 1]} if step else {}
            need_values(
                gradients,
                expected["gradients"][step],
                f"rank {rank}, step {step + 1}, gradients",
                ROUNDING,
                Origin(expected["local"][step], rank, before),
            )


def check_training(lab: Lab) -> None:
    """Four steps with momentum end where one process ends."""
    (expected,) = lab.ranks("alone", 1, alone=True)
    for rank, found in enumerate(lab.ranks("small", WORLD)):
        need_values(found["end"], expected["end"], f"values of rank {rank}", ROUNDING)


def check_waits(lab: Lab) -> None:
    """Every operation is waited for, and its tensor is left alone until then."""
    need_waited([found["misuse"] for found in lab.ranks("small", WORLD)])


def need_no_wait(ranks: list[Any]) -> None:
    """Raises ``Wrong`` if a call has held up backward."""
    for rank, found in enumerate(ranks):
        for step, blocked in enumerate(found["blocked"], 1):
            need(
                not blocked,
                f"step {step} of rank {rank}: backward is held up by {blocked and blocked[0]}; all "
                "waiting is for finish()",
            )


def need_at_once(ranks: list[Any], buckets: list[list[str]]) -> None:
    """Raises ``Wrong`` unless each bucket was sent by the hook of the last of its gradients, in the
    order of the buckets."""
    for rank, found in enumerate(ranks):
        for step, begun in enumerate(found["begun"], 1):
            come: set[str] = set()
            for name, count in begun:
                come.add(name)
                full = next((n for n, names in enumerate(buckets) if not come >= {*names}), None)
                right = len(buckets) if full is None else full
                need(
                    count == right,
                    f"step {step} of rank {rank}: {count} operations were begun when the gradient "
                    f"of {name} had come, and {right} is right: {len(come)} of {len(begun)} "
                    "gradients were there",
                )


def check_kept(lab: Lab) -> None:
    """`finish` leaves nothing behind: what is kept does not grow from step to step."""
    for rank, found in enumerate(lab.ranks("small", WORLD)):
        _, before, _, after = found["kept"]
        for name, count in after["items"].items():
            begun = before["items"].get(name, 0)
            need(
                count <= begun,
                f"rank {rank}: self.{name} has {begun} items after step 2, and {count} after step "
                "4: what finish() has waited for is not needed any more",
            )
        need(
            after["elements"] <= before["elements"],
            f"rank {rank} keeps tensors with {before['elements']} elements after step 2, and with "
            f"{after['elements']} after step 4: what was in flight has arrived, and is not needed "
            "any more",
        )
