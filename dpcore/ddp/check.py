"""``dpcore.check``: whether ranks are still equal, bit by bit, and if not, where they first differ.

    dpcore.check(model, optimizer, ema).raise_if_different()

Each rank lists what it has (mistakes/contents.py) and hashes every value. A first gather compares
the lists and one hash over all values: while ranks are equal that is all they send, less than 100
bytes each. If they differ, they gather the hashes of all values, and of the first one that differs
the value itself.

``DPCORE_CHECK_EVERY=100`` runs the same check before every 100th synchronised forward of a model.
"""

from __future__ import annotations

import os
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from dpcore.comm.communicators.protocol import GradientGroup
from dpcore.comm.communicators.read_back import numbers_in, on_host
from dpcore.ddp.mistakes.comparisons import majority
from dpcore.ddp.mistakes.contents import (
    Contents,
    Entry,
    bytes_of,
    digest_of_value,
    random_states,
)
from dpcore.ddp.wrapper.gradient_group import choose_group
from dpcore.ddp.wrapper.module_state import digest_of, gather_facts, text_of
from dpcore.errors import Mismatch, Unsupported

_MOST_BYTES = 64 << 20  # a value up to this size is sent to count the elements that differ
_TEXT_BYTES = 160
_MORE = 4  # differences in a report, after the first
_MOST_RANKS = 8  # that are named
_ADVICE = (
    "Look for what changes it on that rank only: an edit in place, weights or a state loaded after "
    "wrapping, a step that the rank skips, another learning rate. More calls of "
    "dpcore.check(model, optimizer) in between narrow it down"
)


class Difference(NamedTuple):
    """A value that is not the same on all ranks."""

    name: str
    ranks: tuple[int, ...]  # those in the minority; of halves, the one without the lowest rank
    text: str
    section: str  # such as "parameters"

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class CheckResult:
    """The result of ``check``. It is true if ranks are equal, and prints as a short report."""

    differences: tuple[Difference, ...]
    """The first has the most to say."""
    notes: tuple[str, ...]
    """What differs in right programs as well, what was left out, and notes about mistakes."""
    when: str
    """Such as "after step 400", or "at check 2" of what counts no steps."""
    compared: str
    """What was compared, and how long it took."""
    rank: int

    @property
    def ok(self) -> bool:
        """Whether ranks are equal."""
        return not self.differences

    def __bool__(self) -> bool:
        return self.ok

    def raise_if_different(self) -> CheckResult:
        """Raises ``Mismatch``, on all ranks, if they differ; else returns the result."""
        if self.differences:
            more = len(self.differences) - 1
            also = f" ({more} more {'differs' if more == 1 else 'differ'})" if more else ""
            raise Mismatch(f"rank {self.rank}, {self.when}: {self.differences[0]}{also}. {_ADVICE}")
        return self

    def __str__(self) -> str:
        if self.ok:
            lines = [f"{self.when}: all equal: {self.compared}"]
        else:
            shown = self.differences[: 1 + _MORE]
            lines = [f"{self.when}: ranks differ: {shown[0]}"]
            lines += [f"  also: {one}" for one in shown[1:]]
            if more := len(self.differences) - len(shown):
                lines.append(f"  and {more} more")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    __repr__ = __str__


class _Memory:
    """What earlier checks of the same thing have found."""

    def __init__(self) -> None:
        self.checks = 0
        self.equal: dict[str, str] = {}  # when each section was equal last


# By the reducer of a wrapped model, else by the first thing of a check.
_memories: weakref.WeakKeyDictionary[Any, _Memory] = weakref.WeakKeyDictionary()


