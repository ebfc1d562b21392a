"""What a comparison measures: a model, contenders, links and numbers of ranks, in the user's words.

torch, torch:100            torch DDP over Gloo, with buckets of 100 MiB
default, auto               DataParallel(model), nothing else; auto:4 with buckets of 4 MiB
bucketed:1, sequential, per_parameter, flat    a launch schedule of dpcore's
mine.py:MySchedule          one of your own, a dpcore.LaunchSchedule; mine.py:MySchedule:4

With these, a step includes the optimizer's, for all contenders:

priority, dear, zero1:4, zero2    schedules that go on under the next forward
local_sgd:16, diloco:64           ranks that agree every 16 or 64 steps
hook:fp16, hook:bf16, hook:powersgd:2, hook:mine.py:my_hook    DataParallel with a hook
torch-hook:fp16, torch-zero1      torch DDP with a hook, or with ZeroRedundancyOptimizer
mine.py:wrap                      a function wrap(model) -> (wrapped, optimizer)
"""

from __future__ import annotations

import difflib
import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dpcore.base.user_code import check_file, names_code, source_of
from dpcore.errors import Unsupported
from dpcore.reference.launches import ACROSS_STEPS, EXACT
from dpcore.tools.argument_types import name_and_cap
from dpcore.tools.compare.collectives.contenders import tuning
from dpcore.tools.compare.training.bare import BY_DPCORE, BY_TORCH
from dpcore.tools.compare.training.models import MODELS
from dpcore.tools.compare.training.ranks import ALONE, DEFAULT, TORCH, TORCH_OVER_OURS, kind_and_cap
from dpcore.tools.compare.training.recipes import (
    HOOKS,
    LOCAL,
    NAMED_HOOKS,
    RECIPE,
    TORCH_ZERO1,
    Kind,
    hook_of,
    is_recipe,
    kind_of,
)

DEFAULT_NAMES = ("default", "auto")
_MOST_STEPS, _MOST_RANK = 10_000, 1024


@dataclass(frozen=True)
class Contender:
    """``name``: as it was asked for. ``inner``: what the ranks call it."""

    name: str
    inner: str

    @property
    def is_torch(self) -> bool:
        """Plain torch DDP, with which the others are compared."""
        return self.inner.split()[0] == TORCH

    @property
    def over_gloo(self) -> bool:
        """Whether torch's group sends its gradients, which no emulated link slows down."""
        if self.is_torch:
            return not self.inner.startswith(TORCH_OVER_OURS)
        return self.inner.startswith("torch-")

    @property
    def is_recipe(self) -> bool:
        return self.inner.startswith(f"{RECIPE} ")

    @property
    def kind(self) -> Kind:
        return kind_of(self.inner)

    def over_dpcore(self) -> Contender:
        """The same reducer of torch's, sending through dpcore: Gloo knows no emulated link."""
        if self.is_torch:
            return Contender(self.name, self.inner.replace(TORCH, TORCH_OVER_OURS, 1))
        if self.over_gloo:
            raise Unsupported(
                f"contender {self.name!r} over an emulated link: it sends through torch's group as "
                "well, which such a link does not slow down; leave it out, or let the kernel shape "
                "the link (root, and no --emulated)"
            )
        return self


_PLAIN = (TORCH, *DEFAULT_NAMES, *EXACT, *ACROSS_STEPS, TORCH_ZERO1)


def contender(text: str) -> Contender:
    head, _, rest = text.partition(":")
    if head in LOCAL:
        return Contender(text, f"{head}:{_every(text, rest or str(LOCAL[head]))}")
    if head in HOOKS:
        return Contender(text, f"{head}:{_hook(text, rest)}")
    try:
        kind, cap = name_and_cap(text, _PLAIN)
    except ValueError as problem:
        raise Unsupported(f"contender {problem}") from None
    if cap == "auto" and kind != "bucketed":
        raise Unsupported(
            f"contender {text!r}: only bucketed:auto measures its buckets, as default does"
        )
    if kind not in _PLAIN and names_code(kind):
        check_file(kind)
        if not is_recipe(kind):
            return Contender(text, f"dpcore {kind} {cap}".strip())
        if cap:
            raise Unsupported(f"contender {text!r}: {kind} makes its own buckets; leave out :{cap}")
        return Contender(text, f"{RECIPE} {kind}")
    if kind in (TORCH, TORCH_ZERO1):
        return Contender(text, f"{kind} {cap}".strip())
    if kind in DEFAULT_NAMES:
        return Contender(text, f"dpcore auto {cap}" if cap else DEFAULT)
    if kind in (*EXACT, *ACROSS_STEPS):
        return Contender(text, f"dpcore {kind} {cap}".strip())
    raise Unsupported(
        f"no contender {text!r}{_nearest(kind, (*_PLAIN, *LOCAL, *HOOKS))} There are "
        f"{', '.join(_PLAIN)}, each with :MIB after it for the bucket size, local_sgd:16, "
        f"diloco:64, hook:NAME and torch-hook:NAME with {', '.join(NAMED_HOOKS)} or "
        "mine.py:my_hook, mine.py:MySchedule, and mine.py:wrap, a function (model) -> (wrapped, "
        "optimizer)"
    )


