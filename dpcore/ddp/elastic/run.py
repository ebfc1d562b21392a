"""``dp.elastic``: a training loop that goes on, in the same processes, when ranks die.

    with dp.elastic(model, optimizer, sampler, scheduler) as run:
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for inputs, targets in run.batches(loader):
                optimizer.zero_grad()
                loss(model(inputs), targets).backward()
                optimizer.step()
                scheduler.step()

A loop cannot be told to take a batch again from within its body. So when communication fails in
forward or backward, the step is *cut*: forward and backward end without averages, ``step()`` of the
optimizer does nothing, and the body goes on to its end. Then, where the loop asks for the next
batch, the ranks that live get a new communicator (``Communicator.shrink``) and compare how many
steps they have finished. There are at most two numbers, n and n + 1, since a step needs a gradient
of every rank:

* Some have finished the cut step: they send parameters and the optimizer's state to the others.
  What those have of their own, buffers and random numbers, is as after the step, since their
  gradients could not be part of it before their forward and backward were over.
* None has: all go back to what it began with, and the samples that are left are dealt out anew.

A death at any point of this leads to the next communicator and to the same comparison. A rank takes
over a state only when all of it is there.

A rank that joins knocks at a door (dpcore/comm/launch/door.py) when its model is made. The word of
each step says how many wait (csrc/reducer/backward/step_words.h), so all ranks know it after the
same step, make a communicator with places for them (``Communicator._grow``), and give them the
state by the same comparison: a joiner has finished no step. If it dies, the others go on without.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from dpcore._version import __version__
from dpcore.comm.communicators.native import Communicator
from dpcore.comm.launch import session
from dpcore.comm.launch.door import Door, Place, knock
from dpcore.ddp.check import check
from dpcore.ddp.data_parallel import DataParallel
from dpcore.ddp.elastic.progress import teller
from dpcore.ddp.elastic.shares import Shares
from dpcore.ddp.elastic.start import Start, packed, unpack
from dpcore.ddp.mistakes.observer import in_blocks
from dpcore.ddp.wrapper.parameters import comes_sparse, trained_parameters
from dpcore.ddp.wrapper.random_numbers import without_random_numbers
from dpcore.errors import Error, PeerLost, RendezvousError, Timeout, Unsupported

_log = logging.getLogger("dpcore")
_Batch = TypeVar("_Batch")
_END: Any = object()
# Until a rank without state takes it that the others went on without it, and knocks again.
_JOINER_SECONDS = 2.0


class ElasticRun:
    """Made by ``dp.elastic``; used as a block."""

    def __init__(
        self,
        model: DataParallel,
        optimizer: torch.optim.Optimizer,
        sampler: Any,
        more: tuple[Any, ...],
        timeout: float,
        door: Any,
    ) -> None:
        _check(model, optimizer, more)
        if model._virtual is not None and model._virtual not in more:
            more = (*more, model._virtual)
        self._model, self._optimizer, self._more = model, optimizer, more
        self._timeout = timeout
        self.comm: Communicator = model.group  # type: ignore[assignment]
        """The communicator of the ranks that live."""
        self.ranks: tuple[int, ...] = tuple(range(self.comm.world_size))
        """Their numbers: those that they had at the start, or got when they joined."""
        self.step: int = 0
        """How many steps are finished."""
        self._number, self._next_number = self.comm.rank, self.comm.world_size  # in `ranks`
        self._shares = Shares(sampler)
        self._deal()
        self._start = Start(model.module, optimizer, more)
        self._problem: Exception | None = None  # that ended a forward
        # Of the step whose batch the loop has.
        self._is_open = self._has_computed = self._has_stepped = False
        self._scalers = [one for one in more if isinstance(one, torch.amp.GradScaler)]
        self._scales: list[float] = []  # of these, as the batch began
        self._repeats = False  # it was cut, and no rank is known to have finished it
        self._epochs = 0  # that have ended
        self._agreed = 0  # all ranks are known to have finished this many steps
        door = os.environ.get("DPCORE_DOOR") if door is None else door
        self._place = None if door is None else Place(door)
        self._door: Door | None = None
        self._joins = self.comm._joins_with is not None
        self._epochs_before = 0  # that ended before this rank joined, and its loop comes to
        self._used_before = 0  # samples, in the epoch that ran then
        if self._joins and self._place is None:
            raise Unsupported("a rank that joins needs dp.elastic(..., door=), as the others have")
        has_words = model._mistakes.is_on or model._virtual is not None
        if self._place is not None and not has_words:
            raise Unsupported(
                "dp.elastic(door=) tells the ranks of a joiner by the word of each step, which "
                "mistakes='ignore' (DPCORE_MISTAKES) turns off"
            )
        self._tell = teller()
        _warn_of_launcher()
        self._optimizers_step: Any = None
        self._hook: Any = None

    def __enter__(self) -> ElasticRun:
        self._optimizers_step = self._optimizer.step
        if self._model._virtual is not None:
            self._model._virtual.when_cut = self._cut
            self._model._virtual.count_knocks = self._count_knocks
        self._model.forward = self._forward  # type: ignore[method-assign]
        step = _step_of(self)
        vars(step).update(vars(self._optimizers_step))  # the mark that a scheduler looks for
        self._optimizer.step = MethodType(step, self._optimizer)  # type: ignore[method-assign]
        self._hook = register_optimizer_step_pre_hook(self._before_step)
        if self._place is not None:
            self._door = Door(self._place, self._facts())
            try:
                if self._joins:
                    self._join()
                self._door.open(self.comm)
            except BaseException:
                self._undo()
                raise
        return self

    def __exit__(self, kind: Any, problem: Any, traceback: Any) -> None:
        try:
            if kind is None:
                self._settle()
        finally:
            self._undo()

    def _undo(self) -> None:
        if self._door is not None:
            self._door.close()
        self._hook.remove()
        if self._model._virtual is not None:
            self._model._virtual.when_cut = self._model._virtual.count_knocks = None
        del self._model.forward
        self._model._reducer.cut_instead_of_raising(False)
        self._optimizer.step = self._optimizers_step  # type: ignore[method-assign]

    def batches(self, loader: DataLoader[_Batch]) -> Iterator[_Batch]:
        """The batches of this rank in one epoch of the sampler. Each takes one step of the
        optimizer. A batch whose step was cut comes again, or others in its place. On a rank that
        has joined, the epochs that had ended have none."""
        if self._epochs_before > 0:
            self._epochs_before -= 1
            return
        self._settle()
        self._check_schedulers()
        epoch = self._epochs
        self._shares.begin_epoch(loader)
        if joins := self._joins:
            self._joins = False
            self._shares.go_on_after(self._used_before)
            self._start.restore()  # the loop may have changed schedulers in epochs without batches
        try:
            with without_random_numbers() if joins else contextlib.nullcontext():
                iterator = iter(loader)
            while epoch == self._epochs:
                self._start.take()
                batch = next(iterator, _END)
                if batch is _END:
                    self._epochs += 1
                    self._settle()
                    return
                self._is_open, self._has_computed, self._has_stepped = True, False, False
                self._scales = [scaler.get_scale() for scaler in self._scalers]
                yield batch
                if self._end_step():
                    with without_random_numbers():
                        iterator = iter(loader)
        finally:
            self._shares.end_epoch(loader)

    @property
    def number(self) -> int:
        """The one in ``ranks`` that is this rank's."""
        return self._number

    # ---- in the body of the loop -------------------------------------------------------------

    @property
    def _is_cut(self) -> bool:
        return self._problem is not None or self._model._reducer.is_cut

    def _cut(self, problem: Exception) -> None:
        """The sum over ranks has failed, after a rank's shards."""
        if not self._is_open:
            raise problem
        self._problem = problem

    def _forward(self, *inputs: Any, **named: Any) -> Any:
        """In the place of the model's."""
        model = self._model
        self._has_computed |= torch.is_grad_enabled()
        if self._is_open and model._virtual is None:
            model._reducer.say_knocks(self._count_knocks())
        model._reducer.cut_instead_of_raising(self._is_open)
        if not self._is_cut:
            try:
                return type(model).forward(model, *inputs, **named)
            except (PeerLost, Timeout) as problem:
                if not self._is_open:
                    raise
                self._problem = problem
        return model._run(False, inputs, named)

    def _step_optimizer(self, *closure: Any, **named: Any) -> Any:
        if not self._is_open:
            return self._optimizers_step(*closure, **named)
        if closure or named:
            raise Unsupported("within dp.elastic, optimizer.step() takes no closure")
        if self._has_stepped:
            raise Unsupported(
                "within dp.elastic, a batch takes one step of the optimizer, and this is a second"
            )
        if not self._is_cut:
            self._optimizers_step()
            self._has_stepped = True
        return None

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._is_open or optimizer is self._optimizer:
            return
        mine = {id(parameter) for parameter in self._model._parameters_by_number}
        if any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
            raise Unsupported(
                "another optimizer than that of dp.elastic trains parameters of the model; one "
                "for all of them may have several param_groups"
            )

    # ---- between two batches -----------------------------------------------------------------

    def _end_step(self) -> bool:
        """The body of the loop is over. Returns whether ranks were lost, or have joined."""
        self._is_open = False
        if self._has_computed and not (self._is_cut or self._has_stepped):
            self._has_stepped = self._is_left_out()
        if self._has_stepped:
            self._finish_step()
            self._say("step")
        elif not self._is_cut and self._has_computed:
            raise Unsupported(
                f"rank {self.comm.rank}: a batch ended without optimizer.step(). Within dp.elastic "
                "each batch takes one step; to accumulate gradients, cut larger batches into "
                "pieces in the body of the loop"
            )
        if self._is_cut:
            self._repeats = not self._has_stepped
            self._recover()
            return True
        if self._door is not None and self._has_stepped and (guests := self._guests()):
            self._recover(guests)
            return True
        return False

    def _is_left_out(self) -> bool:
        """Whether a scaler has seen an overflow, and lowered its scale in the place of a step: on
        all ranks, since they have the same averages."""
        scales = zip(self._scalers, self._scales, strict=True)
        return any(scaler.get_scale() < before for scaler, before in scales)

    def _say(self, what: str) -> None:
        if self._tell is not None:
            self._tell(what, step=self.step, ranks=self.ranks, number=self._number)

    def _count_knocks(self) -> int:
        """At the door of this rank, which it may have to open, since it may be another's turn."""
        if self._door is None:
            return 0
        self._door.open(self.comm)
        return self._door.count()

    def _guests(self) -> int:
        """How many ranks are to join after this step: alike on all ranks."""
        assert self._door is not None
        if self.comm.world_size == 1:
            return self._door.count()
        virtual = self._model._virtual
        return self._model._reducer.knocks if virtual is None else virtual.knocks

    def _settle(self) -> None:
        """Where the loop is left: no rank leaves before all have finished the last step."""
        if self._is_open and self._end_step() and self._repeats:
            raise PeerLost(
                f"rank {self.comm.rank}: a rank was lost in step {self.step + 1}, which no rank "
                "has finished, and the program left the loop in that step, so it cannot be "
                f"repeated. All ranks have the state after step {self.step}"
            )
        if self._agreed != self.step:
            try:
                self.comm.barrier()
                self._agreed = self.step
            except (PeerLost, Timeout) as problem:
                self._problem = problem
                self._recover()

    def _finish_step(self) -> None:
        self.step += 1
        self._repeats = False
        self._shares.use()

    def _recover(self, guests: int = 0) -> None:
        """Until the ranks that live, and those that join, have agreed; or too few are left."""
        before, is_repeated = self.ranks, False
        while True:
            try:
                if guests:
                    self.comm = self.comm._grow(guests, self._door, self._timeout)
                else:
                    patience = _JOINER_SECONDS if self.step < 0 else self._timeout
                    self.comm = self.comm.shrink(patience)
            except Error as problem:
                raise problem from self._problem
            guests = 0
            try:
                self._catch_up()
                is_repeated = self._repeats
                break
            except (PeerLost, Timeout) as problem:
                self._problem = problem
        self._problem = None
        if self._door is not None:
            self._door.let_in()
            self._door.open(self.comm)
        if self.comm.rank == 0:
            if is_repeated:
                self._say("again")
            for what, ranks, others in (
                ("lost", before, self.ranks),
                ("joined", self.ranks, before),
            ):
                if named := [str(rank) for rank in ranks if rank not in others]:
                    _log.warning(
                        "rank %s %s; ranks %s go on after step %d",
                        ", ".join(named), what, ", ".join(map(str, self.ranks)), self.step,
                    )  # fmt: skip

    def _catch_up(self) -> None:
        """Brings all ranks of a new communicator to the same step, and the model to it."""
        comm, model = self.comm, self._model
        mine = (self.step, self._epochs, self._shares.used, self._number, self._next_number)
        facts = torch.empty(len(mine) * comm.world_size, dtype=torch.int64)
        comm.all_gather(facts, torch.tensor(mine))
        steps, epochs, used, numbers, nexts = facts.view(-1, len(mine)).t().tolist()
        last = max(steps)
        if last < 0:
            raise Error(f"rank {comm.rank}: no rank that lives has the state of the job")
        comm._native.let_go_of_before()  # all have come
        behind = [rank for rank, step in enumerate(steps) if step < last]
        giver, self._next_number = steps.index(last), max(nexts)
        for rank, number in enumerate(numbers):
            if number < 0:
                numbers[rank], self._next_number = self._next_number, self._next_number + 1
        if self._repeats and self.step == last:
            self._start.restore()
        if comm.rank == giver and behind:
            self._give(behind)
        elif comm.rank in behind:
            joins = self.step < 0
            self._take(giver, numbers[comm.rank] if joins else None)
            if joins:
                self.step, self._number = last, numbers[comm.rank]
                self._epochs_before, self._used_before = epochs[giver], used[giver]
                self._shares.go_on_after(used[giver])
                self._start.take()
            else:
                self._finish_step()
        self.ranks = tuple(numbers)
        self._epochs, self._agreed = max(epochs), last
        self._rebind()
        if behind:
            check(model, self._optimizer, comm=comm).raise_if_different()

    def _give(self, takers: list[int]) -> None:
        model, buffers = self._model, dict(self._model.module.named_buffers())
        parts = (model._module_parameters, buffers, self._optimizer, self._more)
        sent = packed(*parts, model._caps)
        for taker in takers:
            self.comm.send(torch.tensor([len(sent)]), taker)
            self.comm.send(sent, taker)

    def _take(self, giver: int, joins_as: int | None) -> None:
        size = torch.empty(1, dtype=torch.int64)
        self.comm.recv(size, giver)
        sent = torch.empty(int(size), dtype=torch.uint8)
        self.comm.recv(sent, giver)
        model, buffers = self._model, {}
        if joins_as is not None:
            buffers = dict(model.module.named_buffers())
        elif model._virtual is not None:  # a rank's buffers are not its own
            buffers = model._buffers_by_name()
        parts = (model._module_parameters, buffers, self._optimizer, self._more)
        model._caps = unpack(sent, *parts, joins_as)

    # ---- ranks that join ---------------------------------------------------------------------

    def _facts(self) -> list[str]:
        """What a rank that joins has to have alike."""
        module, sampler = self._model.module, self._shares.sampler
        return [
            f"dpcore {__version__}",
            *(
                f"the parameter {name} {list(one.shape)} {one.dtype}"
                f"{'' if one.requires_grad else ', which is not trained'}"
                for name, one in module.named_parameters()
            ),
            *(f"the buffer {name} {list(one.shape)}" for name, one in module.named_buffers()),
            f"{type(self._optimizer).__name__} with {len(self._optimizer.param_groups)} groups",
            *(f"{type(one).__name__} in dp.elastic" for one in self._more),
            *(self._model._virtual.same if self._model._virtual is not None else ()),
            f"a data set of {len(sampler.dataset)} samples",  # type: ignore[arg-type]
            f"a sampler with shuffle={sampler.shuffle}, seed={sampler.seed}, "
            f"drop_last={sampler.drop_last}",
        ]

    def _join(self) -> None:
        """Until this rank is one of the job's, with its state."""
        assert self._place is not None
        self.step = self._number = -1
        alone, patience = self.comm, self._timeout or self.comm._native.timeout
        while self.step < 0:
            invitation = knock(self._place, self._facts(), patience)
            try:
                self.comm = invitation.accept(alone._joins_with or {})
            except RendezvousError as problem:
                _log.info("%s; knocking again", problem)
                continue
            finally:
                invitation.close()
            try:
                self._catch_up()
            except (PeerLost, Timeout) as problem:
                self._problem = problem
                try:
                    self._recover()
                except PeerLost:  # the others have gone on without this meeting
                    self.comm.close()
        self._problem = None
        session.replace(alone, self.comm)

    def _rebind(self) -> None:
        """The model averages over the new communicator, in buckets of its own."""
        model = self._model
        for parameter in model._module_parameters:
            parameter.grad = None  # a part of a bucket that other ranks may still reach
        model._join_group(self.comm, None)
        model._set_up(trained_parameters(model.module, model.parameters_to_ignore))
        self._deal()

    def _deal(self) -> None:
        """With virtual ranks every rank has the whole batch, and takes its shards of it."""
        is_whole = self._model.virtual_ranks is not None
        place = (0, 1) if is_whole else (self.comm.rank, self.comm.world_size)
        self._shares.deal(*place)

    def _check_schedulers(self) -> None:
        steps = (self._optimizer.step, self._optimizers_step)
        known = any(getattr(one, "optimizer", None) is self._optimizer for one in self._more)
        if not known and any(hasattr(step, "_wrapped_by_lr_sched") for step in steps):
            raise Unsupported(
                "a learning rate scheduler steps with this optimizer, and dp.elastic has to know "
                "it, to repeat a step: dp.elastic(model, optimizer, sampler, scheduler)"
            )


