"""Buffers of a wrapped model: when they are broadcast, and the hook that may replace that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel.distributed import (
    DistributedDataParallel,
    _BufferCommHook,
    _BufferCommHookLocation,
)

from dpcore.ddp.wrapper.arguments import refuse_virtual
from dpcore.ddp.wrapper.buffer_sync import BufferSync
from dpcore.ddp.wrapper.module_state import broadcast_values
from dpcore.errors import Error

if TYPE_CHECKING:
    from dpcore import _C
    from dpcore.ddp.wrapper.model_group import ModelGroup


class BufferMethods(DistributedDataParallel):
    """The methods of ``DataParallel`` for buffers."""

    _model_group: ModelGroup
    _reducer: _C.Reducer
    _buffers_of_module: BufferSync
    _futures_of_buffers: list[Any]

    def _register_buffer_comm_hook(
        self, state: Any, hook: Any, comm_hook_location: Any = None
    ) -> None:
        """Replaces the broadcast of buffers by ``hook(state, {name: buffer})``. The end of backward
        waits for the futures that it returns."""
        refuse_virtual(self, "a hook for buffers")
        if not callable(hook):
            raise AssertionError(
                f"a buffer hook must be callable, and {type(hook).__name__} is not"
            )
        where = comm_hook_location or _BufferCommHookLocation.POST_FORWARD
        self.buffer_hook = _BufferCommHook(hook, state, where)

    def _distributed_broadcast_coalesced(
        self, tensors: Sequence[torch.Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        broadcast_values(self._model_group, tensors, authoritative_rank)

    def _default_broadcast_coalesced(
        self, bufs: Any = None, bucket_size: Any = None, authoritative_rank: int = 0
    ) -> None:
        """Broadcasts buffers as if no hook were registered."""
        buffers = list(self._buffers_by_name().values()) if bufs is None else bufs
        broadcast_values(self._model_group, buffers, authoritative_rank)

    @property
    def modules_buffers(self) -> list[torch.Tensor]:  # type: ignore[override]
        return list(self._buffers_by_name().values())

    @property
    def named_module_buffers(self) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return self._buffers_by_name()

    @property
    def broadcast_buffers(self) -> bool:
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    def _sync_buffers(self) -> None:
        """Synchronises the buffers as at the beginning of a forward."""
        self._sync_module_buffers(0)

    def will_sync_module_buffers(self) -> bool:
        return self._syncs_buffers(before_forward=not hasattr(self, "buffer_hook"))

    def _buffers_by_name(self) -> dict[str, torch.Tensor]:
        return {
            name: buffer
            for name, buffer in self.module.named_buffers()
            if name not in self.parameters_to_ignore
        }

    def _syncs_buffers(self, before_forward: bool) -> bool:
        if not (self.require_forward_param_sync and self.forward_sync_buffers):
            return False
        hook = self.__dict__.get("buffer_hook")
        if hook is None:
            return before_forward and self._buffers_of_module.has_any
        is_before = hook.buffer_comm_hook_location.name == "PRE_FORWARD"
        return is_before == before_forward and bool(self._buffers_by_name())

    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        hook = self.__dict__.get("buffer_hook")
        if hook is None:
            try:
                self._buffers_of_module(authoritative_rank)
            except Error as problem:
                step = self._reducer.completed + 1
                raise type(problem)(f"step {step}, buffers before forward: {problem}") from None
            return
        with torch.no_grad():
            futures = hook.buffer_comm_hook(hook.buffer_comm_hook_state, self._buffers_by_name())
        self._futures_of_buffers.extend(futures or ())

    def _wait_for_buffers(self) -> None:
        futures, self._futures_of_buffers = self._futures_of_buffers, []
        for future in futures:
            future.wait()
