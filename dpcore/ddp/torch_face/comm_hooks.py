"""Communication hooks: functions of the user that replace a bucket's all-reduce.

A hook is ``hook(state, bucket) -> Future``, as in torch DDP, and those of
``torch.distributed.algorithms.ddp_comm_hooks`` run unchanged. It starts when the schedule launches
the bucket, on the thread that runs backward. When the schedule waits for the bucket, the reducer
waits for the hook's future. The bucket is not divided by the number of ranks first; the value of
the future is the result.

The reducer owns a ``HookRunner``. The runner must not keep the model alive, so it holds the
reducer, its source of buckets, by a weak reference.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dpcore.ddp.wrapper.outputs import at_end_of_this_backward
from dpcore.errors import Error, Unsupported

if TYPE_CHECKING:
    from dpcore import _C

Hook = Callable[[Any, Any], Any]
_TorchBucket: Any = vars(dist)["GradBucket"]


class GradBucket:
    """A bucket of gradients, with the methods of torch's class of this name, which has no public
    constructor."""

    def __init__(
        self,
        index: int,
        last: bool,
        flat: torch.Tensor,
        parts: Sequence[torch.Tensor],
        parameters: Sequence[torch.Tensor],
    ) -> None:
        self._index, self._last = index, last
        self._flat = self._buffer = flat
        self._parts, self._parameters = parts, parameters

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # isinstance(bucket, dist.GradBucket) holds
        return _TorchBucket

    def index(self) -> int:
        """The bucket's number, in the order in which buckets are sent."""
        return self._index

    def is_last(self) -> bool:
        """Whether no bucket of this backward comes after it."""
        return self._last

    def buffer(self) -> torch.Tensor:
        """All gradients, flat. Between them are a few zeros, for alignment."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Makes ``buffer()`` and ``gradients()`` refer to this buffer."""
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Each parameter's part of the buffer, with the parameter's shape."""
        if self._buffer is self._flat:
            return list(self._parts)
        begin, size = self._flat.data_ptr(), self._flat.element_size()
        offset = self._buffer.storage_offset()
        return [
            self._buffer.as_strided(
                part.shape, part.stride(), offset + (part.data_ptr() - begin) // size
            )
            if part.numel() > 0  # an empty tensor has no address
            else self._buffer.new_empty(part.shape)
            for part in self._parts
        ]

    def parameters(self) -> list[torch.Tensor]:
        """The parameters in the order of ``gradients()``."""
        return list(self._parameters)


def bucket_of(
    reducer: _C.Reducer, parameters: Sequence[torch.Tensor], number: int, last: bool
) -> GradBucket:
    """The bucket with this number as hooks see it."""
    flat, gradients, parts = reducer.bucket(number)
    return GradBucket(number, last, flat, parts, [parameters[i] for i in gradients])


def check_hook(hook: Any) -> None:
    """Checks that a hook takes a state and a bucket and that its annotations fit."""
    if not callable(hook):
        raise TypeError(f"a communication hook must be callable, and {type(hook).__name__} is not")
    try:
        signature = inspect.signature(hook)
    except ValueError:  # a type defined in C
        raise TypeError(
            f"a communication hook is called with a state and a bucket, and {hook!r} has no "
            "signature to check; wrap it in a function"
        ) from None
    if "bucket" not in signature.parameters:
        raise KeyError(  # as in torch
            f"communication hook {name_of(hook)}: it needs a parameter named bucket, "
            "def hook(state, bucket)"
        )
    bucket = signature.parameters["bucket"].annotation
    if bucket not in (inspect.Parameter.empty, _TorchBucket) and not _is_text(bucket, "GradBucket"):
        raise Unsupported(
            f"communication hook {name_of(hook)}: bucket annotation should be dist.GradBucket, "
            f"and is {bucket}"
        )
    result = signature.return_annotation
    future = torch.futures.Future[torch.Tensor]
    if result not in (inspect.Signature.empty, future) and not _is_text(result, "Tensor]"):
        raise Unsupported(
            f"communication hook {name_of(hook)}: return annotation should be "
            f"torch.futures.Future[torch.Tensor], and is {result}"
        )


def _is_text(annotation: Any, end: str) -> bool:
    """Whether an unevaluated annotation ends like this."""
    return isinstance(annotation, str) and annotation.endswith(end)


def name_of(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", None) or getattr(hook, "__name__", type(hook)))


def result_of(future: Any) -> torch.Tensor:
    """Waits for a hook's future and returns the tensor that it holds."""
    value = future.wait()
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    if not isinstance(value, torch.Tensor):
        raise Error(
            "a communication hook's future must hold one tensor with the bucket's gradients, and "
            f"holds {type(value).__name__}"
        )
    return value


