"""Forwards, backwards and steps in a profile.

A forward is what torch DDP annotates as one. A backward is all that autograd evaluates until the
next forward or optimizer step begins; in it a gradient is there when its node has accumulated it.
A step is what ``profiler.step()`` marks; without that, steps go from forward to forward.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from dpcore.recorder.torch_profile.file import Profile, Span

_FORWARD = "DistributedDataParallel.forward"
_EVALUATES = "autograd::engine::evaluate_function"
_ACCUMULATES = "torch::autograd::AccumulateGrad"
_OPTIMIZER = re.compile(r"Optimizer\.step#(.*)\.step")
_STEP = re.compile(r"ProfilerStep#(\d+)")


@dataclass
class Backward:
    """``thread``: the one that accumulates gradients. ``gradients``: their nodes, in the order in
    which they came."""

    thread: int | str
    begin_ns: int
    end_ns: int
    gradients: list[Span] = field(default_factory=list)


@dataclass(frozen=True)
class Step:
    number: int
    begin_ns: int
    end_ns: int


def forwards_of(profile: Profile) -> list[Span]:
    return [s for s in profile.spans if s.name == _FORWARD and s.category != "gpu_user_annotation"]


def optimizer_steps_of(profile: Profile) -> list[Span]:
    return [s for s in profile.spans if _OPTIMIZER.match(s.name) and _on_host(s)]


def steps_of(profile: Profile) -> list[Step]:
    found = ((_STEP.match(s.name), s) for s in profile.spans if _on_host(s))
    return [Step(int(match[1]), s.begin_ns, s.end_ns) for match, s in found if match]


def backwards_of(profile: Profile) -> list[Backward]:
    """In order of time."""
    found: list[Backward] = []
    threads: list[Counter[int | str]] = []
    is_open = False
    for span in profile.spans:
        if span.name == _FORWARD or _OPTIMIZER.match(span.name) or _STEP.match(span.name):
            is_open = is_open and not _on_host(span)
        elif span.name.startswith(_EVALUATES):
            if not is_open:
                found.append(Backward(span.thread, span.begin_ns, span.end_ns))
                threads.append(Counter())
            is_open = True
            found[-1].end_ns = max(found[-1].end_ns, span.end_ns)
        elif span.name == _ACCUMULATES and is_open:
            found[-1].gradients.append(span)
            threads[-1][span.thread] += 1
    for backward, of_gradients in zip(found, threads, strict=True):
        if of_gradients:
            backward.thread = of_gradients.most_common(1)[0][0]
        backward.gradients.sort(key=lambda s: s.end_ns)
    return found


def _on_host(span: Span) -> bool:
    return span.category in ("user_annotation", "cpu_op")
