"""The base of LocalSGD and DiLoCo: a block that counts steps and sends fragments when due.

It does not use the reducer, only a communicator, a flat tensor, and the hook that torch calls
after an optimizer's step. A fragment of the parameters is *sent* after one step, and *lands* after
that step or a later one; at most one fragment is in flight.
"""

from __future__ import annotations

import contextlib
import copy
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import nn

from dpcore.comm.communicators.protocol import capabilities_of
from dpcore.comm.communicators.read_back import numbers_in
from dpcore.ddp.local_updates.checks import (
    check_module,
    check_optimizer,
    check_state,
    unwrapped,
    whole_number,
)
from dpcore.ddp.local_updates.fragments import Fragment, cut
from dpcore.ddp.mistakes.observer import in_blocks
from dpcore.ddp.wrapper.buffer_sync import BufferSync
from dpcore.ddp.wrapper.gradient_group import choose_group
from dpcore.ddp.wrapper.model_group import ModelGroup
from dpcore.ddp.wrapper.module_state import broadcast_values, check_same_model, digest_of
from dpcore.ddp.wrapper.parameters import trained_parameters
from dpcore.errors import Error, Mismatch, PeerLost, Timeout, Unsupported
from dpcore.recorder import facts as trace_facts
from dpcore.recorder.file import LOCAL_STEP
from dpcore.recorder.recording import recording_of

_Self = TypeVar("_Self", bound="LocalUpdates")


class Flight(NamedTuple):
    """A fragment that was sent and has not landed."""

    fragment: int
    step: int  # it was sent after this step
    work: Any  # None when its mean has arrived
    sent_ns: int = 0


@dataclass
class Counted:
    """What all sends of a block came to."""

    waited_ns: int = 0
    in_flight_ns: int = 0
    sent_bytes: int = 0


class Observer(Protocol):
    """Hears of the changes between two means, on all ranks in the same order."""

    def restarted(self) -> None:
        """What is sent next is not the change of a whole interval."""

    def sent(self, change: torch.Tensor) -> None:
        """A fragment of this rank has changed by this much."""

    def landed(self, mean: torch.Tensor) -> None:
        """The mean over ranks of that."""


