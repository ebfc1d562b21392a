"""What ``dpcore advise`` says: a cause, its evidence, what it may gain, and what to change."""

from __future__ import annotations

from dataclasses import dataclass

BOUND, SIMULATOR = "bound", "simulator"


@dataclass(frozen=True)
class Finding:
    """``cause``: its name. ``says``: a sentence. ``evidence``: numbers of the run. Of a step,
    between ``low_ms`` and ``high_ms`` are gained; ``basis`` says how that is known: a bound, which
    is the most that can be gained, or the simulator. ``trades``: it changes what is computed, so
    nothing is wrong without it."""

    cause: str
    says: str
    evidence: str
    high_ms: float
    change: str
    low_ms: float = 0.0
    basis: str = BOUND
    why: str = ""  # what the gain is computed from
    trades: bool = False

    def gain(self, step_ms: float) -> str:
        """In words."""
        share = f"{min(1.0, self.high_ms / step_ms):.0%} of a step" if step_ms > 0 else "of a step"
        if shown(self.low_ms) == shown(self.high_ms):
            ms = f"{shown(self.high_ms)} ms, {share}"
        elif self.low_ms > 0:
            ms = f"{shown(self.low_ms)} to {shown(self.high_ms)} ms, up to {share}"
        else:
            ms = f"at most {shown(self.high_ms)} ms, {share}"
        return f"{ms} ({self.basis}: {self.why})" if self.why else f"{ms} ({self.basis})"


def shown(value: float) -> str:
    """
    >>> shown(3.14159), shown(2048.7)
    ('3.14', '2049')
    """
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
