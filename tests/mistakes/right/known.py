"""``@right``: the list of right programs, and what each needs of the run."""

from collections.abc import Callable
from dataclasses import dataclass

PROGRAMS: dict[str, "Right"] = {}


@dataclass(frozen=True)
class Right:
    name: str
    program: Callable
    in_group: bool  # it needs torch.distributed
    ways: tuple[str, ...]  # beside shared memory


def right(*ways, in_group=False):
    """``ways``: others of ``tests.mistakes.running`` under which it runs as it is."""

    def add(program):
        assert program.__name__ not in PROGRAMS
        PROGRAMS[program.__name__] = Right(program.__name__, program, in_group, ways)
        return program

    return add