class LocalUpdates:
    """Counts the optimizer's steps, sends fragments when they are due, and takes their means."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        sync_every: int,
        comm: Any,
        process_group: Any,
        fragments: int = 1,
        delay: int = 0,
    ) -> None:
        check_module(module, self._name)
        self.module, self.optimizer = module, optimizer
        self.sync_every = whole_number(sync_every, 1, "sync_every", self._name)
        self._trained = trained_parameters(module, ())
        check_optimizer(optimizer, "optimizer", module, self._name)
        self._counted = unwrapped(optimizer)
        whole_number(fragments, 1, "fragments", self._name)
        self._delay = whole_number(delay, 0, "fragment_sync_delay", self._name)
        most = min(self.sync_every, len(self._trained))
        if fragments > most:
            raise Unsupported(
                f"{self._name}: fragments={fragments}, but a fragment has at least one parameter, "
                f"of which there are {len(self._trained)}, and a step of its own among "
                f"sync_every={sync_every}: at most {most}"
            )
        self._fragments = cut([parameter for _, parameter in self._trained], fragments)
        # Fragment i is sent after this step of an interval.
        self._due = {(i + 1) * sync_every // fragments: i for i in range(fragments)}
        between = sync_every // fragments
        if delay >= between:
            raise Unsupported(
                f"{self._name}: fragment_sync_delay={delay}, but a fragment is sent every "
                f"{between} steps (sync_every={sync_every}, fragments={fragments}), and has to be "
                f"there before the next one: at most {between - 1}"
            )
        device = self._trained[0][1].device
        self.group = choose_group(comm, process_group, device)
        self._model_group = ModelGroup(self.group, module)
        self._buffers = BufferSync(self._model_group, module, (), device)
        self._dtype = torch.float32
        for _, parameter in self._trained:
            self._dtype = torch.promote_types(self._dtype, parameter.dtype)
        # Memory for the one fragment in flight.
        largest = max(fragment.elements for fragment in self._fragments)
        self._flat = self._model_group.flat(largest, self._dtype, device)
        self._steps = self._syncs = 0
        self._moved = [False] * fragments  # since their last mean
        self._flight: Flight | None = None
        self._hook: Any = None
        self._is_resumed = False
        self._counts = Counted()
        self._observer: Observer | None = None
        self._began: list[torch.Tensor | None] = [None] * fragments  # agreed on, while observed
        self._is_traced = capabilities_of(self.group).traces
        self._step_ended_ns = 0

    @property
    def _name(self) -> str:
        return type(self).__name__

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self._options().items())
        return f"<{self._name}({options}) after step {self._steps}, {self._syncs} syncs>"

    # ---- the block ---------------------------------------------------------------------------

    def __enter__(self: _Self) -> _Self:
        """All ranks begin with rank 0's parameters and buffers, except after
        ``load_state_dict()``."""
        if self._counted in in_blocks:
            raise Unsupported(
                f"{self._name}: the steps of this optimizer are counted already, by the block "
                "around this one; leave that first"
            )
        self._agree()
        self._hook = self._counted.register_step_post_hook(self._after_step)
        in_blocks[self._counted] = weakref.ref(self)
        if self._is_traced:
            trace_facts.know(self)
        self._step_ended_ns = time.monotonic_ns()
        return self

    def __exit__(self, kind: Any, problem: Any, traceback: Any) -> None:
        """Syncs the last steps, so that all ranks leave with the same parameters. After an
        exception nothing is sent, and each rank keeps its own."""
        self._hook.remove()
        in_blocks.pop(self._counted, None)
        if kind is None:
            self._make_equal()

    def _agree(self) -> None:
        self._arrive()  # a fragment that an exception left in flight
        group = self._model_group
        own = {"resumed": self._is_resumed, "steps": self._steps}
        options = {"local updates": self._name, **own, **self._options()}
        named = dict(self.module.named_buffers())
        words = "models or options", f"Give {self._name} the same ones on all ranks"
        group.agree_on(
            check_same_model(group.group, self._trained, named, options, group.number, *words)
        )
        if not self._is_resumed:
            values = [*self.module.parameters(), *named.values()]
            broadcast_values(group, [value.detach() for value in values])
            self._flight, self._moved = None, [False] * len(self._fragments)
            self._take_parameters()
        self._is_resumed = False

    @torch.no_grad()
    def _after_step(self, *_: Any) -> None:
        self._steps += 1
        self._moved = [True] * len(self._fragments)
        with self._explained():
            if self._flight is not None and self._steps >= self._flight.step + self._delay:
                self._land()
            phase = (self._steps - 1) % self.sync_every + 1
            if phase in self._due:
                self._send(self._due[phase])
                if self._delay == 0:
                    self._land()
            if phase == self.sync_every:
                self._send_buffers()
        began, self._step_ended_ns = self._step_ended_ns, time.monotonic_ns()
        if self._is_traced and (trace := recording_of(self.group)) is not None:
            number = self._model_group.traced_as
            trace._add_step(LOCAL_STEP, began, self._step_ended_ns, number)

    @contextlib.contextmanager
    def _uncounted(self) -> Iterator[None]:
        """Within the block: steps of the optimizer that send nothing, as if outside of it."""
        self._hook.remove()
        try:
            yield
        finally:
            self._hook = self._counted.register_step_post_hook(self._after_step)

    @contextlib.contextmanager
    def _put_back(self) -> Iterator[None]:
        """Module, optimizer and block are afterwards as they were before."""
        own, is_resumed = copy.deepcopy(self.state_dict()), self._is_resumed
        optimizer = copy.deepcopy(self.optimizer.state_dict())
        tensors = [*self.module.parameters(), *self.module.buffers()]
        values = [tensor.detach().clone() for tensor in tensors]
        try:
            yield
        finally:
            self.load_state_dict(own)
            self._is_resumed = is_resumed
            self.optimizer.load_state_dict(optimizer)
            with torch.no_grad():
                for tensor, value in zip(tensors, values, strict=True):
                    tensor.copy_(value)

    def sync(self) -> None:
        """Makes the ranks' parameters equal at once. All ranks call it within the block, between
        two steps."""
        if self._counted not in in_blocks:
            raise Error(f"{self._name}.sync() comes within the block: `with {self._name}(...):`")
        self._make_equal()

    @torch.no_grad()
    def _observe(self, observer: Observer | None) -> None:
        """From now on, on all ranks; None ends it."""
        self._observer, self._began = observer, [None] * len(self._fragments)
        if observer is not None and self._flight is None and not any(self._moved):
            self._began = [self._now(fragment) for fragment in self._fragments]

    def _now(self, fragment: Fragment) -> torch.Tensor:
        return fragment.read(self._flat.new_empty(fragment.elements))

    @torch.no_grad()
    def _make_equal(self) -> None:
        self._began = [None] * len(self._fragments)
        with self._explained():
            if self._flight is not None:
                self._land()
            moved = torch.tensor(self._moved, dtype=torch.int32, device=self._flat.device)
            self._model_group.all_reduce(moved, "max", async_op=False, content=self._content("end"))
            for number, has_moved in enumerate(numbers_in(moved, self.group)):
                if has_moved:
                    self._send(number)
                    self._land()
            self._send_buffers()

    def _send_buffers(self) -> None:
        self._buffers.find_again()  # some may have been registered since
        if self._buffers.has_any:
            self._buffers()

    # ---- one fragment ------------------------------------------------------------------------

    def _send(self, number: int) -> None:
        self._check_parameters()
        began = self._began[number]
        if self._observer is not None and began is not None:
            self._observer.sent(self._now(self._fragments[number]) - began)
        begin = time.monotonic_ns()
        work = self._start(self._fragments[number], number)
        if work is None:  # the group has waited, and counts that
            self._counts.in_flight_ns += time.monotonic_ns() - begin
        self._syncs += 1
        self._counts.sent_bytes += self._fragments[number].elements * self._flat.element_size()
        self._flight = Flight(number, self._steps, work, begin)

    def _land(self) -> None:
        assert self._flight is not None
        number, step = self._flight[:2]
        self._arrive()
        self._flight = None
        began, observer = self._began[number], self._observer
        if observer is not None:
            observer.restarted() if began is None else observer.landed(self._mean_change(began))
        self._moved[number] = self._take(number, self._steps > step)
        if observer is not None:
            self._began[number] = self._now(self._fragments[number])

    def _arrive(self) -> None:
        """Waits until the mean is in ``_flat``."""
        if self._flight is not None and self._flight.work is not None:
            begin = time.monotonic_ns()
            self._flight.work.wait()
            end = time.monotonic_ns()
            self._counts.waited_ns += end - begin
            self._counts.in_flight_ns += end - self._flight.sent_ns
            self._flight = self._flight._replace(work=None)

    def _start(self, fragment: Fragment, number: int) -> Any:
        raise NotImplementedError

    def _take(self, number: int, is_late: bool) -> bool:
        """Applies the mean. Returns whether the parameters then differ between ranks."""
        raise NotImplementedError

    def _mean_change(self, began: torch.Tensor) -> torch.Tensor:
        """Of the mean that has arrived, since the parameters that the ranks began with."""
        return self._flat[: began.numel()] - began

    def _take_parameters(self) -> None:
        """Refreshes copies of the parameters, which are now equal on all ranks."""

    def _options(self) -> dict[str, Any]:
        return {"sync_every": self.sync_every}

    def _described(self) -> dict[str, Any]:
        """For traces, see recorder/facts.py."""
        numbers = {id(parameter): n for n, (_, parameter) in enumerate(self._trained)}
        width = self._flat.element_size()
        return {
            "number": self._model_group.traced_as,
            "name": self._model_group.name,
            "schedule": "local updates",
            "local_updates": {
                "sync_every": self.sync_every,
                "fragments": len(self._fragments),
                "delay": self._delay,
                "bits": getattr(self, "bits", 32),
            },
            "parameters": [name for name, _ in self._trained],
            "parameter_bytes": [parameter.numel() * width for _, parameter in self._trained],
            "buckets": [
                {
                    "gradients": [numbers[id(parameter)] for parameter in fragment.parameters],
                    "bytes": fragment.elements * width,
                    "dtype": str(self._dtype),
                }
                for fragment in self._fragments
            ],
        }

    def _content(self, what: Any) -> int:
        """A hash that ranks compare with each message, to detect that they are at different
        syncs."""
        return digest_of([f"sync {self._syncs} {what}"])

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        where = f"{self._name}, after step {self._steps} of this rank"
        try:
            yield
        except Mismatch as problem:
            raise Mismatch(
                f"{where}: {problem}. Ranks may be some steps of the optimizer apart, but all must "
                "make the same number of syncs before they leave the block"
            ) from None
        except (PeerLost, Timeout) as problem:
            raise type(problem)(
                f"{where}: {problem}. Each parameter of this rank is whole, from before the sync "
                "or from after it"
            ) from None

    def _check_parameters(self) -> None:
        now = trained_parameters(self.module, ())
        known = {id(parameter) for _, parameter in self._trained}
        new = [name for name, parameter in now if id(parameter) not in known]
        left = {id(parameter) for _, parameter in now}
        gone = [name for name, parameter in self._trained if id(parameter) not in left]
        if new or gone:
            raise Error(
                f"{self._name}: {', '.join([*new, *gone][:4])}: added, replaced, frozen or "
                "unfrozen since the block was made. Make a new one after such a change, on all "
                "ranks"
            )

    # ---- checkpoints -------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state that ``load_state_dict`` needs to continue from here, beside those of the
        module and the optimizer. It communicates with no other rank, so one rank may save it
        alone. It waits for a fragment in flight."""
        self._arrive()
        state: dict[str, Any] = {
            "steps": self._steps,
            "syncs": self._syncs,
            "moved": list(self._moved),
        }
        if self._flight is not None:
            fragment = self._fragments[self._flight.fragment]
            state["under_way"] = {
                "fragment": self._flight.fragment,
                "step": self._flight.step,
                "mean": self._flat[: fragment.elements].clone(),
            }
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved state. Call it before the block, on all ranks, with those of the
        module and the optimizer: entering the block then leaves all parameters unchanged."""
        if self._counted in in_blocks:
            raise Error(f"{self._name}: call load_state_dict() before the block, not within it")
        check_state(state, ("steps", "syncs", "moved"), self._name)
        if len(state["moved"]) != len(self._fragments):
            raise Unsupported(
                f"{self._name}: the state has fragments={len(state['moved'])}, "
                f"and this block has {len(self._fragments)}"
            )
        self._arrive()
        self._steps, self._syncs = int(state["steps"]), int(state["syncs"])
        self._moved, self._flight = list(state["moved"]), None
        if (under_way := state.get("under_way")) is not None:
            self._flight = Flight(under_way["fragment"], under_way["step"], None)
            self._flat[: under_way["mean"].numel()] = under_way["mean"]
        self._is_resumed = True
