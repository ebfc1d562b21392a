"""Checks that several exercises share: a DDP ends where one process with the whole batch ends.

An exercise imports them into its ``check.py``, where ``small`` trains with the student's class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dpcore.exercise import training
from dpcore.exercise.judging import need, need_values
from dpcore.exercise.lab import Wrong

if TYPE_CHECKING:
    from dpcore.exercise.lab import Lab


def alone(on: Any, _: Any) -> dict[str, Any]:
    """Runs in a process of its own, without the student's code."""
    return training.train_alone()


def check_begin(lab: Lab) -> None:
    """Every rank begins with the values of rank 0, buffers included."""
    (expected,) = lab.ranks("alone", 1, alone=True)
    for rank, found in enumerate(lab.ranks("small", 3)):
        need_values(found["begin"], expected["begin"], f"values of rank {rank}")


def check_gradients(lab: Lab) -> None:
    """After finish(), gradients are those of one process with the whole batch, in each step."""
    (expected,) = lab.ranks("alone", 1, alone=True)
    for rank, found in enumerate(lab.ranks("small", 3)):
        for step, (one, other) in enumerate(
            zip(found["gradients"], expected["gradients"], strict=True), 1
        ):
            need_means(one, other, 3, f"rank {rank}, step {step}, gradients")


def need_means(found: Any, expected: dict[str, Any], world: int, what: str) -> None:
    """Raises ``Wrong`` unless the gradients are the means, and says so if they are the sums."""
    sums = {name: world * gradient for name, gradient in expected.items()}
    need(not _are(found, sums), f"{what}: they are the sums over {world} ranks, and not the means")
    need_values(found, expected, what)


def _are(found: Any, expected: Any) -> bool:
    try:
        need_values(found, expected, "")
    except Wrong:
        return False
    return True


def check_training(lab: Lab) -> None:
    """Four steps with momentum end where one process ends."""
    (expected,) = lab.ranks("alone", 1, alone=True)
    for rank, found in enumerate(lab.ranks("small", 3)):
        need_values(found["end"], expected["end"], f"values of rank {rank}")