def elastic(
    model: DataParallel,
    optimizer: torch.optim.Optimizer,
    sampler: Any,
    *more: Any,
    timeout: float = 0.0,
    door: Any = None,
) -> ElasticRun:
    """A block in which a loop over ``run.batches(loader)`` goes on when ranks die, and others join.

    ``model`` is a ``DataParallel`` over dpcore's communicator, ``optimizer`` trains it, and
    ``sampler`` is the ``DistributedSampler`` of the loader. ``more``: whatever else a step changes
    and has a ``state_dict()``, such as a scheduler. ``timeout``: how long to wait for ranks that
    are not known to be dead, as for ``Communicator.shrink``. ``door``: where ranks that join
    knock, alike on all: ``"tcp://host:port"``, ``"file:///path"``, a store of torch, or any other
    text for ranks of this host; None is what DPCORE_DOOR says. A rank joins by
    ``dpcore.init(join=True)`` and the same block.

    Of the run, ``step`` is the number of finished steps, ``comm`` the communicator of the ranks
    that live, and ``ranks`` has their numbers in the first one, where those that joined come
    behind. docs/failures.md says what
    is promised.

    >>> import torch, dpcore
    >>> comm = dpcore.init(rank=0, world_size=1)
    >>> data = torch.utils.data.TensorDataset(torch.ones(6, 2))
    >>> sampler = torch.utils.data.DistributedSampler(data, comm.world_size, comm.rank)
    >>> loader = torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler)
    >>> model = dpcore.DataParallel(torch.nn.Linear(2, 1))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with dpcore.elastic(model, optimizer, sampler) as run:
    ...     for (inputs,) in run.batches(loader):
    ...         optimizer.zero_grad()
    ...         model(inputs).mean().backward()
    ...         optimizer.step()
    >>> run.step
    3
    >>> dpcore.finalize()
    """
    return ElasticRun(model, optimizer, sampler, more, timeout, door)


