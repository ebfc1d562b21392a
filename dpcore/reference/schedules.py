"""The table of algorithms for each collective.

``make_schedule("ring", "all_reduce", 4)`` gives the list of moves, and ``describe`` prints it. The
algorithms themselves are in the files ``algorithms_*``; each is the twin of one function in
``csrc/comm/schedule``, and a test holds both to the same list, move by move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from dpcore.reference import algorithms_hierarchical as hierarchical
from dpcore.reference import algorithms_linear as linear
from dpcore.reference import algorithms_logarithmic as logarithmic
from dpcore.reference.algorithms_hierarchical import HostAlgorithm
from dpcore.reference.moves import Plan, Schedule, in_sending_order

Algorithm = Callable[[int, int], Plan]  # (world, root) -> Plan


@dataclass(frozen=True)
class OverHosts:
    """An algorithm that depends on the hosts of the ranks, not only on their number."""

    algorithm: HostAlgorithm

    def __call__(self, world: int, root: int) -> Plan:
        return self.algorithm([0] * world, root)  # all on one host


ALGORITHMS: dict[str, dict[str, Algorithm]] = {
    "all_reduce": {
        "one_shot": linear.one_shot_all_reduce,
        "two_shot": linear.two_shot_all_reduce,
        "ring": linear.ring_all_reduce,
        "recursive_doubling": logarithmic.recursive_doubling_all_reduce,
        "halving_doubling": logarithmic.halving_doubling_all_reduce,
        "tree": logarithmic.tree_all_reduce,
        "hierarchical": OverHosts(hierarchical.hierarchical_all_reduce),
    },
    "reduce_scatter": {
        "direct": linear.direct_reduce_scatter,
        "ring": linear.ring_reduce_scatter,
        "halving_doubling": logarithmic.halving_doubling_reduce_scatter,
        "hierarchical": OverHosts(hierarchical.hierarchical_reduce_scatter),
    },
    "all_gather": {
        "direct": linear.direct_all_gather,
        "ring": linear.ring_all_gather,
        "recursive_doubling": logarithmic.recursive_doubling_all_gather,
        "bruck": logarithmic.bruck_all_gather,
        "hierarchical": OverHosts(hierarchical.hierarchical_all_gather),
    },
    "broadcast": {
        "direct": linear.direct_broadcast,
        "two_shot": linear.two_shot_broadcast,
        "ring": linear.ring_broadcast,
        "tree": logarithmic.tree_broadcast,
        "hierarchical": OverHosts(hierarchical.hierarchical_broadcast),
    },
    "reduce": {
        "direct": linear.direct_reduce,
        "two_shot": linear.two_shot_reduce,
        "tree": logarithmic.tree_reduce,
        "hierarchical": OverHosts(hierarchical.hierarchical_reduce),
    },
    "gather": {
        "direct": linear.direct_gather,
        "tree": logarithmic.tree_gather,
    },
    "scatter": {
        "direct": linear.direct_scatter,
        "tree": logarithmic.tree_scatter,
    },
    "all_to_all": {
        "direct": linear.direct_all_to_all,
        "bruck": logarithmic.bruck_all_to_all,
    },
}

REDUCING = ("all_reduce", "reduce_scatter", "reduce")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
ADDS_ALL_AT_ONCE = ("one_shot", "two_shot", "direct")


def algorithms_of(collective: str) -> list[str]:
    """The names that ``make_schedule`` takes for a collective."""
    return list(ALGORITHMS.get(collective, {}))


def make_schedule(
    algorithm: str, collective: str, world: int, root: int = 0, hosts: Sequence[int] = ()
) -> Schedule:
    """The moves of a known algorithm, sorted by step and then as each rank sends them.

    ``hosts``: the host of each rank, as a number; without it all ranks share one host.
    """
    if algorithm not in algorithms_of(collective):
        known = ", ".join(algorithms_of(collective)) or "none"
        raise ValueError(f"no algorithm {algorithm!r} for {collective}; choose one of: {known}")
    if world < 1 or not 0 <= root < world:
        raise ValueError(f"root {root} is not a rank of a world of {world}")
    if hosts and len(hosts) != world:
        raise ValueError(f"hosts are given for {len(hosts)} ranks of {world}")
    entry = ALGORITHMS[collective][algorithm]
    # Two contributions can only be added at once, and without a reduction there is no order.
    ordered = algorithm in ADDS_ALL_AT_ONCE or collective not in REDUCING or world <= 2
    if isinstance(entry, OverHosts):
        plan = entry.algorithm(hosts or [0] * world, root)
        # Without two levels all is added at once, but for a root, whose own comes last.
        count = len(set(hosts)) or 1
        ordered = ordered or count == 1 or (count == world and collective != "reduce")
    else:
        plan = entry(world, root)

    return Schedule(
        algorithm=algorithm,
        collective=collective,
        world=world,
        chunks=plan.chunks,
        root=root if collective in ROOTED else 0,
        ordered=ordered,
        moves=in_sending_order(plan.moves, world),
    )


def hosts_of(layout: str) -> list[int]:
    """The host of each rank, from the number of ranks on each host.

    >>> hosts_of("3+1")
    [0, 0, 0, 1]
    """
    return [host for host, n in enumerate(layout.split("+")) for _ in range(int(n))]


def describe(schedule: Schedule) -> str:
    """The schedule as text: for each step, sender, receiver and chunks, copied or added."""
    order = "ordered" if schedule.ordered else "not ordered"
    root = f", root {schedule.root}" if schedule.collective in ROOTED else ""
    head = f"{schedule.collective} by {schedule.algorithm}"
    lines = [f"{head}: world {schedule.world}{root}, chunks {schedule.chunks}, {order}"]
    for step, moves in groupby(schedule.moves, key=lambda move: move.step):
        lines.append(f"  step {step}")
        for (src, dst, reduce), sent in groupby(moves, key=lambda m: (m.src, m.dst, m.reduce)):
            chunks = " ".join(str(move.chunk) for move in sent)
            lines.append(f"    {src} -> {dst}  {'add ' if reduce else 'copy'}  {chunks}")
    return "\n".join(lines) + "\n"
