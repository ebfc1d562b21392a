"""Another launch schedule for a run of dpcore over an emulated link, by the simulator.

Only there the simulator knows the link. It has to reproduce the step that was recorded before it is
asked about another one.
"""

from __future__ import annotations

import statistics

from dpcore.base.link import Speed, parse_speed
from dpcore.errors import Error
from dpcore.reference.launches import ACROSS_STEPS, SCHEDULES
from dpcore.tools.advise.evidence import Evidence
from dpcore.tools.advise.finding import SIMULATOR, Finding
from dpcore.tools.simulate.gradients import Gradients
from dpcore.tools.simulate.training import Prediction, predict

_MOST_RANKS = 8  # as many as predictions were compared with runs
_REPRODUCED = 0.15
_WORTH, _EXPOSED = 0.1, 0.1
_PIECES = (4, 8, 16)  # into which all gradients may be divided


def schedules(e: Evidence, work: Gradients) -> list[Finding]:
    """A better schedule within a step, and one that goes on under the next forward."""
    known = e.schedule in SCHEDULES or e.schedule in ACROSS_STEPS
    if e.of_torch or not e.link or not known or not 2 <= e.world <= _MOST_RANKS or not e.count:
        return []
    if e.median(lambda step: step.exposed_ms) < _EXPOSED * e.step_ms:
        return []
    try:
        link = parse_speed(e.link)
    except Error:  # a file of links
        return []
    own_ms = e.median(lambda step: step.ms - step.between_ms - step.loading_ms)
    now = predict(work, link, e.schedule)
    if abs(now.step_ms - own_ms) > _REPRODUCED * own_ms:
        return []
    found = []
    caps_mb = [None, *(sum(work.sizes) / pieces / (1 << 20) for pieces in _PIECES)]
    within = [predict(work, link, "bucketed", cap) for cap in caps_mb]
    across = [predict(work, link, name) for name in ACROSS_STEPS if e.schedule not in ACROSS_STEPS]
    for tried, trades in ((within, False), (across, True)):
        best = min(tried, key=lambda one: one.step_ms, default=now)
        low, high = _gain(e, work, link, now, best)
        if now.step_ms - best.step_ms >= _WORTH * e.step_ms and low > 0:
            found.append(_finding(e, now, best, own_ms, (low, high), trades))
    return found


def _gain(
    e: Evidence, work: Gradients, link: Speed, now: Prediction, best: Prediction
) -> tuple[float, float]:
    """Of the shortest and the longest recorded step."""
    by_length = sorted(work.spread, key=lambda step: step.compute_seconds)
    gains = [now.step_ms - best.step_ms]
    for step in (by_length[0], by_length[-1]) if by_length else ():
        ours, other = (
            predict(step, link, one.schedule, one.bucket_cap_mb).step_ms for one in (now, best)
        )
        gains.append(ours - other)
    return min(gains), max(gains)


def _finding(
    e: Evidence,
    now: Prediction,
    best: Prediction,
    own_ms: float,
    gain: tuple[float, float],
    trades: bool,
) -> Finding:
    cap = "" if best.bucket_cap_mb is None else f", bucket_cap_mb={best.bucket_cap_mb:.2g}"
    exposed = statistics.median(s.exposed_ms for steps in e.ranks for s in steps)
    more = "; the optimizer becomes dp.DistributedOptimizer(optimizer, model)" if trades else ""
    return Finding(
        cause="schedule",
        says=(
            f"With schedule {best.schedule!r}, communication goes on under the next forward."
            if trades
            else f"Schedule {best.schedule!r} hides more of the communication than "
            f"{e.schedule!r} as it is."
        ),
        evidence=(
            f"{exposed:.3g} ms of a step are exposed over {e.link}; the simulator gives this "
            f"schedule {now.step_ms:.3g} ms where {own_ms:.3g} were recorded, and the other "
            f"{best.step_ms:.3g}"
        ),
        low_ms=gain[0],
        high_ms=gain[1],
        basis=SIMULATOR,
        why="of the shortest and longest recorded step",
        change=f"dp.DataParallel(model, schedule={best.schedule!r}{cap}){more}",
        trades=trades,
    )
