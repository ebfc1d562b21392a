"""``model.reducer``: the methods of torch's reducer that hooks, tests and scripts call."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dpcore.ddp.torch_face.comm_hooks import GradBucket, bucket_of, completed
from dpcore.ddp.torch_face.logging_data import buckets_of
from dpcore.ddp.wrapper.completion import raise_if_incomplete
from dpcore.ddp.wrapper.outputs import when_backward_begins

if TYPE_CHECKING:
    from dpcore.ddp.wrapper.wrapped import Wrapped


class ReducerFace:
    """A proxy for the model's reducer. The model owns it, so its reference to the model is weak."""

    def __init__(self, model: Wrapped) -> None:
        self._of = weakref.ref(model)
        self.prepared = 0  # calls of ``prepare_for_backward``

    @property
    def _model(self) -> Wrapped:
        model = self._of()
        if model is None:
            raise ReferenceError("the wrapped model of this reducer is gone")
        return model

    def prepare_for_backward(self, outputs: Any) -> None:
        """Prepares a backward from ``outputs`` that runs within forward; the end of that forward
        then prepares none. If the last backward missed gradients, this one completes it."""
        model = self._model
        reducer = model._reducer
        self.prepared += 1
        if reducer.is_incomplete:
            return
        reducer.wait_for_gradients()
        if reducer.is_recorded:
            reducer.forward_ends()
            when_backward_begins(outputs, reducer.backward_begins)
        model._expect_gradients(outputs, model.require_backward_grad_sync)

    def was_prepared_since(self, before: int) -> bool:
        """Whether a backward was prepared since ``prepared`` was ``before``. Raises if it is
        incomplete."""
        if self.prepared == before:
            return False
        raise_if_incomplete(self._model)
        return True

    def _run_allreduce_hook(self, bucket: Any) -> Any:
        """Sums the bucket's buffer over the ranks, in place."""
        model, buffer = self._model, bucket.buffer()
        if model._torch_group is not None and model.backend.startswith("torch"):
            return dist.all_reduce(buffer, group=model._torch_group, async_op=True).get_future()
        model._model_group.all_reduce(buffer, "sum", async_op=False)
        return completed(buffer)

    def _run_comm_hook(self, bucket: Any) -> Any:
        runner = self._model._hook_runner
        return self._run_allreduce_hook(bucket) if runner is None else runner.run(bucket)

    def _get_zeros_like_grad_buckets(self) -> list[GradBucket]:
        model = self._model
        count = len(buckets_of(model))
        made = []
        for number in range(count):
            last = number == count - 1
            bucket = bucket_of(model._reducer, model._parameters_by_number, number, last)
            bucket.set_buffer(torch.zeros_like(bucket.buffer()))
            made.append(bucket)
        return made

    def _get_local_used_map(self) -> torch.Tensor:
        """How many ranks used each parameter."""
        model = self._model
        return torch.tensor(model._reducer.used_counts, dtype=torch.int32, device=model.device)

    def _ddp_graph_static(self) -> bool:
        return self._model._reducer.is_graph_static

    def _rebuild_buckets(self) -> bool:
        model = self._model
        if not model._reducer.wants_rebuild:
            return False
        type(model)._rebuild_buckets(model)
        return not model._reducer.wants_rebuild

    def _check_reducer_finalized(self) -> None:
        raise_if_incomplete(self._model)

    def _remove_autograd_hooks(self) -> None:
        self._model._reducer.stop_listening()

    def _set_static_graph(self) -> None:
        self._model._reducer.set_static_graph()

    def _set_ddp_runtime_logging_sample_rate(self, steps: int) -> None:
        self._model._reducer.sample_every(steps)

    def _install_post_backward_futures(self, futures: Any) -> None:
        self._model._futures_of_buffers.extend(futures)

    def _set_optimizer_in_backward(self) -> None:
        """Does nothing: gradients that the hook has removed stay removed anyway."""
