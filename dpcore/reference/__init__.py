"""The algorithms in plain Python, short enough to teach from.

Plain Python and numpy: nothing here needs the compiled core, a network or Linux.

    >>> import numpy as np
    >>> from dpcore import reference
    >>> plan = reference.make_schedule("ring", "all_reduce", world=4)
    >>> print(reference.describe(plan))                                    # doctest: +SKIP
    >>> reference.check(plan)
    >>> reference.run(plan, [np.full(8, rank) for rank in range(4)])[0]
    array([6, 6, 6, 6, 6, 6, 6, 6])

A new algorithm is a function ``(world, root) -> Plan``. Make a ``Schedule`` of its moves, and
``check`` finds its mistakes.
"""

from dpcore.reference.collectives import ScheduleError, check, run
from dpcore.reference.moves import Move, Plan, Schedule, order_of_chunks
from dpcore.reference.schedules import (
    ALGORITHMS,
    algorithms_of,
    describe,
    hosts_of,
    make_schedule,
)

__all__ = [
    "ALGORITHMS",
    "Move",
    "Plan",
    "Schedule",
    "ScheduleError",
    "algorithms_of",
    "check",
    "describe",
    "hosts_of",
    "make_schedule",
    "order_of_chunks",
    "run",
]
