"""``DataParallel(model, virtual_ranks=V)``: gradients whose bits do not depend on the ranks.

    model = dpcore.DataParallel(model, virtual_ranks=8)
    for batch in loader:                                  # the same batch on every rank
        optimizer.zero_grad()
        for inputs, targets in model.shards(batch):       # those of this rank
            loss(model(inputs), targets).backward()
        optimizer.step()

The batch is cut into V shards. Each is a forward and a backward of its own, with random numbers
that follow from (seed, step, shard), and its gradients are added to those of the others in one tree
(tree.py), on the rank and then over ranks. There each rank gets its part of all nodes, adds them,
and sends the root to all, so a rank with one node sends as much as in an all-reduce.
"""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dpcore import _C
from dpcore.base.machine import machine
from dpcore.comm.communicators.checks import check_integer
from dpcore.comm.communicators.native import Communicator
from dpcore.comm.communicators.protocol import check_open
from dpcore.comm.launch import threads
from dpcore.ddp.virtual_ranks.batches import cut, samples_in
from dpcore.ddp.virtual_ranks.buffers import Buffers
from dpcore.ddp.virtual_ranks.tree import Node, nodes_of, part_of, push
from dpcore.ddp.wrapper import random_numbers
from dpcore.ddp.wrapper.launch_schedule import goes_across_steps
from dpcore.ddp.wrapper.module_state import compare
from dpcore.ddp.wrapper.parameters import comes_sparse
from dpcore.errors import Error, Mismatch, PeerLost, Timeout, Unsupported

if TYPE_CHECKING:
    from dpcore.ddp.wrapper.model_group import ModelGroup
    from dpcore.ddp.wrapper.wrapped import Wrapped

Gradients = list[torch.Tensor | None]  # by the number of the parameter; None stands for zeros
_SEEDS = 2**53  # they travel as floating point numbers, exactly
_HEADER = ("step", "seed", "samples in the batch")  # of what ranks say, the same on all
_FACTS = len(_HEADER) + 1  # and how many wait at this rank's door
_ALIGNED_BYTES = 64  # as torch's own memory
_BLOCK = 2**16  # elements that are added and divided while they are in the cache
_SAME = (
    "With virtual_ranks, all ranks need the same torch, processor and number of threads "
    "(OMP_NUM_THREADS, or torch.set_num_threads() before wrapping): bits depend on them"
)


