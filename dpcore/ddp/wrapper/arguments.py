"""The constructor's arguments: checks, combinations that exclude each other, and conversions."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dpcore import _C
from dpcore.comm.communicators.checks import check_integer, check_is, is_number
from dpcore.ddp.wrapper.module_state import broadcast_values, check_same_model
from dpcore.ddp.wrapper.nesting import check_inside
from dpcore.ddp.wrapper.parameters import kept_parameters
from dpcore.errors import Error, Unsupported

if TYPE_CHECKING:
    from dpcore.ddp.wrapper.wrapped import Wrapped

_MIB = 1024 * 1024
_MOST_MIB = 2**40
_FIRST_CAPS = [1 * _MIB, 25 * _MIB]
_CAPS_ACROSS_STEPS = [1 * _MIB]  # small: the first module of a forward waits for a whole bucket


_FLAGS = [
    "init_sync",
    "find_unused_parameters",
    "check_reduction",
    "gradient_as_bucket_view",
    "static_graph",
    "skip_all_reduce_unused_params",
    "batched_grad_copy",
    "lazy_bucket_allocation",
    "deterministic",
]


def _listed(delayed: Any) -> Sequence[Any]:
    """The entries to check. None of an iterator, which can be read only once."""
    if isinstance(delayed, Iterator):
        return ()
    return delayed if isinstance(delayed, list | tuple) else [delayed]


def _is_named_parameter(pair: Any) -> bool:
    return isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[1], torch.Tensor)


def check_kinds(given: Mapping[str, Any]) -> None:
    """Checks the type of each argument of the constructor, given by name."""
    check_is("True or False", **{name: given[name] for name in _FLAGS})
    for name in ("broadcast_buffers", "forward_sync_buffers"):
        check_is("True or False", or_none=True, **{name: given[name]})
    check_integer(given["dim"], "dim")
    if given["virtual_ranks"] is not None:
        check_integer(given["virtual_ranks"], "virtual_ranks", 1)
    if isinstance(given["schedule"], str):
        check_is("a string", schedule=given["schedule"])
    check_is("a string", or_none=True, mistakes=given["mistakes"], gradients=given["gradients"])
    cap, caps = given["bucket_cap_mb"], given["bucket_cap_mb_list"]
    if not isinstance(cap, str):
        check_is("a number", or_none=True, bucket_cap_mb=cap)
    if caps is not None and not (isinstance(caps, list | tuple) and all(map(is_number, caps))):
        raise TypeError(f"bucket_cap_mb_list: expected a list of numbers of MiB, not {caps!r}")
    hooked = given["param_to_hook_all_reduce"]
    if hooked is not None and not isinstance(hooked, torch.Tensor):
        raise TypeError(f"param_to_hook_all_reduce: expected a parameter, not {hooked!r}")
    delayed = given["delay_all_reduce_named_params"]
    if delayed is not None and not all(map(_is_named_parameter, _listed(delayed))):
        raise TypeError(
            f"delay_all_reduce_named_params: expected a list of (name, parameter), not {delayed!r}"
        )
    mixed = given["mixed_precision"]
    if mixed is not None and not hasattr(mixed, "param_dtype"):
        raise TypeError(
            "mixed_precision: expected torch.nn.parallel.distributed._MixedPrecision, not "
            f"{mixed!r}"
        )


def check_parameters(
    trained: Sequence[tuple[str, torch.Tensor]], module: nn.Module, ignored: set[str]
) -> None:
    """Raises for parameters that cannot be wrapped."""
    if not trained:
        raise Error("DataParallel: the module has no parameter that requires a gradient")
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise Error(
                f"DataParallel: {name} has no shape yet; run a forward of the module first, so "
                "that its lazy layers are made"
            )
    buffers = [(name, buffer) for name, buffer in module.named_buffers() if name not in ignored]
    for name, tensor in [*kept_parameters(module, ignored), *buffers]:
        if tensor.layout == torch.strided and not tensor.is_meta:
            _C.check_memory(tensor, f"DataParallel: {name}")
    check_inside(module, trained)
    kinds = {parameter.device.type for _, parameter in trained}
    if len(kinds) > 1:
        raise Unsupported(f"DataParallel: parameters are on {sorted(kinds)}; one kind is needed")


def buffer_options(
    broadcast_buffers: bool | None, forward_sync_buffers: bool | None
) -> tuple[bool, bool]:
    """Whether buffers are sent (before each forward, in the constructor). ``broadcast_buffers`` is
    torch's older name; False means neither."""
    if broadcast_buffers is not None:
        instead = (
            "; forward_sync_buffers is given too, and overrides it"
            if forward_sync_buffers is not None
            else ": say forward_sync_buffers, which leaves the constructor's broadcast on"
        )
        warnings.warn(
            f"broadcast_buffers is deprecated by torch{instead}", FutureWarning, stacklevel=4
        )
    if forward_sync_buffers is not None:
        return forward_sync_buffers, True
    wanted = broadcast_buffers is not False
    return wanted, wanted


