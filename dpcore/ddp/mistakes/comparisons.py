"""Compares what all ranks have, once there is a reason to: the hyperparameters of their optimizers,
and their parameters, of which a copy travels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from dpcore.comm.communicators.read_back import numbers_in
from dpcore.ddp.mistakes.contents import Contents, digest_of_value

_SETTINGS = 256  # hyperparameters that are compared
_SETTING_BYTES = 48  # of a value that is shown
_ROUNDING = 16  # differences of so many steps of the type may come from different processors


class Difference(NamedTuple):
    """Where the parameters of ranks differ."""

    odd: Sequence[int]  # the ranks that differ from the most
    world: int
    name: str  # of the first parameter
    parameters: int  # that differ
    elements: int  # of the first one, on the rank where most do
    of_elements: int
    largest: float  # difference of an element
    is_rounding: bool
    has_moved: bool  # since the optimizer's last step, on all ranks

    def in_words(self) -> str:
        more = f" and {self.parameters - 1} more" if self.parameters > 1 else ""
        return (
            f"the parameters of {ranks_in_words(self.odd)} differ from those of "
            f"{others_in_words(self.world, self.odd)}: "
            f"{self.name} in {self.elements} of {self.of_elements} elements, by up to "
            f"{self.largest:.3g}{more}"
        )


def ranks_in_words(ranks: Sequence[int]) -> str:
    """ "rank 1", "ranks 1 and 3", "ranks 1, 2 and 3"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def others_in_words(world: int, odd: Sequence[int]) -> str:
    """ "the other ranks", or the only one."""
    others = [rank for rank in range(world) if rank not in odd]
    return ranks_in_words(others) if len(others) == 1 else "the other ranks"


def majority(values: Sequence[Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ranks with the most common of the values, and those with another one. Of as many, the
    value of the lowest rank counts.

    >>> majority([7, 7, 8, 7]), majority([7, 8])
    (((0, 1, 3), (2,)), ((0,), (1,)))
    """
    (usual, _), *_ = Counter(values).most_common(1)
    with_it = tuple(rank for rank, value in enumerate(values) if value == usual)
    return with_it, tuple(rank for rank, value in enumerate(values) if value != usual)


def odd_ones(values: Sequence[Any]) -> tuple[int, ...]:
    """The ranks whose value is not the most common one."""
    return majority(values)[1]


@torch.no_grad()
def difference(model: Any) -> Difference | None:
    """Between the ranks' parameters at this moment, or None. All ranks call it."""
    group, parameters = model._model_group, model._parameters_by_number
    facts = torch.zeros(len(parameters) + 1, 3, dtype=torch.float64)
    facts[-1, 0] = model._reducer.has_changed_since_digest
    for number, parameter in enumerate(parameters):
        mine = parameter.detach()
        of_0 = mine.clone(memory_format=torch.contiguous_format)
        group.broadcast(of_0, 0)
        facts[number] = torch.tensor([*_against(mine, of_0), _checksum(mine)], dtype=torch.float64)
    everywhere = _gathered(model, facts.reshape(-1)).view(group.world_size, -1, 3)
    differs = (everywhere[:, :-1, 0] > 0).any(0).nonzero().flatten().tolist()
    if not differs:
        return None
    first = differs[0]
    here = everywhere[:, first]
    odd = odd_ones(here[:, 2].tolist()) or [
        rank for rank in range(group.world_size) if here[rank, 0] > 0
    ]
    return Difference(
        odd,
        group.world_size,
        model._reducer.name_of(first),
        len(differs),
        int(here[:, 0].max()),
        parameters[first].numel(),
        float(here[:, 1].max()),
        all(_is_rounding(parameters[n], float(everywhere[:, n, 1].max())) for n in differs),
        bool((everywhere[:, -1, 0] > 0).all()),
    )


def setting_that_differs(
    model: Any, optimizers: Sequence[torch.optim.Optimizer]
) -> tuple[str, list[str]] | None:
    """The first hyperparameter in which the ranks' optimizers differ, with the value of each rank.
    All ranks call it."""
    entries = [e for e in Contents(optimizers).entries if isinstance(e.value, str)][:_SETTINGS]
    digests = torch.zeros(_SETTINGS, dtype=torch.int64)
    for number, entry in enumerate(entries):
        digests[number] = digest_of_value(f"{entry.name}={entry.value}")
    differs = [len(set(each.tolist())) > 1 for each in _gathered(model, digests).unbind(1)]
    if not any(differs):
        return None
    first = differs.index(True)
    text = torch.zeros(_SETTING_BYTES, dtype=torch.uint8)
    if first < len(entries):
        value = str(entries[first].value).encode()[:_SETTING_BYTES]
        text[: len(value)] = torch.frombuffer(bytearray(value or b"\0"), dtype=torch.uint8)
    values = _gathered(model, text).tolist()
    name = entries[first].name.rpartition(": ")[2] if first < len(entries) else "one more"
    return name, [bytes(row).rstrip(b"\0").decode(errors="replace") for row in values]


def _gathered(model: Any, own: torch.Tensor) -> torch.Tensor:
    """A row from each rank, on the host."""
    group, here = model._model_group, own.to(model.device)
    output = torch.empty(group.world_size * own.numel(), dtype=own.dtype, device=here.device)
    group.all_gather(output, here)
    return torch.tensor(numbers_in(output, group), dtype=own.dtype).view(group.world_size, -1)


def _against(mine: torch.Tensor, of_0: torch.Tensor) -> tuple[float, float]:
    """The number of elements that differ, and by how much at most."""
    differ = (mine != of_0) & ~((mine != mine) & (of_0 != of_0))
    count = int(differ.sum())
    if count == 0:
        return 0.0, 0.0
    by = (mine[differ].to(torch.complex128) - of_0[differ].to(torch.complex128)).abs()
    return float(count), float(by.max())


def _checksum(values: torch.Tensor) -> float:
    """A number that tells the ranks' values apart."""
    sums = torch.view_as_real(values) if values.is_complex() else values
    return float(sums.double().nan_to_num(7.0, 8.0, 9.0).sum())


def _is_rounding(parameter: torch.Tensor, largest: float) -> bool:
    if not (parameter.is_floating_point() or parameter.is_complex()):
        return False
    scale = float(parameter.detach().abs().max())
    return largest <= _ROUNDING * torch.finfo(parameter.dtype).eps * scale
