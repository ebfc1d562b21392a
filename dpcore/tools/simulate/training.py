"""A step of data parallel training, predicted: gradients, buckets, a schedule, all ranks' steps.

With free processors, communication takes nothing from the computation beside it, and an operation
costs no processor time (some 20 us): a bound that a run should come near where the link is what
takes time, and says little about memory that ranks share. In any case an operation that is launched
without ``background`` goes on by itself once its rank has begun to wait.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from dpcore.base.link import Speed
from dpcore.errors import Unsupported
from dpcore.reference.buckets import plan_buckets
from dpcore.reference.launches import ACROSS_STEPS, SCHEDULES, make_launch_schedule
from dpcore.tools.simulate.classes import (
    RepresentativeNetwork,
    one_host_stands_for_all,
    stands_for_all,
)
from dpcore.tools.simulate.control import (
    HeardSchedule,
    caps_of,
    copies_for,
    name_of,
    phases_of,
)
from dpcore.tools.simulate.gradients import DEFAULT_CAPS, Gradients
from dpcore.tools.simulate.links import Links
from dpcore.tools.simulate.local_updates import LocalUpdates, local_ranks
from dpcore.tools.simulate.network import Network
from dpcore.tools.simulate.plan import Hook, Matching, Plan
from dpcore.tools.simulate.processors import Processors
from dpcore.tools.simulate.ranks import Rank, StepIsOver, Steps, run
from dpcore.tools.simulate.recording import Recording
from dpcore.tools.simulate.stragglers import Stragglers

STEPS = 20
_LAST = 5  # steps that count, after which a schedule has learned what it learns
_LAST_DRAWN = 15  # the same where no two steps are alike
_CAPS_ACROSS_STEPS = (1 << 20,)  # of DataParallel
_MOST_BYTES = 1 << 40
_MOST_LOCAL_STEPS = 10_000


@dataclass(frozen=True)
class Prediction:
    """Milliseconds of a step in a long training, of the rank that takes longest: forward, backward,
    the optimizer where its time is known, and communication. ``exposed_ms``: what ranks wait, in
    the mean; ``waits`` has it by what they wait for. ``bound_ms``: no step is shorter, since the
    first gradient has to be there before the NIC has anything to do and the optimizer comes after
    all bytes, or, where communication goes on under the next forward, since all bytes have to pass
    the NIC. Stragglers are taken to compute as in their fastest step. ``bucket_cap_mb``: what was
    asked for, or None for the caps that come with the gradients; ``caps_mb``: those of the buckets.
    """

    schedule: str
    algorithm: str
    bucket_cap_mb: float | None
    buckets: int
    step_ms: float
    exposed_ms: float
    bound_ms: float
    waits: dict[str, float] = field(default_factory=dict)
    caps_mb: list[float] = field(default_factory=list)


def predict(
    work: Gradients,
    link: Speed | Links,
    schedule: str | LocalUpdates | Any = "bucketed",
    bucket_cap_mb: float | None = None,
    algorithm: str = "two_shot",
    processors: Processors = Processors.free(),  # noqa: B008
    stragglers: Stragglers = Stragglers(),  # noqa: B008
    hook: Hook | None = None,
    told: Recording | None = None,
) -> Prediction:
    """The step of a schedule over a link: of one with a name, or of a ``dpcore.LaunchSchedule`` (a
    class, or an object that every simulated rank gets a copy of), which may learn: it runs 20
    steps, and the last ones count. One with a name runs until two steps take as long, or 20 steps.
    ``LocalUpdates`` in its place predict a step of ``dp.LocalSGD`` or ``dp.DiLoCo``.
    ``processors``: what communication costs them, and how many there are. ``stragglers``: ranks
    that compute longer. ``hook``: what a communication hook does with each bucket. ``told``: gets
    what the ranks do, for a page as of a run.
    Without ``bucket_cap_mb``, with the caps of the run that the gradients are from.

    >>> ready = [0.01 * i for i in range(1, 9)]
    >>> work = Gradients([1_250_000] * 8, [0] * 8, [0.01], [0.08], [ready])
    >>> predict(work.on(2), Speed(1.25e8), "sequential").exposed_ms
    80.0
    """
    _check(work, schedule, bucket_cap_mb)
    pace = stragglers.pace(work)
    network = network_for(work, link, algorithm, processors, stragglers == Stragglers())
    caps: list[int] = []
    buckets: list[list[int]] = []
    if isinstance(schedule, LocalUpdates):
        if hook is not None:
            raise Unsupported(f"{schedule.words}: hooks are for gradients, and these send none")
        name, last = schedule.name, schedule.sync_every
        steps = run(network, local_ranks(work, network, schedule, pace), until_steady=False)
        fastest = stragglers.fastest(work, 2 * schedule.sync_every)
        bound = bound_seconds(fastest, link, True, schedule.share(work.world))
    else:
        named = isinstance(schedule, str)
        name = schedule if named else name_of(schedule)
        of_ranks = copies_for(_named(schedule) if named else schedule, network.ranks)
        across = "update" in phases_of(of_ranks[0])
        caps = caps_of(of_ranks[0], _caps(work, across, bucket_cap_mb))
        if across and hook is not None:
            raise Unsupported(f"schedule {name!r} does not work with communication hooks")
        buckets = _buckets(work, caps, across)
        matching = Matching(Plan(work.sizes, buckets, work.modules), hook)
        heard = [HeardSchedule(each, matching.plan.bytes) for each in of_ranks]

        def made(rank: int, step_is_over: StepIsOver) -> Rank:
            program = Rank(rank, work, network, heard[rank], matching, pace, STEPS, step_is_over)
            if told is not None:
                program.turns.notes = told.of_rank()
            return program

        if told is not None:
            told.schedule, told.plan, told.world = name, matching.plan, work.world
        steps = run(
            network,
            made,
            until_steady=named and not stragglers.are_drawn,
        )
        last = _LAST if not named else 1 if len(steps[0].ends) < STEPS else _LAST_DRAWN
        share = 1.0 if hook is None else hook.share
        parts = work.world if heard[0].updates_parts else 1
        bound = bound_seconds(stragglers.fastest(work, STEPS), link, across, share, parts)
    waits = _waits(steps, last)
    return Prediction(
        schedule=name,
        algorithm=algorithm,
        bucket_cap_mb=bucket_cap_mb,
        buckets=len(buckets),
        step_ms=round(max(each.seconds(last) for each in steps) * 1e3, 3),
        exposed_ms=round(sum(waits.values()), 3),
        bound_ms=round(bound * 1e3, 3),
        waits={what: round(ms, 3) for what, ms in waits.items()},
        caps_mb=[cap / (1 << 20) for cap in caps],
    )


def network_for(
    work: Gradients, link: Speed | Links, algorithm: str, processors: Processors, are_alike: bool
) -> Network:
    """Of every rank, of one that stands for all, which has the same interface, or of one host.
    ``are_alike``: no rank straggles."""
    links = Links.of(link)
    if are_alike and stands_for_all(work, links, algorithm):
        one = RepresentativeNetwork(work.world, link, algorithm, processors)
        return cast(Network, one)
    ranks = 0
    if are_alike and one_host_stands_for_all(work, links, algorithm, processors):
        ranks = links.ranks_per_host
    return Network(work.world, link, algorithm, processors, ranks)


def _waits(steps: Sequence[Steps], last: int) -> dict[str, float]:
    """Milliseconds of a step that ranks wait, in the mean, by what they wait for."""
    total: Counter[str] = Counter()
    for rank in steps:
        for waits in rank.waits[-last:]:
            total.update(waits)
    return {what: seconds * 1e3 / last / len(steps) for what, seconds in total.items()}


def _check(work: Gradients, schedule: Any, cap_mb: float | None) -> None:
    """What would be left out in silence, or never end."""
    if work.updates is not None and not isinstance(schedule, LocalUpdates):
        raise Unsupported(
            f"schedule {schedule if isinstance(schedule, str) else name_of(schedule)!r}: the "
            "recording is of local updates, which has no gradients, so only local:16 and the like "
            "can be predicted. For other schedules record steps of a dpcore.DataParallel"
        )
    if isinstance(schedule, LocalUpdates) and schedule.sync_every > _MOST_LOCAL_STEPS:
        raise Unsupported(
            f"{schedule.name}: at most {_MOST_LOCAL_STEPS:,} steps between two syncs can be "
            "simulated, since each of them is"
        )
    if cap_mb is not None and not 0 <= cap_mb < math.inf:
        raise Unsupported(f"bucket_cap_mb={cap_mb}: a size of buckets is a number from 0 on")
    if sum(work.sizes) > _MOST_BYTES:
        raise Unsupported(
            f"{sum(work.sizes) / 2**40:.3g} TiB of gradients: at most 1 TiB can be simulated, "
            "since each message of it is"
        )


def alone_seconds(work: Gradients, parts: int = 1) -> float:
    """Forward, backward and the optimizer of the rank that takes longest. ``parts``: among how
    many ranks the optimizer's work is divided."""
    times = zip(work.forward, work.backward, work.update, strict=True)
    return max(forward + backward + update / parts for forward, backward, update in times)


