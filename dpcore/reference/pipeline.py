"""Runs a pipeline plan: GPipe, 1F1B, or any other whose backwards are whole.

A model is cut into stages, and rank r has those that the plan says. A micro-batch goes through them
all, forward from stage to stage and backward the other way. While it is elsewhere, a rank computes
another one: the plan says which (``dp.pipeline_plan``).

**Bytes and steps.** Each micro-batch sends one activation from a stage to the next, and its
gradient back: 2 (S-1) messages, between neighbours only. That is why pipelines are for the slowest
links.

**When it loses.** The first micro-batch passes all stages before the last rank has anything to do:
with M micro-batches and R ranks (R-1)/(M+R-1) of the time is idle. Small micro-batches compute less
efficiently, stages that differ wait for the longest, and GPipe keeps M activations where 1F1B keeps
at most R.

Two mistakes are usual. The loss of a step is the mean over the *batch*: that of each micro-batch
counts by its share, or gradients come out M times too large. And a rank that sends must not wait
until its message was taken: the other one may be about to do the same.

As in ladder.py, nothing here needs torch by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

NAMES = {"F": "forward", "B": "backward"}


class Pipeline:
    """``modules``: those of this rank, by the number of their stage. ``empty(microbatch)`` is a new
    tensor with the shape and type of an activation between two stages. ``loss(output, target)`` is
    a mean over a micro-batch, used on the last stage. ``span``: that of a ``dp.trace()``, which
    then shows 1F3, the forward of micro-batch 3 through stage 1, and 1B3."""

    def __init__(
        self,
        plan: Any,
        modules: Mapping[int, Callable[[Any], Any]],
        comm: Any,
        empty: Callable[[int], Any],
        loss: Callable[[Any, Any], Any],
        span: Callable[[str], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        if len(plan.actions) != comm.world_size:
            raise ValueError(f"{plan.name} is for {len(plan.actions)} ranks, not {comm.world_size}")
        self.mine = [stage for stage, rank in plan.rank_of.items() if rank == comm.rank]
        if set(self.mine) != set(modules):
            raise ValueError(f"rank {comm.rank} has the stages {self.mine}, not {list(modules)}")
        if any(action.kind not in NAMES for row in plan.actions for action in row):
            raise ValueError(f"{plan.name} has backwards in two parts: torch's executor runs them")
        self.plan, self.modules, self.comm = plan, modules, comm
        self.empty, self.loss, self.span = empty, loss, span
        self.kept: dict[tuple[int, int], tuple[Any, Any]] = {}  # inputs and outputs that are live
        self.here: dict[tuple[str, int, int], Any] = {}  # between two stages of this rank
        self.sending: list[tuple[Any, Any]] = []

    def step(self, inputs: Sequence[Any], targets: Sequence[Any]) -> Any:
        """Forward and backward of all micro-batches; gradients add up in the parameters. Returns
        the mean loss of the batch on the rank of the last stage, and None elsewhere."""
        rows = [len(target) for target in targets]
        if not len(inputs) == len(targets) == self.plan.microbatches:
            raise ValueError(f"{self.plan.name} has {self.plan.microbatches} micro-batches")
        self.shares = [count / sum(rows) for count in rows]
        self.losses: list[Any] = []
        for stage, kind, m in self.plan.actions[self.comm.rank]:
            with self.told(stage, kind, m):
                (self.forward if kind == "F" else self.backward)(stage, m, inputs, targets)
        for _, work in self.sending:
            work.wait()
        self.sending.clear()
        return sum(self.losses) if self.losses else None

    def forward(self, stage: int, m: int, inputs: Sequence[Any], targets: Sequence[Any]) -> None:
        x = inputs[m] if stage == 0 else self.receive("F", stage, m).requires_grad_()
        with self.span(f"{stage}F{m}"):
            y = self.modules[stage](x)
            if self.is_last(stage):
                y = self.loss(y, targets[m]) * self.shares[m]
                self.losses.append(y.detach())
        self.kept[stage, m] = x, y
        if not self.is_last(stage):
            self.send("F", stage + 1, m, y.detach())

    def backward(self, stage: int, m: int, inputs: Sequence[Any], targets: Sequence[Any]) -> None:
        x, y = self.kept.pop((stage, m))
        gradient = None if self.is_last(stage) else self.receive("B", stage, m)
        with self.span(f"{stage}B{m}"):
            y.backward(gradient)
        if stage > 0:
            self.send("B", stage - 1, m, x.grad)

    def is_last(self, stage: int) -> bool:
        return bool(stage == self.plan.stages - 1)

    # ---- messages --------------------------------------------------------------------------------

    def send(self, kind: str, stage: int, m: int, tensor: Any) -> None:
        """To ``stage``, without waiting: the tensor is kept until it has left."""
        there = self.plan.rank_of[stage]
        if there == self.comm.rank:
            self.here[kind, stage, m] = tensor
            return
        tensor = tensor.contiguous()
        work = self.comm.send(tensor, there, tag=self.tag(kind, stage, m), async_op=True)
        self.sending.append((tensor, work))

    def receive(self, kind: str, stage: int, m: int) -> Any:
        """What ``stage`` needs for a pass."""
        if (kind, stage, m) in self.here:
            return self.here.pop((kind, stage, m))
        neighbour = stage - 1 if kind == "F" else stage + 1
        tensor = self.empty(m)
        self.comm.recv(tensor, self.plan.rank_of[neighbour], tag=self.tag(kind, stage, m))
        return tensor

    def tag(self, kind: str, stage: int, m: int) -> int:
        return (m * int(self.plan.stages) + stage) * 2 + (kind == "B")

    @contextmanager
    def told(self, stage: int, kind: str, m: int) -> Iterator[None]:
        """Errors say in which pass: "PeerLost: ... (in the backward of micro-batch 3, stage 1)"."""
        try:
            yield
        except Exception as problem:
            where = f"in the {NAMES[kind]} of micro-batch {m}, stage {stage}"
            problem.args = (f"{problem} ({where})",)
            raise