def bucket_caps(
    bucket_cap_mb: float | str | None,
    caps_mb: Sequence[float] | None,
    finds_unused: bool,
    across_steps: bool,
) -> tuple[list[int], str]:
    """Bytes of the first bucket, of the second, ...; the last one repeats. And their origin:
    "given", chosen by measurement ("auto"), or chosen only if that changes no bit ("default")."""
    if isinstance(bucket_cap_mb, str):
        if bucket_cap_mb != "auto" or caps_mb or finds_unused:
            raise Unsupported(
                f'bucket_cap_mb={bucket_cap_mb!r}: pass a number of MiB, or "auto", which chooses '
                "when buckets are rebuilt after the first step. That excludes bucket_cap_mb_list, "
                "and find_unused_parameters, with which buckets are not rebuilt"
            )
        return _FIRST_CAPS, "auto"
    given = caps_mb or ([] if bucket_cap_mb is None else [bucket_cap_mb])
    if not all(0 <= size < _MOST_MIB for size in given):
        raise Error(
            f"the size of a bucket is a number of MiB, at least 0 and below {_MOST_MIB}; "
            f"bucket_cap_mb or bucket_cap_mb_list says {given}"
        )
    if given:
        return [int(size * _MIB) for size in given], "given"
    return _CAPS_ACROSS_STEPS if across_steps else _FIRST_CAPS, "default"


def gradients_of(asked: str | None) -> str:
    """The argument, or else DPCORE_GRADIENTS, or else "born". Ranks may differ in it."""
    said = os.environ.get("DPCORE_GRADIENTS") or "born"
    where, mode = ("gradients", asked) if asked is not None else ("DPCORE_GRADIENTS", said)
    if mode not in ("born", "copied"):
        raise Unsupported(f"{where}={mode!r}: use born or copied")
    return mode


def compared(model: Wrapped) -> dict[str, Any]:
    """Options that must agree on all ranks."""
    return {
        "bucket_cap_mb": ", ".join(f"{cap / _MIB:g}" for cap in model._caps)
        if model._caps_are == "given"
        else model._caps_are,
        "schedule": model._schedule_is,
        "deterministic": model._deterministic,
        "find_unused_parameters": model.find_unused_parameters,
        "static_graph": model.static_graph,
        "skip_all_reduce_unused_params": model.skip_all_reduce_unused_params,
        "forward_sync_buffers": model.forward_sync_buffers,
        "virtual_ranks": model.virtual_ranks,
        "mistakes": "looked for" if model._mistakes.is_on else "ignored",
        "DPCORE_CHECK_EVERY": os.environ.get("DPCORE_CHECK_EVERY") or "0",
    }


def make_equal(
    model: Wrapped,
    trained: Sequence[tuple[str, nn.Parameter]],
    delayed: Sequence[tuple[str, nn.Parameter]],
    buffers: bool,
) -> None:
    """Makes the model equal on all ranks: the same parameters, the same number, rank 0's values."""
    group, sent = model._model_group, model._buffers_by_name() if buffers else {}
    everything = [*trained, *delayed]
    number = check_same_model(model.group, everything, sent, compared(model), group.number)
    group.agree_on(number)
    values = [*model._module_parameters, *(p for _, p in delayed), *sent.values()]
    broadcast_values(group, [value.detach() for value in values])


