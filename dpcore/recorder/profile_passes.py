"""Forwards, backwards, steps, and passes of a pipeline in a profile.

Forwards are annotated by torch DDP. A backward is all that autograd evaluates until the next
forward or optimizer step begins; a gradient is ready when its node has accumulated it. Steps are
marked by ``profiler.step()``; without it, a step lasts from one forward to the next.

``torch.distributed.pipelining`` annotates the actions of schedules with several stages per rank:
"PP:2F3" is the forward of micro-batch 3 through stage 2, and "PP:(0F1;3B0)OVERLAP_F_B" a forward
and then a backward. The annotation includes the wait for the pass's input.
"""

from __future__ import annotations

import bisect
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from dpcore.recorder.profile_file import Profile, Span

_FORWARD = "DistributedDataParallel.forward"
_EVALUATES = "autograd::engine::evaluate_function"
_ACCUMULATES = "torch::autograd::AccumulateGrad"
_OPTIMIZER = re.compile(r"Optimizer\.step#(.*)\.step")
_STEP = re.compile(r"ProfilerStep#(\d{1,18})\b")
_PASS = re.compile(r"PP:(\d+[FBIW]\d+)")
_TWO_PASSES = re.compile(r"PP:\((\d+F\d+);(\d+[BI]\d+)\)OVERLAP_F_B")


@dataclass
class Backward:
    """``thread`` accumulates the gradients. ``gradients`` are the spans of their nodes, in order of
    arrival."""

    thread: int | str
    begin_ns: int
    end_ns: int
    gradients: list[Span] = field(default_factory=list)


@dataclass(frozen=True)
class Step:
    number: int
    begin_ns: int
    end_ns: int


@dataclass(frozen=True)
class Pass:
    """A forward or backward of one micro-batch. ``name`` is the action's, such as 2F3."""

    name: str
    thread: int | str
    begin_ns: int
    end_ns: int


def forwards_of(profile: Profile) -> list[Span]:
    return [s for s in profile.spans if s.name == _FORWARD and s.category != "gpu_user_annotation"]


def optimizer_steps_of(profile: Profile) -> list[Span]:
    return [s for s in profile.spans if _OPTIMIZER.match(s.name) and s.is_on_host]


def steps_of(profile: Profile) -> list[Step]:
    found = ((_STEP.match(s.name), s) for s in profile.spans if s.is_on_host)
    return [Step(int(match[1]), s.begin_ns, s.end_ns) for match, s in found if match]


def backwards_of(profile: Profile) -> list[Backward]:
    """The backwards in order of time."""
    found: list[Backward] = []
    threads: list[Counter[int | str]] = []
    is_open = False
    for span in profile.spans:
        if span.name == _FORWARD or _OPTIMIZER.match(span.name) or _STEP.match(span.name):
            is_open = is_open and not span.is_on_host
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


def passes_of(profile: Profile) -> list[Pass]:
    """The passes in order of time, each from its first operator on: before that it waits."""
    marked = [s for s in profile.spans if s.name.startswith("PP:") and s.is_on_host]
    operators: dict[int | str, list[Span]] = {mark.thread: [] for mark in marked}
    for span in profile.spans if marked else ():
        is_work = span.category == "cpu_op" and not span.name.startswith("c10d::")
        if is_work and span.thread in operators:
            operators[span.thread].append(span)
    begins = {thread: [span.begin_ns for span in found] for thread, found in operators.items()}
    passes = []
    for mark in marked:
        first, last = (bisect.bisect_left(begins[mark.thread], at)
                       for at in (mark.begin_ns, mark.end_ns))  # fmt: skip
        inside = operators[mark.thread][first:last]
        if one := _PASS.fullmatch(mark.name):
            begin = inside[0].begin_ns if inside else mark.begin_ns
            passes.append(Pass(one[1], mark.thread, begin, mark.end_ns))
        elif two := _TWO_PASSES.fullmatch(mark.name):
            passes += _two(two.groups(), mark, inside)
    return passes


def _two(names: Sequence[str], mark: Span, inside: Sequence[Span]) -> list[Pass]:
    """Splits an overlapped action at autograd's first node: a forward, then a backward."""
    at = next((n for n, s in enumerate(inside) if s.name.startswith(_EVALUATES)), 0)
    if not at:
        return []
    end = max(span.end_ns for span in inside[:at])
    return [
        Pass(names[0], mark.thread, inside[0].begin_ns, end),
        Pass(names[1], mark.thread, inside[at].begin_ns, mark.end_ns),
    ]
