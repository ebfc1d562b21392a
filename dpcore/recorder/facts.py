"""What a trace file says beside its events: whose gradients, in which buckets, over which link.

Events carry numbers only, since recording one must cost next to nothing. What the numbers stand
for is asked once, when the block has ended, of the models that live then.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from dpcore.comm.communicators.native import Communicator
    from dpcore.comm.communicators.protocol import GradientGroup


class Traced(Protocol):
    """A wrapped model, as a trace describes it."""

    module: nn.Module
    group: GradientGroup
    _model_group: Any  # its name and number, see dpcore/ddp/wrapper/model_group.py
    _parameters_by_number: list[nn.Parameter]
    _caps: list[int]
    _first_steps: Any  # what they chose, see dpcore/ddp/wrapper/first_steps.py

    @property
    def schedule(self) -> str: ...

    def bucket_report(self) -> Iterable[Any]: ...


# Descriptions of models that may be gone when a trace of the whole program ends, by whom they are
# averaged with (its identity, and itself, which need not be hashable) and by number; None: nobody
# asks for them.
_recorded: dict[int, tuple[Any, dict[int, dict[str, Any]]]] | None = None

_models: weakref.WeakSet[Traced] = weakref.WeakSet()
_models_lock = threading.Lock()  # ranks may be threads, and a set must not grow while it is read


def know(model: Traced) -> None:
    """Traces that end while the model lives describe its parameters and buckets."""
    with _models_lock:
        _models.add(model)
    note(model)


def note(model: Any) -> None:  # a Traced, which dpcore/ddp's own view of it does not show whole
    """Remembers what ``model`` is now, where a trace may end after its life."""
    if _recorded is not None:
        family = _family_of(model.group)
        _, described = _recorded.setdefault(id(family), (family, {}))
        described[model._model_group.traced_as] = _describe(model)


def outlive_models() -> None:
    """From now on traces also describe models that are gone when they end."""
    global _recorded
    if _recorded is None:
        _recorded = {}


def _family_of(group: Any) -> Any:
    return getattr(group, "_family", group)


def groups_of_models() -> list[Communicator]:
    """Open communicators of dpcore that wrapped models of this process are averaged over. Ranks
    that are threads see each other's models, and have made theirs the default anyway."""
    from dpcore.comm.communicators.protocol import capabilities_of

    with _models_lock:
        groups: dict[int, Any] = {id(model.group): model.group for model in _models}
    known = [group for group in groups.values() if capabilities_of(group).traces]
    return [group for group in known if not group.closed and group.transport != "inproc"]


def facts_of(comm: Communicator) -> dict[str, Any]:
    """Entries for ``otherData``: ``backend``, ``transport``, ``link`` and ``models``.

    ``link``: the words of an emulated one, else nothing.
    ``models``: names and bytes of the parameters by number, the numbers in each bucket, how many
              bytes fill a bucket (the first, the second, ...; the last cap is for all further),
              and what the first steps chose; of models over ``comm`` and over groups split from
              it or beside it.
    """
    family = _family_of(comm)
    with _models_lock:
        mine = [model for model in _models if _family_of(model.group) is family]
    described = dict((_recorded or {}).get(id(family), (family, {}))[1])
    described.update({model._model_group.traced_as: _describe(model) for model in mine})
    return {
        "backend": comm.backend,
        "transport": comm.transport,
        "link": comm._link,
        "models": [described[number] for number in sorted(described)],
    }


def _describe(model: Traced) -> dict[str, Any]:
    trained = model._parameters_by_number
    name_of = {id(parameter): name for name, parameter in model.module.named_parameters()}
    names = [name_of.get(id(parameter), "") for parameter in trained]
    number_of = {name: number for number, name in enumerate(names)}
    return {
        "number": model._model_group.traced_as,
        "name": model._model_group.name,
        "schedule": model.schedule,
        "chosen": dict(model._first_steps.why),
        "bucket_caps": list(model._caps),
        "parameters": names,
        "parameter_bytes": [p.numel() * p.element_size() for p in trained],
        "buckets": [
            {
                "gradients": [number_of[name] for name in line.parameters if name in number_of],
                "bytes": line.bytes,
                "dtype": line.dtype,
            }
            for line in model.bucket_report()
        ],
    }