def devices(
    device_ids: Sequence[Any] | None,
    output_device: Any,
    parameters: Sequence[torch.Tensor],
) -> tuple[list[int] | None, int | None]:
    """The device that inputs are moved to, if any."""
    if hasattr(device_ids, "all_reduce"):
        raise TypeError(
            "DataParallel(model, comm): device_ids come second, as in torch DDP; write comm=comm"
        )
    if device_ids is not None and not isinstance(device_ids, list | tuple):
        raise TypeError(f"device_ids: expected a list of one device, not {device_ids!r}")
    if output_device is not None and not isinstance(output_device, int | str | torch.device):
        raise TypeError(f"output_device: expected a device, not {output_device!r}")
    if device_ids is not None and len(device_ids) > 1:
        raise Unsupported(
            f"device_ids={list(device_ids)}: a rank has one device; start a process for each"
        )
    own = {parameter.device for parameter in parameters}
    alone = len(own) == 1 and next(iter(own)).type != "cpu"
    if device_ids and alone:
        index = torch._utils._get_device_index
        output = device_ids[0] if output_device is None else output_device
        return [index(device, True) for device in device_ids], index(output, True)
    if device_ids or output_device:
        raise Unsupported(
            f"device_ids={device_ids}, output_device={output_device}: they are for modules on one "
            f"accelerator, and this one is on {sorted(map(str, own))}; leave them out"
        )
    return None, None


def check_together(
    delayed: Any, hooked: Any, process_group: Any, device_mesh: Any, module: Any
) -> Any:
    """Arguments that exclude or need each other. Returns the process group."""
    if not isinstance(module, nn.Module):
        what = f"the class {module.__name__}" if isinstance(module, type) else repr(module)
        raise TypeError(f"DataParallel takes an instance of torch.nn.Module, and this is {what}")
    if (delayed is None) != (hooked is None):
        raise Unsupported(
            "delay_all_reduce_named_params says which gradients are delayed and "
            "param_to_hook_all_reduce until when: give both or neither"
        )
    if device_mesh is None:
        return process_group
    if process_group is not None:
        raise Error("Cannot specify both process_group and device_mesh arguments.")
    if not hasattr(device_mesh, "mesh_dim_names"):
        raise TypeError(f"device_mesh: expected a DeviceMesh of torch, not {device_mesh!r}")
    if device_mesh.ndim != 1:
        raise Error(f"Only 1D device mesh is supported, but got {device_mesh}.")
    if device_mesh._get_root_mesh() != device_mesh:
        from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

        _pre_dp_module_transform(module)
    return device_mesh.get_group(mesh_dim=0)


def refuse_virtual(model: Any, what: str) -> None:
    """Raises if the model has virtual ranks, whose gradients reach no bucket."""
    if getattr(model, "__dict__", {}).get("_virtual") is not None:
        raise Unsupported(f"{what} does not work in this version for a model with virtual_ranks")


def warn_of_no_effect(check_reduction: bool, lazy_bucket_allocation: bool) -> None:
    if check_reduction:
        warnings.warn(
            "check_reduction is deprecated by torch and has no effect: reductions are always "
            "checked",
            FutureWarning,
            stacklevel=3,
        )
    if lazy_bucket_allocation:
        warnings.warn(
            "lazy_bucket_allocation has no effect: buckets keep their memory between steps",
            UserWarning,
            stacklevel=3,
        )


def moved(model: Wrapped, inputs: Any, kwargs: Any) -> tuple[Any, Any]:
    """Moves the arguments of forward to the device of ``device_ids``."""
    from torch.distributed.utils import _to_kwargs

    assert model.device_ids
    device = torch.device(model.device_type, model.device_ids[0])
    by_device, kwargs_by_device = _to_kwargs(
        inputs, kwargs, device, model.use_side_stream_for_tensor_copies
    )
    return by_device[0], kwargs_by_device[0]
