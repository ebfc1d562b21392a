"""By how much predictions were off, and calibrations apart: what an interval takes in.

``WITHIN``, ``ACROSS``: between which two shares nine of ten errors lie, of the cells of
``docs/simulator.md`` that count, for schedules that are over with backward and for those that go on
under the next forward. An error of +2% is a prediction that was 2% too long. ``CALIBRATIONS``: how
far those of one machine lay from the middle of all of them, as a share of it.

``python -m benchmarks.readme --write`` writes the figures, from the records of that page.
"""

from __future__ import annotations

from dataclasses import replace

from dpcore.tools.simulate.processors import Processors

# <!-- figures: residuals -->
WITHIN = -0.035, -0.001
ACROSS = -0.060, 0.003
CALIBRATIONS = {
    "operation": 0.06,
    "memory_operation": 0.26,
    "message": 0.05,
    "tcp_message": 0.18,
    "copied_byte": 0.04,
    "reduced_byte": 0.09,
    "fused_byte": 0.06,
    "tcp_byte": 0.17,
    "wake": 0.32,
    "busy_wake": 0.14,
    "woken": 0.20,
    "update_call": 0.03,
}
# <!-- end -->


def varied(processors: Processors, times: float) -> Processors:
    """As another calibration might have found them; ``times``: 1 for dearer ones, -1 for cheaper.

    >>> 1e-4 < varied(Processors(operation=1e-4), 1).operation < 2e-4
    True
    """
    found = {
        name: getattr(processors, name) * (1 + times * share)
        for name, share in CALIBRATIONS.items()
    }
    return replace(processors, **found)


def measured_between(low_ms: float, high_ms: float, across: bool) -> tuple[float, float]:
    """What nine of ten runs would take that are predicted to take from ``low_ms`` to ``high_ms``.
    ``across``: whether the schedule goes on under the next forward."""
    low, high = ACROSS if across else WITHIN
    return low_ms / (1 + max(0.0, high)), high_ms / (1 + min(0.0, low))