def bound_seconds(
    work: Gradients,
    link: Speed | Links,
    across: bool = False,
    share: float = 1.0,
    parts: int = 1,
) -> float:
    """Computing alone, or the time to the first gradient, all bytes at full bandwidth and the
    optimizer; if communication goes on ``across`` steps, computing alone or all bytes. ``share``:
    of the bytes, what travels. ``parts``: as of ``alone_seconds``."""
    computed = alone_seconds(work, parts)
    if work.world == 1:
        return computed
    first = max(f + min(r) for f, r in zip(work.forward, work.ready, strict=True))
    sending = Links.of(link).least_seconds(round(sum(work.sizes) * share), work.world)
    return max(computed, sending if across else first + sending + min(work.update))


def _named(schedule: str) -> Any:
    if schedule not in (*SCHEDULES, *ACROSS_STEPS):
        raise Unsupported(
            f"schedule {schedule!r}: choose from {', '.join((*SCHEDULES, *ACROSS_STEPS))}, or give "
            "one of your own as mine.py:MySchedule"
        )
    return make_launch_schedule(schedule)


def _caps(work: Gradients, across: bool, cap_mb: float | None) -> Sequence[int]:
    if cap_mb is not None:
        return [int(cap_mb * (1 << 20))]
    is_default = tuple(work.caps) == DEFAULT_CAPS
    return list(_CAPS_ACROSS_STEPS if across and is_default else work.caps)


def _buckets(work: Gradients, caps: Sequence[int], across: bool) -> list[list[int]]:
    """As the reducer plans them after the first step: in the order of arrival on rank 0, or, where
    forward waits for its modules, in the reverse of the order in which it needs them."""
    order = sorted(range(len(work.sizes)), key=lambda gradient: work.ready[0][gradient])
    if across:
        needed = dict.fromkeys(gradient for module in work.modules for gradient in module)
        order = [*(gradient for gradient in order if gradient not in needed), *needed][::-1]
    return plan_buckets(work.sizes, work.kinds, order, caps)
