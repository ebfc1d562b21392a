"""A run and the simulator tell a schedule the same events, and it makes the same launches.

One rank trains, and its schedule hears of the next forward when all operations are over, which a
busy machine may let come later: so what has come never depends on time.
"""

import time
from itertools import pairwise

import pytest
import torch
from torch import nn

import dpcore
from dpcore.base.link import Speed
from dpcore.reference.launches import ACROSS_STEPS, SCHEDULES, make_launch_schedule
from dpcore.tools.simulate import gradients_of, predict

CAP_MB = 0.004
STEPS = 3


class Recorded:
    """A schedule that notes the events it hears and the buckets it launches."""

    def __init__(self, name, settles=False):
        self._schedule = make_launch_schedule(name)
        self._settles = settles
        self.seen = []
        for event in self._schedule.listens_to():
            setattr(self, event, self._telling(event))

    def __getattr__(self, name):
        return getattr(self._schedule, name)

    def __deepcopy__(self, memo):
        return self  # the simulator runs one rank

    def _telling(self, event):
        def tell(control, *arguments):
            while self._settles and event == "forward_begin" and not all_over(control):
                time.sleep(0.001)
            self.seen.append((event, *arguments))
            getattr(self._schedule, event)(_Noting(control, self.seen), *arguments)

        return tell


def all_over(control):
    return all(control.is_over(bucket) for bucket in range(control.buckets))


class _Noting:
    def __init__(self, control, seen):
        self._control, self._seen = control, seen

    def __getattr__(self, name):
        return getattr(self._control, name)

    def launch(self, bucket, priority=0, background=True):
        self._seen.append(("launch", bucket, priority, background))
        self._control.launch(bucket, priority=priority, background=background)


class Crossed(nn.Module):
    """Forward needs its layers in another order than they were made in."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(6))

    def forward(self, x):
        for number in (3, 0, 1, 5, 4, 2):
            x = torch.tanh(self.layers[number](x))
        return x


def steps_of(seen):
    """The last full steps: each begins with its first bucket."""
    first = ("bucket_ready", 0) if ("bucket_ready", 0) in seen else ("backward_end",)
    begins = [at for at, what in enumerate(seen) if what == first]
    return [seen[begin:end] for begin, end in pairwise(begins)]


@pytest.mark.parametrize("name", [*SCHEDULES, *ACROSS_STEPS])
@pytest.mark.filterwarnings("ignore:schedule 'Recorded'")
def test_events_and_launches_are_those_of_a_run(name, tmp_path):
    real = Recorded(name, settles=True)

    def body(comm):
        torch.manual_seed(0)
        model = dpcore.DataParallel(Crossed(), comm=comm, schedule=real, bucket_cap_mb=CAP_MB)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if name in ACROSS_STEPS:
            optimizer = dpcore.DistributedOptimizer(optimizer, model)

        def step():
            model(torch.randn(4, 24)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(3):  # buckets are made anew
            step()
        real.seen.clear()
        with dpcore.trace(tmp_path / "run.json", comm=comm):
            for _ in range(STEPS):
                step()

    dpcore.spawn(body, 1, mode="threads")
    simulated = Recorded(name)
    predict(gradients_of(tmp_path / "run.json"), Speed(1e9), simulated, CAP_MB)
    expected = steps_of(real.seen)[-1]
    found = steps_of(simulated.seen)[-1]
    assert len(expected) > 6 or name in ("sequential", "flat", "oracle")
    assert found == expected
