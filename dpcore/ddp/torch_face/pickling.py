"""``pickle``, ``copy.deepcopy`` and ``torch.save`` of a wrapped model.

The module and the arguments of its wrapper are saved. As in torch, the copy uses the default group
of the process that loads it. Communication hooks are not saved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from dpcore.ddp.torch_face.logging_data import Logger
from dpcore.ddp.wrapper import parameters
from dpcore.errors import Error

if TYPE_CHECKING:
    from dpcore.ddp.wrapper.wrapped import Wrapped

# Attributes that the loading process makes anew.
_OF_THIS_PROCESS = (
    "group",
    "logger",
    "reducer",
    "_across",
    "_buffers_of_module",
    "_delayed",
    "_first_steps",
    "_futures_of_buffers",
    "_group_for_torch",
    "_hook_runner",
    "_listening",
    "_model_group",
    "_mixed",
    "_monitor",
    "_observer",
    "_reducer",
    "_torch_group",
    "_watch",
    "_comm_hooks",
    "_module_parameters",
    "_outer_wrapper",
    "_parameters_by_number",
)


def state_of(model: Wrapped) -> dict[str, Any]:
    if not model._has_default_group:
        model._raise(
            Error(
                "a wrapped model can be pickled or copied only if it uses the default group: "
                "another one, passed as process_group= or comm=, cannot be found where it is "
                "loaded. Pickle or copy model.module, or its state_dict()"
            )
        )
    if model._delayed is not None:
        model._raise(Error("a model with delayed parameters cannot be pickled; pickle its module"))
    model._reducer.flush()  # finishes a step in flight
    return {name: value for name, value in vars(model).items() if name not in _OF_THIS_PROCESS}


def restore(model: Wrapped, state: dict[str, Any]) -> None:
    nn.Module.__setstate__(model, state)  # type: ignore[arg-type, no-untyped-call]
    module, ignored = model.module, model.parameters_to_ignore
    model.logger = Logger()
    model._comm_hooks = []
    model._delayed = None
    model._module_parameters = [p for _, p in parameters.kept_parameters(module, ignored)]
    model._join_group(None, None, is_copy=True)
    model._set_up(parameters.trained_parameters(module, ignored))
