"""``DiLoCo``: the change over ``sync_every`` steps is the gradient of a second optimizer.

    outer = torch.optim.SGD(module.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    with dp.DiLoCo(module, optimizer, outer, sync_every=64):
        ...  # the same loop as for LocalSGD

The outer parameters are a flat copy of the last parameters on which the ranks agreed. Their
difference from the mean of the ranks' parameters is the outer gradient. The outer optimizer steps,
and the ranks continue from the new outer parameters. The gradient may be sent in fragments, applied
late, and be compressed to int8 (int8_blocks.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dpcore.comm.communicators.checks import check_integer
from dpcore.ddp.local_updates import int8_blocks
from dpcore.ddp.local_updates.block import LocalUpdates
from dpcore.ddp.local_updates.checks import (
    can_wait_later,
    check_optimizer,
    check_state,
    fraction,
    inner_of,
)
from dpcore.ddp.local_updates.fragments import Fragment
from dpcore.errors import Unsupported


class DiLoCo(LocalUpdates):
    """Gives ``outer_optimizer`` the change over ``sync_every`` steps of the ranks, as a gradient.

    ``module``, ``optimizer``, ``comm``, ``process_group``   as those of ``LocalSGD``.
    ``outer_optimizer``   an optimizer of exactly the module's parameters. Its groups are changed
                      to hold the outer parameters, in float32 at least.
    ``fragments``     the number of parts into which the parameters are divided. Each is sent
                      after a step of its own, so that each wait is shorter.
    ``fragment_sync_delay``   steps between sending a fragment and applying it: it travels while
                      these steps are computed.
    ``fragment_update_alpha``   the weight of a rank's own parameters when a fragment arrives
                      late; the outer parameters have the rest.
    ``bits``          32: outer gradients are sent in full. 8: in blocks of int8, a quarter of the
                      bytes between two ranks, half between four, no saving from eight on.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        outer_optimizer: torch.optim.Optimizer,
        sync_every: int = 64,
        fragments: int = 1,
        fragment_sync_delay: int = 0,
        bits: int = 32,
        *,
        fragment_update_alpha: float = 0.0,
        comm: Any = None,
        process_group: Any = None,
    ) -> None:
        if check_integer(bits, "DiLoCo: bits") not in (8, 32):
            raise Unsupported(f"DiLoCo: bits={bits!r}: choose 32 or 8")
        alpha = fraction(fragment_update_alpha, "fragment_update_alpha", "DiLoCo")
        if outer_optimizer is optimizer:
            raise Unsupported(
                "DiLoCo: outer_optimizer is the optimizer itself; make another one of "
                "module.parameters(), for instance torch.optim.SGD(module.parameters(), lr=0.7, "
                "momentum=0.9, nesterov=True)"
            )
        self.outer_optimizer, self.bits = outer_optimizer, bits
        self.fragments, self.fragment_sync_delay = fragments, fragment_sync_delay
        self.fragment_update_alpha = alpha
        super().__init__(
            module, optimizer, sync_every, comm, process_group, fragments, fragment_sync_delay
        )
        check_optimizer(outer_optimizer, "outer_optimizer", module, self._name, whole=True)
        if bits == 8 and fragment_sync_delay and not can_wait_later(self.group):
            raise Unsupported(
                "DiLoCo: bits=8 with fragment_sync_delay needs a communicator whose all_gather "
                f"takes async_op, and that of {type(self.group).__name__} does not; leave one of "
                "the two out, or pass comm=dpcore.init()"
            )
        device = self._flat.device
        self._outer = [
            torch.zeros(fragment.elements, dtype=self._dtype, device=device)
            for fragment in self._fragments
        ]
        self._outer_parameters = [
            [nn.Parameter(part) for part in fragment.parts_of(flat)]
            for fragment, flat in zip(self._fragments, self._outer, strict=True)
        ]
        self._hand_over()
        self._take_parameters()
        self._messages: torch.Tensor | None = None

    def _hand_over(self) -> None:
        """Puts the outer parameters into the outer optimizer, in place of the module's, and moves
        the state of each."""
        outer_of = {
            id(inner): outer
            for fragment, own in zip(self._fragments, self._outer_parameters, strict=True)
            for inner, outer in zip(fragment.parameters, own, strict=True)
        }
        optimizer = self.outer_optimizer
        for group in optimizer.param_groups:
            for i, before in enumerate(group["params"]):
                inner = inner_of(before)
                if id(inner) not in outer_of:
                    continue  # it is frozen
                outer = outer_of[id(inner)]
                vars(outer)["_dpcore_inner"] = inner
                group["params"][i] = outer
                if before in optimizer.state:
                    optimizer.state[outer] = optimizer.state.pop(before)

    @torch.no_grad()
    def _take_parameters(self) -> None:
        for fragment, flat in zip(self._fragments, self._outer, strict=True):
            for part, p in zip(fragment.parts_of(flat), fragment.parameters, strict=True):
                if not torch.equal(part.to(p.dtype), p):  # if equal, ``part`` is more precise
                    part.copy_(p)

    def _options(self) -> dict[str, Any]:
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self.outer_optimizer.param_groups
        ]
        return {
            **super()._options(),
            "fragments": self.fragments,
            "fragment_sync_delay": self.fragment_sync_delay,
            "fragment_update_alpha": self.fragment_update_alpha,
            "bits": self.bits,
            "outer_optimizer": f"{type(self.outer_optimizer).__name__} {groups}",
        }

    def _outer_gradient(self, fragment: Fragment, outer: torch.Tensor, out: torch.Tensor) -> None:
        """The outer minus this rank's parameters, so a step of SGD moves toward the rank's."""
        fragment.read(out)
        torch.sub(outer, out, out=out)

    def _start(self, fragment: Fragment, number: int) -> Any:
        gradient = self._flat[: fragment.elements]
        self._outer_gradient(fragment, self._outer[number], gradient)
        content = self._content(number)
        if self.bits == 32:
            return self._model_group.all_reduce(gradient, "mean", async_op=True, content=content)
        message = int8_blocks.encode(gradient)
        self._messages = message.new_empty(message.numel() * self._model_group.world_size)
        later = {"async_op": True} if self._delay else {}
        return self._model_group.all_gather(self._messages, message, content=content, **later)

    def _arrive(self) -> None:
        super()._arrive()
        if self._flight is not None and self._messages is not None:
            fragment = self._fragments[self._flight.fragment]
            int8_blocks.mean_of(self._messages, self._flat[: fragment.elements])
            self._messages = None

    def _take(self, number: int, is_late: bool) -> bool:
        fragment, own = self._fragments[number], self._outer_parameters[number]
        for parameter, gradient in zip(own, fragment.parts_of(self._flat), strict=True):
            parameter.grad = gradient
        self.outer_optimizer.step()  # skips the other fragments, which have no gradient
        for parameter in own:
            parameter.grad = None
        kept = self.fragment_update_alpha if is_late else 0.0
        fragment.write(self._outer[number], 1.0 - kept)
        return kept > 0

    def _mean_change(self, began: torch.Tensor) -> torch.Tensor:
        return -self._flat[: began.numel()]  # an outer gradient

    def state_dict(self) -> dict[str, Any]:
        """See ``LocalSGD.state_dict``. It includes the outer parameters and ``outer_optimizer``."""
        outer = [parameter for own in self._outer_parameters for parameter in own]
        return super().state_dict() | {
            "outer_parameters": {
                name: parameter.detach().clone()
                for (name, _), parameter in zip(self._trained, outer, strict=True)
            },
            "outer_optimizer": self.outer_optimizer.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ``LocalSGD.load_state_dict``."""
        outer = [parameter for own in self._outer_parameters for parameter in own]
        check_state(state, ("outer_parameters", "outer_optimizer"), self._name)
        saved = state["outer_parameters"]
        for (name, _), parameter in zip(self._trained, outer, strict=True):
            if name not in saved or saved[name].shape != parameter.shape:
                raise Unsupported(
                    f"DiLoCo: the state has no {name} of shape {list(parameter.shape)}: it is of "
                    "another module"
                )
        super().load_state_dict(state)
        for (name, _), parameter in zip(self._trained, outer, strict=True):
            parameter.copy_(saved[name])
        self.outer_optimizer.load_state_dict(state["outer_optimizer"])