def completed(value: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """A future that already has its value."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(value)
    return future


def step_in_backward(model: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A hook for parameters with optimizers of their own: averages the bucket, steps them, and
    removes the gradients at the end of backward. ``model`` is a weak reference."""
    of = model()
    result_of(of.reducer._run_allreduce_hook(bucket)).div_(of.group.world_size)
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        optimizers = getattr(parameter, "_in_backward_optimizers", ())
        if optimizers:
            parameter.grad = gradient
            for optimizer in optimizers:
                optimizer.step()

    def take_away() -> None:
        for parameter in bucket.parameters():
            if hasattr(parameter, "_in_backward_optimizers"):
                parameter.grad = None

    at_end_of_this_backward(take_away)
    return completed(bucket.buffer())


class HookRunner:
    """Runs a hook for the reducer: see csrc/reducer/bucket/bucket_communicator.h."""

    def __init__(
        self,
        reducer: _C.Reducer,
        parameters: Sequence[torch.Tensor],
        state: Any,
        hook: Hook,
    ) -> None:
        self._reducer = weakref.ref(reducer)
        self._parameters = parameters
        self._state, self._hook = state, hook
        self._count = 0
        self._pending: dict[int, tuple[GradBucket, Any]] = {}

    def buckets_changed(self, count: int) -> None:
        self._count = count

    def run(self, bucket: GradBucket) -> Any:
        return self._hook(self._state, bucket)

    def start(self, number: int) -> None:
        reducer = self._reducer()
        assert reducer is not None  # the reducer is the caller
        bucket = bucket_of(reducer, self._parameters, number, number == self._count - 1)
        with torch.no_grad():
            future = self.run(bucket)
        if not callable(getattr(future, "wait", None)):
            raise TypeError(
                f"communication hook {name_of(self._hook)}: it has to return a "
                f"torch.futures.Future of the bucket's values, not {type(future).__name__}"
            )
        self._pending[number] = (bucket, future)

    def wait(self, number: int) -> None:
        bucket, future = self._pending.pop(number)
        value = result_of(future)
        flat = bucket._flat
        if value.numel() != flat.numel():
            raise Error(
                f"communication hook {name_of(self._hook)}: the future holds {value.numel()} "
                f"numbers, bucket {number} has {flat.numel()}"
            )
        is_there = value.data_ptr() == flat.data_ptr() and value.is_contiguous()
        if not (is_there and value.dtype == flat.dtype):
            with torch.no_grad():
                flat.copy_(value.reshape(-1))

    def abandon(self, number: int) -> None:
        self._pending.pop(number, None)


def compose_comm_hooks(*hooks: tuple[Any, Hook]) -> Hook:
    """Makes one hook of several ``(state, hook)``: each gets the bucket that the previous returned.

    It serves for steps around an all-reduce: clipping before it, noise or logging after it. The
    state it is registered with does not matter; each part has its own.

    >>> hook = dpcore.compose_comm_hooks((1.0, clip), (group, allreduce_hook))  # doctest: +SKIP
    >>> model.register_comm_hook(None, hook)                                    # doctest: +SKIP
    """
    if not hooks:
        raise Unsupported("compose_comm_hooks needs at least one (state, hook)")
    for pair in hooks:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TypeError(f"compose_comm_hooks: expected pairs (state, hook), not {pair!r}")
        check_hook(pair[1])

    def composed(state: Any, bucket: Any) -> Any:
        first_state, first = hooks[0]
        future = first(first_state, bucket)
        for part_state, part in hooks[1:]:
            # The next hook may communicate, and must do so in bucket order on all ranks. So it
            # does not run in a callback, whose timing differs between ranks.
            bucket.set_buffer(result_of(future).reshape(-1))
            future = part(part_state, bucket)
        return future

    composed.__annotations__ = {}  # torch would check them; those of its parts count
    vars(composed)["parts"] = hooks  # for `register_comm_hook`
    composed.__qualname__ = "+".join(name_of(hook) for _, hook in hooks)
    return composed