def _step_of(run: ElasticRun) -> Any:
    """A function that can be a method of the optimizer, as schedulers expect."""

    def step(_: torch.optim.Optimizer, *closure: Any, **named: Any) -> Any:
        return run._step_optimizer(*closure, **named)

    return step


def _warn_of_launcher() -> None:
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("LOCAL_WORLD_SIZE", "1") != "1":
        _log.warning(
            "torchrun ends the other ranks of a host when one dies: start one torchrun per rank, "
            "or the ranks by themselves (docs/failures.md)"
        )


def _check(model: Any, optimizer: Any, more: tuple[Any, ...]) -> None:
    if not isinstance(model, DataParallel):
        raise TypeError(f"dp.elastic: expected a dpcore.DataParallel, not {type(model).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"dp.elastic: expected an optimizer of torch, not {optimizer!r}")
    for one in more:
        if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
            raise TypeError(f"dp.elastic: {type(one).__name__} has no state_dict()")
    module, trained = model.module, model._parameters_by_number
    refused = {
        f"schedule {model.schedule!r}, whose steps end under the next forward or in the "
        "optimizer's step": model._across is not None or model._reducer.wants_optimizer,
        f"a communicator of the kind {model.backend!r} over {getattr(model.group, 'transport', '')}"
        ", which cannot go on without a rank": type(model.group) is not Communicator
        or model.group.transport == "inproc",
        "communication hooks, and optimizers that step in backward": bool(model._comm_hooks)
        or any(hasattr(parameter, "_in_backward_optimizers") for parameter in trained),
        "delayed gradients": model._delayed is not None,
        "sparse gradients": any(comes_sparse(module, trained)),
        "SyncBatchNorm": any(isinstance(part, nn.SyncBatchNorm) for part in module.modules()),
        f"{type(optimizer).__name__}, whose step communicates": hasattr(optimizer, "records_steps")
        or hasattr(optimizer, "consolidate_state_dict"),
        "LocalSGD and DiLoCo": optimizer in in_blocks,
    }
    for what, is_there in refused.items():
        if is_there:
            raise Unsupported(f"dp.elastic: in this version not with {what}")
