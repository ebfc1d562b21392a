"""What a comparison measures: a model, contenders, links and numbers of ranks, in the user's words.

torch, torch:100            torch DDP over Gloo, with buckets of 100 MiB
default, auto               DataParallel(model), nothing else; auto:4 with buckets of 4 MiB
bucketed:1, sequential, per_parameter, flat    a launch schedule of dpcore's
mine.py:MySchedule          one of your own, a dpcore.LaunchSchedule; mine.py:MySchedule:4
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dpcore.base.user_code import check_file, names_code, source_of
from dpcore.errors import Unsupported
from dpcore.reference.launches import EXACT
from dpcore.tools.argument_types import name_and_cap
from dpcore.tools.compare.collectives.contenders import tuning
from dpcore.tools.compare.training.bare import BY_DPCORE, BY_TORCH
from dpcore.tools.compare.training.models import MODELS
from dpcore.tools.compare.training.ranks import ALONE, DEFAULT, TORCH, TORCH_OVER_OURS, kind_and_cap

DEFAULT_NAMES = ("default", "auto")


@dataclass(frozen=True)
class Contender:
    """``name``: as it was asked for. ``inner``: what the ranks call it."""

    name: str
    inner: str

    @property
    def is_torch(self) -> bool:
        return self.inner.split()[0] == TORCH

    def over_dpcore(self) -> Contender:
        """The same reducer of torch's, sending through dpcore: Gloo knows no emulated link."""
        if not self.is_torch:
            return self
        return Contender(self.name, self.inner.replace(TORCH, TORCH_OVER_OURS, 1))


def contender(text: str) -> Contender:
    known = (TORCH, *DEFAULT_NAMES, *EXACT)
    try:
        kind, cap = name_and_cap(text, known)
    except ValueError as problem:
        raise Unsupported(f"contender {problem}") from None
    if cap == "auto" and kind != "bucketed":
        raise Unsupported(
            f"contender {text!r}: only bucketed:auto measures its buckets, as default does"
        )
    if kind not in known and names_code(kind):
        check_file(kind)
        return Contender(text, f"dpcore {kind} {cap}".strip())
    if kind == TORCH:
        return Contender(text, f"{TORCH} {cap}".strip())
    if kind in DEFAULT_NAMES:
        return Contender(text, f"dpcore auto {cap}" if cap else DEFAULT)
    if kind in EXACT:
        return Contender(text, f"dpcore {kind} {cap}".strip())
    raise Unsupported(
        f"no contender {text!r}{_nearest(kind, known)} There are "
        f"{', '.join(known)}, each with :MIB after it for the bucket size, and "
        "mine.py:MySchedule"
    )


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
    """One model over one link with so many ranks. ``kind``: "machine", "hosts", "emulated"."""

    link: str
    kind: str
    world: int

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.link or 'none'}/{self.world}"

    @property
    def title(self) -> str:
        where = {
            "machine": "on this machine",
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

    def entrants(self, cell: Cell) -> list[Contender]:
        if cell.kind != "emulated":
            return list(self.contenders)
        return [one.over_dpcore() for one in self.contenders]

    def turns(self, cell: Cell) -> list[str]:
        """Who takes turns on the ranks: contenders, and what they are measured against."""
        entrants = self.entrants(cell)
        return [*(one.inner for one in entrants), ALONE, *dict.fromkeys(map(bare_of, entrants))]

    def identity(self) -> dict[str, Any]:
        """What has to be the same for rounds of two runs to belong together."""
        kinds = (kind_and_cap(one.inner)[0] for one in self.contenders)
        names = [self.model, *(kind.removeprefix("dpcore ") for kind in kinds)]
        return {
            "model": self.model,
            "contenders": [one.name for one in self.contenders],
            "seconds": self.seconds,
            "threads": self.threads,
            "tuning": tuning(),
            "files": {name: digest for name in names if (digest := _digest(name))},
        }


def bare_of(entrant: Contender) -> str:
    """Whose bare all-reduce is all the communication of a contender."""
    by_gloo = entrant.is_torch and not entrant.inner.startswith(TORCH_OVER_OURS)
    return BY_TORCH if by_gloo else BY_DPCORE


def _digest(name: str) -> str:
    path = source_of(name) if names_code(name) else None
    if path is None or not path.is_file():
        return ""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
