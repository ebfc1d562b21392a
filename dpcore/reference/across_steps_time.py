"""The time of a step whose communication continues under the next forward: a model with one
computing thread and one network, which carries a phase at a time.

Times are per layer, in any unit. ``network`` is an all-reduce of the layer; a reduce-scatter and an
all-gather take half of it each. The optimizer takes no time, and the network does not slow down
computing, so only the schedules make a difference. They are those of across_steps.py.

>>> layers = dict(forward=[1, 1, 1, 1], backward=[2, 2, 2, 2], network=[3, 3, 3, 3])
>>> for name in SCHEDULES:
...     print(f"{name:9} {step_time(name, **layers):g}")
plain     18
priority  17
dear      16.5
zero1     16.5
zero2     16.5
"""

from __future__ import annotations

from collections.abc import Sequence

SCHEDULES = ("plain", "priority", "dear", "zero1", "zero2")
AT_A_TIME = 4  # the number of whole buckets for which zero2 has memory


class Network:
    """A network that carries one phase at a time, the most urgent that is ready."""

    def __init__(self) -> None:
        self.free = 0.0
        self.waiting: list[tuple[float, int, int, float]] = []  # ready, urgency, layer, takes
        self.arrived: dict[int, float] = {}  # by layer: its last phase

    def launch(self, layer: int, ready: float, takes: float, urgency: int) -> None:
        self.waiting.append((ready, urgency, layer, takes))

    def wait(self, layer: int) -> float:
        """The time at which the last phase of a layer arrives. No phase is launched meanwhile."""
        while any(phase[2] == layer for phase in self.waiting):
            self.free = max(self.free, min(ready for ready, *_ in self.waiting))
            phase = min(
                (phase for phase in self.waiting if phase[0] <= self.free),
                key=lambda phase: phase[1],
            )
            self.waiting.remove(phase)
            self.free += phase[3]
            self.arrived[phase[2]] = self.free
        return self.arrived.get(layer, 0.0)


def step_time(
    name: str,
    forward: Sequence[float],
    backward: Sequence[float],
    network: Sequence[float],
    steps: int = 20,
) -> float:
    """The time of one step in a long training."""
    wire, now, ends = Network(), 0.0, []
    layers = range(len(forward))
    share = 1 if name in ("plain", "priority") else 2  # phases of an all-reduce
    number = 0  # launches so far: without priorities the network carries them in this order
    for _ in range(steps):
        for layer in layers:
            now = max(now, wire.wait(layer)) + forward[layer]
        for layer in reversed(layers):
            now += backward[layer]
            if name == "zero2" and layer + AT_A_TIME < len(forward):  # frees its memory
                now = max(now, wire.wait(layer + AT_A_TIME))
            urgency = layer if name == "priority" else number
            wire.launch(layer, now, network[layer] / share, urgency)
            number += 1
        if name == "plain":
            now = max(now, *map(wire.wait, layers))
        elif name == "dear":
            for layer in layers:
                wire.launch(layer, now, network[layer] / share, number + layer)
        elif name in ("zero1", "zero2"):
            for layer in reversed(layers):  # step(): an update after each reduce-scatter
                now = max(now, wire.wait(layer))
                wire.launch(layer, now, network[layer] / share, number + layer)
        number += len(layers)
        ends.append(now)
    half = steps // 2
    return (ends[-1] - ends[half - 1]) / (steps - half)
