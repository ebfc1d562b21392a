"""What does it cost to look? `python -m benchmarks.trace_cost`

Steps of data parallel training while a trace records, and without, in turn: the share of a step
that recording takes, and what that is per event. The aim is below 2 % of a step.
"""

from __future__ import annotations

import statistics
from typing import Any

import dpcore as dp
from benchmarks.harness.cost_of_step import command
from dpcore.tools.compare.training.ranks import (
    ALONE,
    TRACED,
    WARM_STEPS,
    measure,
    of_slowest,
    overheads,
    spawn,
    step_of,
)

PLAIN = "dpcore bucketed"
RECORDED = PLAIN + TRACED


def events_of_a_step(comm: Any, model: str, folder: str) -> int:
    """On a rank: how much a trace of one step holds."""
    step = step_of(PLAIN, model, comm)
    for _ in range(WARM_STEPS):
        step()
    with dp.trace(comm=comm) as trace:
        step()
    return len(trace.events)


def cost(model: str, world: int, rounds: int, seconds: float) -> dict[str, Any]:
    times = of_slowest(
        spawn(measure, world, model, [PLAIN, RECORDED], rounds, seconds)
    )  # the plain one first: it says how many steps a round has
    more = overheads({ALONE: times[PLAIN], RECORDED: times[RECORDED]})[RECORDED]
    step = statistics.median(times[PLAIN])
    events = max(spawn(events_of_a_step, world, model))
    return {
        "model": model,
        "world": world,
        "step_s": step,
        "cost_of_step": more / step,
        "events": events,
        "ns_per_event": more / events * 1e9,
        "rounds_s": times,
    }


def row(line: dict[str, Any]) -> str:
    return (
        f"{line['step_s'] * 1e3:>10.2f}{line['events']:>8}"
        f"{line['cost_of_step']:>9.2%}{line['ns_per_event']:>13.0f}"
    )


if __name__ == "__main__":
    command(
        __doc__,
        "trace_cost",
        cost,
        f"{'step ms':>10}{'events':>8}{'cost':>9}{'ns an event':>13}",
        row,
        21,
        0.3,
    )