@torch.no_grad()
def check(model: Any, *more: Any, comm: Any = None) -> CheckResult:
    """Compares what ranks have, bit by bit. All ranks call it, with the same things.

    ``model`` and ``more`` are modules, wrapped or not, optimizers (hyperparameters and state),
    tensors, state dictionaries, or objects with ``state_dict()``, such as a scheduler or an average
    of the model. ``comm``: the ranks to compare, as for ``DataParallel``; by default those of the
    first wrapped model, else those that ``DataParallel`` would take.

    States that differ by design are left out, and said to be: of ``ZeroRedundancyOptimizer`` and of
    a ``DistributedOptimizer`` whose ranks keep parts. States of random number generators and
    statistics of batch normalisation are notes.

    >>> import torch, dpcore
    >>> comm = dpcore.init(rank=0, world_size=1)
    >>> model = dpcore.DataParallel(torch.nn.Linear(2, 1))
    >>> bool(dpcore.check(model)), dpcore.check(model).differences
    (True, ())
    >>> dpcore.finalize()
    """
    begin = time.perf_counter()
    things = (model, *more)
    wrapped: list[Any] = [one for one in things if hasattr(one, "_model_group")]
    for one in wrapped:
        one.flush()
    contents = Contents(things)
    tensors = [entry.value for entry in contents.entries if isinstance(entry.value, torch.Tensor)]
    device = wrapped[0].device if wrapped else tensors[0].device if tensors else torch.device("cpu")
    is_of_model = wrapped and comm is None
    group: Any = wrapped[0]._model_group if is_of_model else choose_group(comm, None, device)
    comparison = _Comparison(group, device, contents.entries)
    memory, when = _memory_of(wrapped[0] if wrapped else model)
    comparison.run(wrapped[0]._reducer.completed if wrapped else 0, memory.equal, when)
    notes = [*contents.notes, *comparison.notes]
    for one in wrapped:
        notes += one._mistakes.notes
    world, seconds = group.world_size, time.perf_counter() - begin
    return CheckResult(
        tuple(comparison.differences),
        tuple(dict.fromkeys(notes)),
        when,
        f"{_sizes(contents.entries)} on {world} rank{'s' * (world > 1)} in {seconds:.2g} s",
        group.rank,
    )


def every_from_variable() -> CheckEvery | None:
    """What DPCORE_CHECK_EVERY asks for."""
    wanted = os.environ.get("DPCORE_CHECK_EVERY") or "0"
    if not wanted.isdecimal():
        raise Unsupported(
            f"DPCORE_CHECK_EVERY={wanted}: it must be a number of steps such as 100, or 0 for never"
        )
    return CheckEvery(int(wanted)) if int(wanted) else None


class CheckEvery:
    """Checks a model, and the optimizers that have stepped it, before every n-th synchronised
    forward after the first."""

    def __init__(self, every: int) -> None:
        self.every = every
        self._checked_at = 0

    def before_forward(self, model: Any) -> None:
        """All ranks call it before a synchronised forward. Raises ``Mismatch`` if they differ."""
        done, before = model._reducer.completed, self._checked_at
        if done == before or done % self.every or model._join_config.enable:
            return
        self._checked_at = done
        check(model, *model._observer.optimizers_of(since=before)).raise_if_different()


def _memory_of(first: Any) -> tuple[_Memory, str]:
    """What is known of earlier checks, and how this moment is called."""
    reducer = getattr(first, "_reducer", None)
    try:
        memory = _memories.setdefault(first if reducer is None else reducer, _Memory())
    except TypeError:  # it has no hash, as a dictionary
        memory = _Memory()
    memory.checks += 1
    return (
        memory,
        f"at check {memory.checks}" if reducer is None else f"after step {reducer.completed}",
    )