class VirtualRanks:
    """The shards of one model, on one rank: ``model.virtual``.

    ``count`` is the number of shards, ``seed`` what their random numbers begin with, and ``step``
    the number of finished loops over shards. ``state_dict()`` belongs into a checkpoint: a run that
    loads it goes on to the same bits, with any number of ranks.
    """

    def __init__(self, model: Wrapped, count: int, schedule: Any, is_warm: bool) -> None:
        self.count = check_integer(count, "virtual_ranks", 1)
        _refuse(model, schedule)
        self._kernels = _kernels()
        self.same = [f"virtual_ranks={count}", *self._kernels]  # on all ranks
        own_seed = torch.initial_seed() % _SEEDS
        seeds = compare(model.group, self.same, model.device, "kernels", _SAME, own_seed)
        self.seed, self.step = seeds[0], 0
        self.shard: int | None = None  # whose forward and backward are running
        self._is_warm = is_warm
        self._unfinished = ""  # in words: what the loop has left
        # Called with what ended the sum over ranks, if the loop is to go on without it.
        self.when_cut: Callable[[Exception], None] | None = None
        self.count_knocks: Callable[[], int] | None = None  # of ranks that want to join
        self.knocks = 0  # at the doors of all ranks, as of the last step
        self.join(model)

    def join(self, model: Wrapped) -> None:
        """Takes the model's parameters, buffers and ranks as they are now."""
        self._model = weakref.proxy(model)
        self._parameters = list(model._parameters_by_number)
        self._group: ModelGroup = model._model_group
        self._buffers = Buffers(model.module, model.parameters_to_ignore)
        self._own = part_of(self._group.rank, self._group.world_size, self.count)
        dtypes = dict.fromkeys(p.dtype for p in self._parameters)
        self._flats = [_Flat(self._group, self._parameters, dtype, self.count) for dtype in dtypes]
        self._note_places()
        self._sent_first = next(iter(nodes_of(self._own, self.count)), None)
        # The gradients of a shard take the memory of those of the shard before.
        self._warm = _C.WarmMemory() if self._is_warm else None

    # ---- the loop ----------------------------------------------------------------------------

    def shards(self, batch: Any, total: int | None) -> Iterator[Any]:
        """The shards of this rank; see ``DataParallel.shards``."""
        check_open(self._model.group)
        self.check_complete("shards() was called again")
        length = samples_in(batch) if total is None or self._own else 0
        samples = length if total is None else check_integer(total, "shards: total", 1)
        if samples < 1:
            raise ValueError(f"rank {self._group.rank}: shards(batch): the batch has no samples")
        own = [part_of(shard, self.count, samples) for shard in self._own]
        begin = own[0].start if own and total is not None else 0
        if total is not None and own and length != own[-1].stop - begin:
            raise ValueError(
                f"rank {self._group.rank}: shards(part, total={total}): the part has {length} "
                f"samples, and this rank's are {begin} to {own[-1].stop - 1}: "
                "model.virtual.part(batch)"
            )
        if torch.get_num_threads() != int(self._kernels[-1].partition("=")[2]):
            raise Mismatch(
                f"rank {self._group.rank}: torch computes with {torch.get_num_threads()} threads, "
                f"and had {self._kernels[-1]} when the model was wrapped; bits depend on it. Call "
                "torch.set_num_threads() before"
            )
        return self._loop(batch, samples, length, begin)

    def part(self, batch: Any) -> Any:
        """The samples of a batch that belong to this rank's shards. ``batch`` may be a list of
        their numbers, for a sampler that lets each rank load only its own."""
        samples = len(batch) if isinstance(batch, list | range) else samples_in(batch)
        own = [part_of(shard, self.count, samples) for shard in self._own]
        begin, end = (own[0].start, own[-1].stop) if own else (0, 0)
        return batch[begin:end] if isinstance(batch, range) else cut(batch, begin, end, samples)

    def _loop(self, batch: Any, samples: int, length: int, begin: int) -> Iterator[Any]:
        before = [parameter.grad for parameter in self._parameters]
        kept = [self._kept(gradient) for gradient in before]
        self._leave_to_holders(before)
        states = random_numbers.states()
        nodes: list[tuple[Node, Gradients]] = []
        statistics: list[torch.Tensor] = []
        self._buffers.begin_step()
        self._unfinished = f"step {self.step + 1} before its first shard"
        try:
            self._drop_gradients()
            for shard in self._own:
                its = part_of(shard, self.count, samples)
                gradients: Gradients = [None] * len(self._parameters)
                if its:
                    self.shard = shard
                    self._unfinished = f"step {self.step + 1} in shard {shard} of {self.count}"
                    random_numbers.seed_all(seed_of(self.seed, self.step, shard))
                    yield cut(batch, its.start - begin, its.stop - begin, length)
                    gradients = self._take_gradients(len(its) * self.count, samples)
                statistics.append(self._buffers.end_shard(bool(its)))
                push(nodes, (shard, shard + 1), gradients, self._add, self.count)
        finally:
            self.shard = None
            random_numbers.restore(states)
        self._unfinished = ""
        try:
            averages = self._average(nodes, statistics, samples)
        except (PeerLost, Timeout) as problem:
            if self.when_cut is None:
                raise
            self.when_cut(problem)
            return
        self._set_gradients(before, kept, averages)
        self.step += 1

    def check_forward(self) -> None:
        """A gradient of a forward outside of the loop would be this rank's own."""
        if self.shard is None and torch.is_grad_enabled():
            raise Error(
                f"rank {self._group.rank}: with virtual_ranks={self.count}, a forward with "
                "gradients belongs into `for shard in model.shards(batch):`. To evaluate, use "
                "torch.no_grad(), or model.module"
            )

    def check_complete(self, what: str) -> None:
        """Raises if the last loop over shards was left before its end. The other ranks, which wait
        for this one's sums, get the same error."""
        if not self._unfinished:
            return
        problem = (
            f"rank {self._group.rank}: {what}, and the loop over the shards of a batch has not "
            f"come to its end: it was left in {self._unfinished}. Without break, every shard "
            "needs its backward, and optimizer.step() comes after the loop; if an exception "
            "ended it, this rank cannot go on from here"
        )
        abort = getattr(self._model.group, "abort", None)
        if abort is not None and self._group.world_size > 1:
            with contextlib.suppress(Error):
                abort(problem)
        raise Error(problem)

    def _note_places(self) -> None:
        self._places = {n: place for flat in self._flats for n, place in flat.places.items()}

    def _leave_to_holders(self, before: Gradients) -> None:
        """The program may still have gradients of the last loop, besides in ``.grad``."""
        for flat in self._flats:
            if flat.is_held(sum(one is not None and flat.has(one) for one in before)):
                flat.take_new_memory()
                self._note_places()

    def _drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def _take_gradients(self, weight: int, samples: int) -> Gradients:
        gradients = [parameter.grad for parameter in self._parameters]
        found = [gradient for gradient in gradients if gradient is not None]
        if not found:
            raise Error(
                f"rank {self._group.rank}: {self._unfinished}: no parameter got a gradient. Each "
                "shard needs a forward of the model and a backward; to leave one out, give it a "
                "loss times 0"
            )
        if any(gradient.layout != torch.strided for gradient in found):
            raise Unsupported("virtual_ranks: in this version not with sparse gradients")
        self._drop_gradients()
        if weight != samples:  # its mean is over more or fewer samples than that of others
            torch._foreach_mul_(found, weight / samples)
        return gradients

    def _kept(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """One from before the loop; if the loop writes over it, a copy."""
        if gradient is None:
            return None
        is_place = any(flat.has(gradient) for flat in self._flats)
        return gradient.detach().clone() if is_place else gradient

    # ---- the sum -----------------------------------------------------------------------------

    def _add(self, left: Gradients, right: Gradients, node: Node) -> Gradients:
        """The last sum is written to where it is sent from."""
        return add(left, right, self._places if node == self._sent_first else {})

    @torch.no_grad()
    def _average(
        self,
        nodes: list[tuple[Node, Gradients]],
        statistics: list[torch.Tensor],
        samples: int,
    ) -> Gradients:
        """The root of the tree, divided by the number of shards. All ranks call it."""
        world, last = self._group.world_size, self._last_rank(samples)
        used = [any(value[i] is not None for _, value in nodes) for i in self._numbers]
        waiting = self.count_knocks() if self.count_knocks is not None else 0
        facts = torch.tensor([self.step, self.seed, samples, waiting, *used], dtype=torch.float64)
        rows = self._tell([facts, self._buffers.changed(), *statistics])
        self.knocks = int(rows[:, _FACTS - 1].sum())
        for flat in self._flats if world > 1 else ():
            flat.sum_over_ranks([value for _, value in nodes])
        left = self._left_by_shards(rows)
        flags = _FACTS + len(self._parameters)
        changed = rows[last, flags : flags + self._buffers.flags]
        self._buffers.end_step(self._group, left, changed, last)
        if world > 1:
            return self._averages(rows[:, _FACTS:flags].any(0).tolist())
        sums = nodes[0][1]
        torch._foreach_div_([one for one in sums if one is not None], self.count)
        return sums

    @property
    def _numbers(self) -> range:
        return range(len(self._parameters))

    def _last_rank(self, samples: int) -> int:
        """The rank that has the last shard with samples."""
        last = max(s for s in range(self.count) if part_of(s, self.count, samples))
        ranks = range(self._group.world_size)
        return next(r for r in ranks if last in part_of(r, len(ranks), self.count))

    def _tell(self, mine: Sequence[torch.Tensor]) -> torch.Tensor:
        """What each rank says of its step, a row for each; zeros end the shorter ones."""
        group, row = self._group, torch.cat(list(mine))
        if group.world_size == 1:
            return row.view(1, -1)
        shards = [len(part_of(r, group.world_size, self.count)) for r in range(group.world_size)]
        head = len(row) - len(self._own) * self._buffers.length
        longest = head + max(shards) * self._buffers.length
        sent = torch.zeros(longest, dtype=torch.float64)
        sent[: len(row)] = row
        rows = sent.new_empty(group.world_size * longest)
        group.all_gather(rows, sent)
        rows = rows.view(group.world_size, longest)
        for at, name in enumerate(_HEADER):
            said = rows[:, at].tolist()
            if len(set(said)) > 1:
                odd = next(rank for rank, value in enumerate(said) if value != said[0])
                raise Mismatch(
                    f"rank {group.rank}: ranks disagree about their batch: {name} is "
                    f"{said[0]:.0f} on rank 0 and {said[odd]:.0f} on rank {odd}. Every rank "
                    "passes the same batch to model.shards(), or its part of it with the same total"
                )
        return rows

    def _left_by_shards(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """The running statistics that each shard has left, in the order of shards."""
        world, length = self._group.world_size, self._buffers.length
        head = _FACTS + len(self._parameters) + self._buffers.flags
        return [
            rows[rank, head + at * length : head + (at + 1) * length]
            for rank in range(world)
            for at in range(len(part_of(rank, world, self.count)))
        ]

    def _averages(self, used: list[bool]) -> Gradients:
        """Where they were received, or in a layout like the parameter's."""
        averages: Gradients = []
        for number, parameter in enumerate(self._parameters):
            place = self._places[number].view(parameter.shape)  # a new one: holders can be counted
            if not parameter.is_contiguous():
                place = torch.empty_like(parameter).copy_(place)
            averages.append(place if used[number] else None)
        return averages

    @torch.no_grad()
    def _set_gradients(self, before: Gradients, kept: Gradients, averages: Gradients) -> None:
        rows = zip(self._parameters, before, kept, averages, strict=True)
        for parameter, old, value, average in rows:
            if old is not None and value is not None and average is not None:
                # As autograd does for a gradient that was not zeroed: into its memory.
                total = old.add_(average) if value is old else average.add_(value)
                average = old if total.data_ptr() == old.data_ptr() else old.copy_(total)
            parameter.grad = average if average is not None else old

    # ---- checkpoints -------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What a run needs to go on to the same bits, besides the model and the optimizer."""
        return {
            "virtual_ranks": self.count,
            "seed": self.seed,
            "step": self.step,
            "kernels": list(self._kernels),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what ``state_dict()`` has returned, with any number of ranks."""
        here = self.state_dict()
        for name in ("virtual_ranks", "kernels"):
            if state[name] != here[name]:
                raise Mismatch(
                    f"rank {self._group.rank}: the checkpoint has {name}={state[name]}, and this "
                    f"run {here[name]}, so it would not go on to the same bits. To go on with "
                    "others, set model.virtual.seed and model.virtual.step"
                )
        self.seed, self.step = state["seed"], state["step"]

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the model joins its ranks anew."""
        left_out = ("_model", "_parameters", "_group", "_buffers", "_flats", "_places", "_warm")
        kept = {name: value for name, value in vars(self).items() if name not in left_out}
        return {**kept, "when_cut": None, "count_knocks": None}


def seed_of(seed: int, step: int, shard: int) -> int:
    """The seed of a shard's random numbers, of 64 bits.

    >>> seed_of(0, 0, 1) == seed_of(0, 0, 1) != seed_of(0, 1, 0)
    True
    """
    digest = hashlib.blake2b(f"{seed} {step} {shard}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


@torch.no_grad()
def add(left: Gradients, right: Gradients, places: Mapping[int, torch.Tensor]) -> Gradients:
    """The sum, by the number of the parameter: in its place, or else in memory of the two. What is
    missing stands for zeros, also for the sign of a zero: another rank may have sent zeros in its
    place."""
    sums: Gradients = []
    for number, (one, other) in enumerate(zip(left, right, strict=True)):
        there = other if one is None else one
        if there is not None:
            added = 0.0 if one is None or other is None else other
            there = torch.add(there, added, out=places.get(number, there))
        sums.append(there)
    return sums


class _Flat:
    """The gradients of one type, side by side, on their way between ranks."""

    def __init__(
        self,
        group: ModelGroup,
        parameters: Sequence[torch.Tensor],
        dtype: torch.dtype,
        shards: int,
    ) -> None:
        self._numbers = [n for n, parameter in enumerate(parameters) if parameter.dtype == dtype]
        self._group, self._shards, world = group, shards, group.world_size
        # The nodes of each rank: in round i, ranks send their node number i.
        self._nodes = [nodes_of(part_of(rank, world, shards), shards) for rank in range(world)]
        self.places: dict[int, torch.Tensor] = {}  # by numbers of parameters
        if world == 1:
            return
        # How kernels add may depend on where their operands begin: on one rank, so do torch's own.
        each = _ALIGNED_BYTES // dtype.itemsize
        counts = [-(-parameters[number].numel() // each) * each for number in self._numbers]
        counts.append(-sum(counts) % (world * each))  # the parts of ranks are equal
        self._counts, self._part = counts, sum(counts) // world
        self._shapes = [parameters[number].shape for number in self._numbers]
        self._dtype, self._device = dtype, parameters[0].device
        self.take_new_memory()
        # If every rank has one node, they swap in place; else each round has memory of its own.
        self._swaps = all(len(of_rank) == 1 for of_rank in self._nodes)
        rounds = range(0 if self._swaps else max(map(len, self._nodes)))
        sizes = [self._part * sum(self._senders(turn)) for turn in rounds]
        self._received = [group.flat(n, dtype, parameters[0].device) for n in sizes]

    def take_new_memory(self) -> None:
        """What holds the memory of before keeps it."""
        self._memory = self._group.flat(sum(self._counts), self._dtype, self._device).zero_()
        pieces = torch.split(self._memory, self._counts)
        for number, shape, piece in zip(self._numbers, self._shapes, pieces, strict=False):
            self.places[number] = piece[: shape.numel()].view(shape)
        del pieces, piece
        self._own_uses = self._uses()

    def _uses(self) -> int:
        """How many tensors share the memory, and the object that is asked."""
        return int(torch._C._storage_Use_Count(self._memory.untyped_storage()._cdata))

    def is_held(self, known: int) -> bool:
        """Whether anything but the places and so many gradients holds the memory that is sent."""
        return bool(self.places) and self._uses() > self._own_uses + known

    def _senders(self, turn: int) -> list[bool]:
        return [len(of_rank) > turn for of_rank in self._nodes]

    def has(self, gradient: torch.Tensor) -> bool:
        """Whether it lies in the memory that is sent."""
        if not self.places:
            return False
        own = self._memory.untyped_storage()
        return gradient.untyped_storage().data_ptr() == own.data_ptr()

    def sum_over_ranks(self, nodes: Sequence[Gradients]) -> None:
        """Adds the nodes of all ranks. Afterwards the places have the root's average."""
        group, part = self._group, self._part
        parts: dict[Node, torch.Tensor] = {}
        if self._swaps:
            self._bring(nodes[0])
            group.all_to_all(self._memory, self._memory)
            of_ranks = [node for [node] in self._nodes]
            parts.update(zip(of_ranks, torch.split(self._memory, part), strict=True))
        for turn, received in enumerate(self._received):
            sends = turn < len(nodes)
            if sends:
                self._bring(nodes[turn])
            group.all_to_all(
                received,
                self._memory if sends else self._memory[:0],
                input_sizes=[part * sends] * group.world_size,
                output_sizes=[part * sender for sender in self._senders(turn)],
            )
            of_ranks = [of_rank[turn] for of_rank in self._nodes if len(of_rank) > turn]
            parts.update(zip(of_ranks, torch.split(received, part), strict=True))
        place = torch.split(self._memory, part)[group.rank]
        in_order = [torch.split(parts[node], _BLOCK) for node in sorted(parts)]
        for average, *blocks in zip(torch.split(place, _BLOCK), *in_order, strict=True):
            tree: list[tuple[Node, torch.Tensor]] = []
            for node, block in zip(sorted(parts), blocks, strict=True):
                push(tree, node, block, lambda left, right, _: left.add_(right), self._shards)
            torch.div(tree[0][1], self._shards, out=average)
        group.all_gather(self._memory, place)

    def _bring(self, gradients: Gradients) -> None:
        for number, place in self.places.items():
            gradient = gradients[number]
            if gradient is None:
                place.zero_()
            else:
                place.copy_(gradient)


def _kernels() -> list[str]:
    """What decides how kernels add, besides the shapes. The last line is about threads."""
    return [
        f"torch={torch.__version__}",
        f"processor={machine()['processor']}",
        f"capability={torch.backends.cpu.get_cpu_capability()}",
        f"mkldnn={torch.backends.mkldnn.enabled}",
        f"float32_matmul_precision={torch.get_float32_matmul_precision()}",
        f"deterministic_algorithms={torch.are_deterministic_algorithms_enabled()}",
        f"threads={torch.get_num_threads()}",
    ]


def _refuse(model: Wrapped, schedule: Any) -> None:
    module, trained = model.module, model._parameters_by_number
    group: Any = model.group
    transport = getattr(group, "transport", "")
    refused = {
        f"a model on {model.device_type}": model.device_type != "cpu",
        f"a communicator of the kind {model.backend!r}": type(group) is not Communicator,
        "ranks that are threads, which share their random numbers": transport == "inproc"
        and group.world_size > 1,
        "a schedule: nothing is sent before the last shard": schedule != "auto"
        or goes_across_steps(model._first_steps.schedule),
        "mixed_precision= (torch.autocast works)": model.mixed_precision is not None,
        "static_graph": model.static_graph,
        "delayed gradients": model._delayed is not None,
        "sparse gradients": any(comes_sparse(module, trained)),
        "SyncBatchNorm (each shard has its own statistics)": any(
            isinstance(part, torch.nn.SyncBatchNorm) for part in module.modules()
        ),
        "optimizers that step in backward": any(
            hasattr(parameter, "_in_backward_optimizers") for parameter in trained
        ),
    }
    for what, is_there in refused.items():
        if is_there:
            raise Unsupported(f"virtual_ranks: in this version not with {what}")
    if not threads.are_chosen():
        raise Unsupported(
            f"virtual_ranks: torch computes with {torch.get_num_threads()} threads because of the "
            "processors of this host and the ranks on it, and how kernels add depends on that. Say "
            "how many, the same for every number of ranks: OMP_NUM_THREADS in the environment, or "
            "torch.set_num_threads(1) before wrapping the model"
        )
