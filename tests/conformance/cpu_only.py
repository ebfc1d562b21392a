"""Lets the suite's tests for GPUs run without one: what they put on "cuda" stays on the CPU.

Most tests of DDP ask for two GPUs only because they were written where there are some. What they
check is the same on the CPU. A test that is about GPUs (SyncBatchNorm, NCCL) fails here and is in
no list.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


def open_gpu_tests(common_distributed: Any) -> None:
    """Takes away the decorators that skip for want of GPUs; to be called before the suite is
    imported."""

    def keep(test: Callable[..., Any]) -> Callable[..., Any]:
        return test

    common_distributed.skip_if_no_gpu = keep
    common_distributed.skip_if_lt_x_gpu = lambda count, **options: keep
    common_distributed.init_multigpu_helper = lambda world, backend: {
        rank: [rank] for rank in range(world)
    }


def without_devices(ddp: type) -> type:
    """The class of DDP for callers that pass ``device_ids=[rank]``."""

    class WithoutDevices(ddp):  # type: ignore[misc,valid-type]
        def __init__(
            self,
            module: Any,
            device_ids: Any = None,
            output_device: Any = None,
            *rest: Any,
            **more: Any,
        ) -> None:
            super().__init__(module, None, None, *rest, **more)

    WithoutDevices.__name__ = ddp.__name__
    return WithoutDevices


class _NoStream:
    """A stream, or an event, on which everything has happened already."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *problem: object) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass

    synchronize = wait_event = record_event = wait_stream

    def record(self, stream: Any = None) -> None:
        pass

    wait = record


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device):
        return _CPU if value.type == "cuda" else value
    if isinstance(value, str) and value.split(":")[0] == "cuda":
        return "cpu"
    return value


def _device_on_cpu(value: Any) -> Any:
    """Where a device is meant, an integer is the number of a GPU."""
    return _CPU if type(value) is int else _on_cpu(value)


class _CudaIsCpu(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.cuda:
            return args[0]
        if "device" in kwargs:
            kwargs["device"] = _device_on_cpu(kwargs["device"])
        if function is torch.Tensor.to:
            args = (args[0], *map(_device_on_cpu, args[1:]))
        return function(*args, **kwargs)


_module_to = torch.nn.Module.to


def _module_to_cpu(module: Any, *args: Any, **kwargs: Any) -> Any:
    if "device" in kwargs:
        kwargs["device"] = _device_on_cpu(kwargs["device"])
    return _module_to(module, *map(_device_on_cpu, args), **kwargs)


@contextlib.contextmanager
def cuda_is_cpu() -> Iterator[None]:
    nothing = {"set_device": lambda device: None, "synchronize": lambda device=None: None}
    streams = {"Stream": _NoStream, "stream": _NoStream, "device": _NoStream}
    current = {"current_stream": _NoStream, "current_device": lambda: 0}
    with (
        mock.patch.multiple(torch.cuda, **nothing, **streams, **current),
        mock.patch.multiple(torch, Stream=_NoStream, Event=_NoStream),
        mock.patch.object(torch.accelerator, "current_stream", _NoStream),
        mock.patch.object(torch.nn.Module, "to", _module_to_cpu),
        _CudaIsCpu(),
    ):
        yield