def _every(text: str, steps: str) -> int:
    if not steps.isdecimal() or not 0 < int(steps) <= _MOST_STEPS:
        raise Unsupported(
            f"contender {text!r}: {steps!r} is not a number of steps from 1 to {_MOST_STEPS}"
        )
    return int(steps)


def _hook(text: str, name: str) -> str:
    head, _, rank = name.partition(":")
    if head == "powersgd":
        if rank and not (rank.isdecimal() and 0 < int(rank) <= _MOST_RANK):
            raise Unsupported(
                f"contender {text!r}: {rank!r} is not a rank of matrices from 1 to {_MOST_RANK}"
            )
        return f"powersgd:{int(rank or 1)}"
    if name in NAMED_HOOKS:
        return name
    if not names_code(name) or head in NAMED_HOOKS:
        raise Unsupported(
            f"contender {text!r}: no hook {name!r}{_nearest(name, NAMED_HOOKS)} There are "
            "fp16, bf16, powersgd:RANK, and mine.py:my_hook, a function (state, bucket) -> Future"
        )
    check_file(name)
    hook_of(name)
    return name


def _nearest(text: str, known: Iterable[str]) -> str:
    meant = difflib.get_close_matches(text, known, 1)
    return f", did you mean {meant[0]!r}?" if meant else ":"


def contenders(names: Sequence[str]) -> list[Contender]:
    found = [contender(name) for name in names]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise Unsupported(f"contender {twice!r} is named twice; 'default' and 'auto' are the same")
    return found


def model(text: str) -> str:
    if names_code(text):
        check_file(text)
    elif text not in MODELS:
        raise Unsupported(
            f"no model {text!r}{_nearest(text, MODELS)} There are "
            f"{', '.join(MODELS)}, your own as my.py:make (`dpcore compare --example` "
            "prints one to begin with), and all_reduce and the other collectives"
        )
    return text


@dataclass(frozen=True)
class Cell:
    """One model over one link with so many ranks. ``kind``: "machine", "hosts", "emulated", and of
    ranks on GPUs "gpus", one for each, or "shared"."""

    link: str
    kind: str
    world: int

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.link or 'none'}/{self.world}"

    @property
    def title(self) -> str:
        if self.kind == "gpus":
            on = "1 rank on a GPU" if self.world == 1 else f"{self.world} ranks on a GPU each"
            return f"{on}, over NCCL"
        if self.world == 1:
            return "1 rank on this machine"
        where = {
            "machine": "on this machine",
            "shared": "that share GPUs, torch DDP over Gloo and dpcore over mapped memory",
            "hosts": f"between hosts of their own (network namespaces), {self.link}",
            "emulated": f"over dpcore's emulated link, {self.link}",
        }[self.kind]
        return f"{self.world} ranks {where}"


@dataclass(frozen=True)
class Plan:
    model: str
    contenders: tuple[Contender, ...]
    cells: tuple[Cell, ...]
    rounds: int
    seconds: float
    threads: int
    optimizer: str = ""  # whose step is a part of every step; "": none's is
    device: str = "cpu"
    amp: bool = False

    @property
    def every(self) -> int:
        """A round has a multiple of so many steps, so that all contenders' ranks agree in it."""
        return math.lcm(*(one.kind.every for one in self.contenders))

    def entrants(self, cell: Cell) -> list[Contender]:
        if cell.kind != "emulated":
            return list(self.contenders)
        return [one.over_dpcore() for one in self.contenders]

    def turns(self, cell: Cell) -> list[str]:
        """What takes turns on the ranks: contenders, and what they are measured against."""
        entrants = self.entrants(cell)
        return [*(one.inner for one in entrants), ALONE, *dict.fromkeys(map(bare_of, entrants))]

    def identity(self) -> dict[str, Any]:
        """What has to be the same for rounds of two runs to belong together."""
        kinds = (kind_and_cap(one.inner)[0] for one in self.contenders)
        names = [self.model, *(_code_in(kind) for kind in kinds)]
        return {
            "model": self.model,
            "contenders": [one.name for one in self.contenders],
            "seconds": self.seconds,
            "threads": self.threads,
            "optimizer": self.optimizer,
            "device": self.device,
            "amp": self.amp,
            "tuning": tuning(),
            "files": {name: digest for name in names if (digest := _digest(name))},
        }


def bare_of(entrant: Contender) -> str:
    """Whose bare all-reduce is all the communication of a contender."""
    return BY_TORCH if entrant.over_gloo else BY_DPCORE


def _code_in(kind: str) -> str:
    """The user's file in a contender, if there is one."""
    head, _, rest = kind.partition(":")
    return rest if head in HOOKS else kind.removeprefix("dpcore ").removeprefix(f"{RECIPE} ")


def _digest(name: str) -> str:
    path = source_of(name) if names_code(name) else None
    if path is None or not path.is_file():
        return ""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
