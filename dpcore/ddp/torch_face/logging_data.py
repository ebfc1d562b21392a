"""``model._get_ddp_logging_data()``: torch's fields, filled from the reducer.

Times are in nanoseconds and sampled: the first ten steps and every hundredth after them
(``_set_ddp_runtime_logging_sample_rate``). ``model.bucket_report()`` has more detail, by bucket.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    from dpcore.ddp.wrapper.wrapped import Wrapped

_ENVIRONMENT = {
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
    "cuda_visible_devices": "CUDA_VISIBLE_DEVICES",
    "torch_distributed_debug": "TORCH_DISTRIBUTED_DEBUG",
}
_GLOO_ENVIRONMENT = {
    "gloo_socket_ifname": "GLOO_SOCKET_IFNAME",
    "gloo_device_transport": "GLOO_DEVICE_TRANSPORT",
}
# The C++ names of types.
_TYPES = {torch.float32: "float", torch.float64: "double", torch.float16: "c10::Half"}
_TYPES[torch.bfloat16] = "c10::BFloat16"


class Logger:
    """``model.logger``: facts about the model, such as errors and its communication hook."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}

    def set_error_and_log(self, error: str) -> None:
        self.facts.update(has_error=1, error=error)

    def _set_comm_hook_name(self, name: str) -> None:
        self.facts["comm_hook"] = name

    def _set_uneven_input_join(self) -> None:
        self.facts["join_uneven_inputs"] = 1

    def _set_static_graph(self) -> None:
        self.facts["static_graph"] = 1


def logging_data(model: Wrapped) -> dict[str, Any]:
    """The values of torch's fields, by torch's names."""
    reducer, parameters = model._reducer, model._parameters_by_number
    backend = dist.get_backend(model._torch_group) if model._torch_group else model.backend
    data: dict[str, Any] = {
        "backend_name": backend,
        "module_name": type(model.module).__name__,
        "world_size": model.group.world_size,
        "rank": model.group.rank,
        "device_ids": ", ".join(map(str, model.device_ids or [])),
        "output_device": -1 if model.output_device is None else model.output_device,
        "is_multi_device_module": int(model.is_multi_device_module),
        "broadcast_buffers": int(model.forward_sync_buffers),
        "bucket_cap_bytes": max(model._caps),
        "find_unused_parameters": int(model.find_unused_parameters),
        "gradient_as_bucket_view": int(model.gradient_as_bucket_view),
        "has_sync_bn": int(any(isinstance(m, nn.SyncBatchNorm) for m in model.module.modules())),
        "num_parameter_tensors": len(parameters),
        "total_parameter_size_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "dtypes": ", ".join(sorted({_TYPES.get(p.dtype, str(p.dtype)) for p in parameters})),
        "bucket_sizes": model._first_bucket_sizes,
    }
    data.update({field: os.environ.get(name, "N/A") for field, name in _ENVIRONMENT.items()})
    if backend == "gloo":
        data.update({f: os.environ.get(name, "N/A") for f, name in _GLOO_ENVIRONMENT.items()})
        data["gloo_num_threads"] = 2
    data.update(reducer.times())
    data["has_rebuilt_buckets"] = int(reducer.has_rebuilt)
    data["prev_iteration_grad_ready_order_indices"] = _listed(reducer.arrival_order)
    if reducer.has_rebuilt:
        buckets = buckets_of(model)
        data["rebuilt_bucket_sizes"] = bucket_sizes(model)
        data["rebuilt_per_bucket_param_indices"] = ", ".join(
            " ".join(map(str, gradients)) for _, gradients, _ in buckets
        )
    data["unused_parameter_size"] = 0
    if model.find_unused_parameters and reducer.completed > 0:
        counts = reducer.used_counts
        data["unused_parameter_size"] = sum(
            p.numel() * p.element_size()
            for p, count in zip(parameters, counts, strict=True)
            if count == 0
        )
    data["can_set_static_graph"] = int(reducer.completed > 0 and reducer.is_graph_static)
    data.update(model.logger.facts)
    return data


def buckets_of(model: Wrapped) -> list[tuple[torch.Tensor, list[int], list[torch.Tensor]]]:
    """(flat, numbers of its gradients, their parts) of every bucket."""
    return [model._reducer.bucket(number) for number in range(len(model._reducer.report()))]


def bucket_sizes(model: Wrapped) -> str:
    return _listed([bucket["bytes"] for bucket in model._reducer.report()])


def _listed(numbers: Any) -> str:
    return ", ".join(map(str, numbers))
