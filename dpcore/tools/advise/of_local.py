"""Local updates whose ranks wait for what they send, by a bound or by the simulator.

The simulator is asked where the link is emulated, and where it reproduces the recorded steps.
"""

from __future__ import annotations

import math
from dataclasses import replace

from dpcore.base.link import parse_speed
from dpcore.tools.advise.evidence import Evidence
from dpcore.tools.advise.finding import BOUND, SIMULATOR, Finding, shown
from dpcore.tools.advise.of_buckets import waits_ms
from dpcore.tools.simulate.gradients import Gradients
from dpcore.tools.simulate.local_updates import LocalUpdates
from dpcore.tools.simulate.training import predict

_WORTH = 0.05
_RARER = 4  # times as many steps in an interval
_FRAGMENTS = (1, 2, 4, 8)
_FEW_RANKS = 4  # with more, int8 saves few bytes
_REPRODUCED = 0.15


def sends(e: Evidence, work: Gradients | None = None) -> Finding | None:
    """``work``: of the recording, for the simulator."""
    waits = waits_ms(e)
    if e.updates is None or e.world < 2 or not e.count or waits < _WORTH * e.step_ms:
        return None
    now = LocalUpdates(**e.updates)
    computing = e.median(lambda step: step.computing_ms)
    whole = now.sync_every * e.median(lambda step: max(0.0, step.flight_ms - step.late_ms))
    rarer = replace(now, sync_every=_RARER * now.sync_every)
    late = _hidden(now, whole, computing)
    remedies = [] if late is None else [(late, _diloco(late, e.world), waits)]
    remedies.append((rarer, f"sync_every={rarer.sync_every}", waits * (1 - 1 / _RARER)))
    if now.bits == 32 and e.world <= _FEW_RANKS:
        fewer = replace(now, bits=8)
        remedies.append((fewer, _diloco(fewer, e.world), waits * (1 - e.world / 8)))
    best, change, high = remedies[0]
    others = "".join(f"; or {words}" for _, words, _ in remedies[1:])
    low, basis, why = 0.0, BOUND, "all of it, if sends travel while ranks compute"
    if late is None:
        why = f"the waits of {_RARER - 1} of {_RARER} sends"
    if (gains := _predicted(e, work, now, best)) is not None:
        (low, high), basis = gains, SIMULATOR
        why = "of the recording, and of its shortest and longest interval"
    return Finding(
        cause="exposed sends",
        says=f"Ranks wait for what they send, for {waits / e.step_ms:.0%} of their time.",
        evidence=(
            f"{shown(waits)} ms of a step of {shown(e.step_ms)} ms are exposed, in the mean of "
            f"{now.sync_every} steps; what an interval sends is in flight for {shown(whole)} ms, "
            f"and a step computes for {shown(computing)}"
        ),
        low_ms=max(0.0, low),
        high_ms=high,
        basis=basis,
        why=why,
        change=f"{change}{others}. Each of them changes what is computed: compare the loss",
    )


def _hidden(now: LocalUpdates, whole_ms: float, computing_ms: float) -> LocalUpdates | None:
    """With a delay in which a fragment arrives, if there are enough steps between two of them."""
    for fragments in _FRAGMENTS:
        if fragments < now.fragments or computing_ms <= 0:
            continue
        delay = math.ceil(whole_ms / fragments / computing_ms)
        if now.delay < delay < now.sync_every // fragments:
            return replace(now, fragments=fragments, delay=delay)
    return None


def _diloco(updates: LocalUpdates, world: int) -> str:
    given = {
        "fragments": updates.fragments if updates.fragments > 1 else 0,
        "fragment_sync_delay": updates.delay,
        "bits": 8 if updates.bits == 8 else 0,
    }
    words = "".join(f", {name}={value}" for name, value in given.items() if value)
    return f"dp.DiLoCo(module, optimizer, outer, sync_every={updates.sync_every}{words})"


def _predicted(
    e: Evidence, work: Gradients | None, now: LocalUpdates, other: LocalUpdates
) -> tuple[float, float] | None:
    """The least and the most that is gained."""
    if work is None:
        return None
    outer = (work.updates or {}).get("outer", 0.0)
    now, other = replace(now, outer=outer), replace(other, outer=outer)
    link = parse_speed(e.link)
    if abs(predict(work, link, now).step_ms - e.step_ms) > _REPRODUCED * e.step_ms:
        return None
    by_length = sorted(work.spread, key=lambda step: step.compute_seconds)
    tried = [work, *by_length[:1], *by_length[-1:]]
    gains = [predict(w, link, now).step_ms - predict(w, link, other).step_ms for w in tried]
    return min(gains), max(gains)