class _Comparison:
    """The collective part of a check. All ranks run it with entries of their own."""

    def __init__(
        self, group: GradientGroup, device: torch.device, entries: Sequence[Entry]
    ) -> None:
        self._group, self._device, self._entries = group, device, entries
        self.differences: list[Difference] = []
        self.notes: list[str] = []

    def run(self, steps: int, equal: dict[str, str], when: str) -> None:
        """Fills ``differences`` and ``notes``, and notes in ``equal`` which sections are."""
        digests = [digest_of_value(entry.value) for entry in self._entries]
        randoms = dict(random_states())
        total = digest_of([*map(str, digests)])
        forms = [entry.form for entry in self._entries]
        text, facts = gather_facts(
            self._group, forms, self._device, total, steps, *randoms.values()
        )
        self._note_what_may_differ(facts, list(randoms))
        usual, odd = majority([(digest, length) for digest, length, *_ in facts])
        if odd:
            self._differ_in_form(text, [fact[1] for fact in facts], usual[0], odd)
            return
        if len({fact[2] for fact in facts}) > 1:
            self._differ_in_value(digests, equal)
        different = {one.section for one in self.differences}
        equal |= {e.section: when for e in self._entries if e.section not in different}

    def _note_what_may_differ(self, facts: list[list[int]], generators: list[str]) -> None:
        if len({fact[3] for fact in facts}) > 1:
            each = ", ".join(str(fact[3]) for fact in facts)
            self.notes.append(f"ranks have completed different numbers of backwards: {each}")
        if self._group.world_size == 1 or _are_threads(self._group):
            return
        states = {name: {fact[4 + n] for fact in facts} for n, name in enumerate(generators)}
        differ = [name for name, found in states.items() if len(found) > 1]
        same = [name for name, found in states.items() if len(found) == 1 and found != {0}]
        told = [f"{' and '.join(differ)} differ between ranks"] if differ else []
        told += [f"{' and '.join(same)} are the same on all ranks"] if same else []
        self.notes.append(f"random number generators: {', '.join(told)}")

    def _differ_in_form(
        self, text: bytes, lengths: list[int], usual: int, odd: tuple[int, ...]
    ) -> None:
        """One rank has other things than another one: names the first."""
        here, there = (
            text_of(self._group, text, rank, lengths[rank], self._device).splitlines()
            for rank in (usual, odd[0])
        )
        lacks = [form for form in here if form not in set(there)]
        has = [form for form in there if form not in set(here)]
        if lacks and has:
            what = f"rank {usual} has '{lacks[0]}' where rank {odd[0]} has '{has[0]}'"
        elif lacks or has:
            rank, without = (usual, odd[0]) if lacks else (odd[0], usual)
            what = f"rank {rank} has '{[*lacks, *has][0]}', and rank {without} has not"
        else:
            what = f"{_ranks((usual, odd[0]))} have the same things in another order"
        what += f"; {_ranks(odd)} had {len(there)} things to compare, and rank {usual} {len(here)}"
        self.differences.append(Difference([*lacks, *has, here[0]][0], odd, what, ""))

    def _differ_in_value(self, digests: list[int], equal: dict[str, str]) -> None:
        world = self._group.world_size
        mine = torch.tensor(digests, dtype=torch.int64, device=self._device)
        gathered = mine.new_empty(world * len(digests))
        self._group.all_gather(gathered, mine)
        of_ranks = numbers_in(gathered.view(world, -1), self._group)
        for entry, *found in zip(self._entries, *of_ranks, strict=True):
            usual, odd = majority(found)
            if odd and entry.may_differ:
                self.notes.append(f"{entry.name} differs between ranks: {entry.may_differ}")
            elif odd:
                detail = "" if self.differences else self._detail(entry.value, usual[0], odd[0])
                before = equal.get(entry.section)
                since = f"equal {before}" if before else "not compared before"
                text = f"{entry.name} {_split(usual, odd)}{detail}; {since}"
                self.differences.append(Difference(entry.name, odd, text, entry.section))

    def _detail(self, value: torch.Tensor | str, usual: int, odd: int) -> str:
        """What differs in the value: sends it from the rank ``usual`` to all."""
        mine = bytes_of(value)
        if isinstance(value, str):
            own = value.encode("ascii", "backslashreplace")[:_TEXT_BYTES].ljust(_TEXT_BYTES)
            both = [
                text_of(self._group, own, rank, _TEXT_BYTES, self._device).strip()
                for rank in (usual, odd)
            ]
            return f": {both[0]} and {both[1]}"
        if len(mine) > _MOST_BYTES:
            return ""
        sent = mine.to(self._device, copy=True)
        self._group.broadcast(sent, usual)
        theirs = on_host(sent, self._group)
        pairs = (mine.view(value.numel(), -1), theirs.view(value.numel(), -1))
        count = int((pairs[0] != pairs[1]).any(1).sum())
        wide = torch.complex128 if value.is_complex() else torch.float64
        by = (mine.view(value.dtype).to(wide) - theirs.view(value.dtype).to(wide)).abs().max()
        found = torch.tensor([count, float(by)], dtype=torch.float64, device=self._device)
        gathered = found.new_empty(2 * self._group.world_size)
        self._group.all_gather(gathered, found)
        count, most = numbers_in(gathered, self._group)[2 * odd : 2 * odd + 2]
        return f" in {count:.0f} of {value.numel()} elements, by up to {most:.3g}"


def _are_threads(group: Any) -> bool:
    """Ranks that are threads share the generators of their process."""
    return getattr(getattr(group, "group", group), "transport", "") == "inproc"


def _split(usual: Sequence[int], odd: Sequence[int]) -> str:
    """
    >>> _split((0, 1, 3), (2,)), _split((0,), (1,))
    ('differs on rank 2 from ranks 0, 1, 3', 'differs between rank 0 and rank 1')
    """
    if len(usual) > len(odd):
        return f"differs on {_ranks(odd)} from {_ranks(usual)}"
    return f"differs between {_ranks(usual)} and {_ranks(odd)}"


def _ranks(ranks: Sequence[int]) -> str:
    names = ", ".join(map(str, ranks[:_MOST_RANKS]))
    more = len(ranks) - _MOST_RANKS
    return f"rank{'s' if len(ranks) > 1 else ''} {names}" + (f" and {more} more" * (more > 0))


def _sizes(entries: Sequence[Entry]) -> str:
    sections = Counter(entry.section for entry in entries)
    held = [entry.value for entry in entries if isinstance(entry.value, torch.Tensor)]
    size = sum(value.numel() * value.element_size() for value in held)
    counts = ", ".join(f"{count} {section}" for section, count in sections.items())
    return f"{counts} ({size / 2**20:.1f} MiB)"
