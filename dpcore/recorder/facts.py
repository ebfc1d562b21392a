"""Facts that a trace file holds beside its events: parameter names, bucket layouts and the link.

Events carry only numbers, to keep recording cheap. When the block ends, the models that are still
alive describe what the numbers mean.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any, Protocol

from dpcore.base.machine import machine

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from dpcore.comm.communicators.native import Communicator
    from dpcore.comm.communicators.protocol import GradientGroup
    from dpcore.recorder.step_facts import StepFacts


class Known(Protocol):
    """A wrapped model, or a block of local updates with a ``_described`` of its own."""

    group: GradientGroup
    _model_group: Any  # its name and number, see dpcore/ddp/wrapper/model_group.py


class Traced(Known, Protocol):
    """A wrapped model, as a trace describes it."""

    module: nn.Module
    _parameters_by_number: list[nn.Parameter]
    _caps: list[int]
    _graphs: Any  # what dynamo has compiled of it, see dpcore/ddp/compiled/tracing.py
    _reducer: Any
    _first_steps: Any  # what they chose, see dpcore/ddp/wrapper/first_steps.py
    _step_facts: StepFacts

    @property
    def schedule(self) -> str: ...

    def bucket_report(self) -> Iterable[Any]: ...


# Descriptions of models that may be gone when a trace of the whole program ends. The first key is
# the id of the group (which need not be hashable, and is stored too), the second the model's
# number. None if no such trace is recording.
_recorded: dict[int, tuple[Any, dict[int, dict[str, Any]]]] | None = None

_models: weakref.WeakSet[Known] = weakref.WeakSet()
_models_lock = threading.Lock()  # ranks may be threads, and a set must not grow while it is read


def know(model: Known) -> None:
    """Traces that end while the model lives describe its parameters and buckets."""
    with _models_lock:
        _models.add(model)
    note(model)


def note(model: Any) -> None:  # a Traced; the protocol in dpcore/ddp lacks some of its members
    """Stores a description of ``model`` if a trace may outlive it."""
    if _recorded is not None:
        family = _family_of(model.group)
        _, described = _recorded.setdefault(id(family), (family, {}))
        described[model._model_group.traced_as] = _describe(model)


def outlive_models() -> None:
    """Makes later traces describe models even if they are gone when the trace ends."""
    global _recorded
    if _recorded is None:
        _recorded = {}


def _family_of(group: Any) -> Any:
    return getattr(group, "_family", group)


def groups_of_models() -> list[Communicator]:
    """The open communicators of this process's wrapped models. Ranks that are threads are left
    out: they see each other's models, and their own communicator is the default anyway."""
    from dpcore.comm.communicators.protocol import capabilities_of

    with _models_lock:
        groups: dict[int, Any] = {id(model.group): model.group for model in _models}
    known = [group for group in groups.values() if capabilities_of(group).traces]
    return [group for group in known if not group.closed and group.transport != "inproc"]


def facts_of(comm: Communicator) -> dict[str, Any]:
    """Entries for ``otherData``: ``machine``, ``backend``, ``transport``, ``link`` and ``models``.

    ``link``: the description of an emulated link, else "".
    ``models``: for each model over ``comm`` or a group that shares its origin: names and bytes of
              the parameters by number, the numbers in each bucket, the caps of the buckets in
              order (the last one applies to all further buckets), what the first steps chose, what
              came of torch.compile, in words, and what their steps show (step_facts.py). A block
              of local updates has ``local_updates`` instead, and its fragments as buckets.
    """
    family = _family_of(comm)
    with _models_lock:
        mine = [model for model in _models if _family_of(model.group) is family]
    described = dict((_recorded or {}).get(id(family), (family, {}))[1])
    described.update({model._model_group.traced_as: _describe(model) for model in mine})
    hosts = getattr(comm, "hosts", ())  # those on devices do not know
    return {
        "machine": machine_of(hosts.count(hosts[comm.rank]) if hosts else 0),
        "backend": comm.backend,
        "transport": comm.transport,
        "link": comm._link,
        "models": [described[number] for number in sorted(described)],
    }


def machine_of(local_ranks: int) -> dict[str, Any]:
    """The machine, with the threads of torch in this rank and the ranks that share the host, where
    that is known."""
    import torch

    known = {"local_ranks": local_ranks} if local_ranks else {}
    return {**machine(), "threads": torch.get_num_threads(), **known}


def _describe(model: Any) -> dict[str, Any]:
    described = getattr(model, "_described", None)
    return _describe_wrapped(model) if described is None else dict(described())


def _describe_wrapped(model: Traced) -> dict[str, Any]:
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
        "compiled": model._graphs.in_words(model),
        **model._step_facts.facts(),
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
