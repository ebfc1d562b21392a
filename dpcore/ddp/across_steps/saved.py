"""The optimizer's state under "zero1", in the forms in which it is saved and loaded.

``part`` gives one rank's state: for each of its pieces, the state and its place in the parameter.
``whole`` joins the parts of all ranks in the format of torch's optimizers.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from dpcore.comm.communicators.read_back import numbers_in, on_host
from dpcore.errors import Mismatch, Unsupported

_KEY = "dpcore"


class SavedPiece(NamedTuple):
    """A piece of a parameter and its state, which may be empty."""

    parameter: int  # its number, as torch counts them in a state_dict
    begin: int  # in the parameter's dense memory
    end: int
    size: torch.Size  # of the whole parameter
    stride: tuple[int, ...]
    state: Mapping[str, Any]


def indices(groups: list[dict[str, Any]]) -> dict[int, int]:
    """The number of each parameter in the groups, by its id."""
    found: dict[int, int] = {}
    for group in groups:
        for parameter in group["params"]:
            found.setdefault(id(parameter), len(found))
    return found


def part(
    pieces: list[SavedPiece], groups: list[dict[str, Any]], rank: int, world_size: int
) -> dict[str, Any]:
    """This rank's ``state_dict``. As in torch, its tensors are not copies."""
    index = indices(groups)
    return {
        "state": {piece.parameter: dict(piece.state) for piece in pieces if piece.state},
        "param_groups": [
            {**group, "params": [index[id(p)] for p in group["params"]]} for group in groups
        ],
        _KEY: {
            "rank": rank,
            "world_size": world_size,
            "pieces": {
                piece.parameter: (piece.begin, piece.end, tuple(piece.size), piece.stride)
                for piece in pieces
            },
        },
    }


def whole(own: dict[str, Any], group: Any, device: torch.device) -> dict[str, Any]:
    """The whole state, on the CPU. All ranks call it, each with its part. ``device`` is that of the
    tensors that the group communicates."""
    state: dict[int, dict[str, Any]] = {}
    sent = {"state": own["state"], "pieces": own[_KEY]["pieces"]}
    for one in _of_all_ranks(sent, group, device):
        for index, values in one["state"].items():
            begin, end, size, stride = one["pieces"][index]
            target = state.setdefault(index, {})
            for key, value in values.items():
                if not _is_cut(value, end - begin):
                    target[key] = value
                    continue
                if key not in target:
                    target[key] = torch.empty_strided(size, stride, dtype=value.dtype)
                _dense(target[key])[begin:end] = value
    return {"state": dict(sorted(state.items())), "param_groups": own["param_groups"]}


def _is_cut(value: Any, length: int) -> bool:
    """Whether a value has one entry per element of a piece, rather than one per parameter."""
    return isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() == length


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor with dense strides, as one row."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _of_all_ranks(own: dict[str, Any], group: Any, device: torch.device) -> list[dict[str, Any]]:
    file = io.BytesIO()
    torch.save(own, file)
    sent = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    gathered = torch.zeros(group.world_size, dtype=torch.int64, device=device)
    group.all_gather(gathered, torch.tensor([sent.numel()], device=device))
    lengths = numbers_in(gathered, group)
    longest = max(lengths)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: sent.numel()] = sent
    everything = padded.new_empty(group.world_size * longest)
    group.all_gather(everything, padded)
    contents = bytes(on_host(everything, group).numpy())
    starts = range(0, len(contents), longest)
    return [
        torch.load(io.BytesIO(contents[at : at + length]), map_location="cpu", weights_only=True)
        for at, length in zip(starts, lengths, strict=True)
    ]


def check_loadable(
    state_dict: Mapping[str, Any], groups: list[dict[str, Any]], rank: int, world_size: int
) -> None:
    """Raises if the state is of another rank, world size or model."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise TypeError(
            "load_state_dict: expected what state_dict() or full_state_dict() gave, with 'state' "
            f"and 'param_groups', not a {type(state_dict).__name__}"
        )
    theirs = [len(group["params"]) for group in state_dict["param_groups"]]
    ours = [len(group["params"]) for group in groups]
    if theirs != ours:
        raise Mismatch(
            f"load_state_dict: parameters by group are {theirs} in what was saved, and {ours} in "
            "this optimizer"
        )
    about = state_dict.get(_KEY)
    if about is not None and (about["rank"], about["world_size"]) != (rank, world_size):
        raise Unsupported(
            f"load_state_dict: this is the part of rank {about['rank']} of {about['world_size']}, "
            f"and this is rank {rank} of {world_size}. Save optimizer.full_state_dict(), which any "
            "number of ranks can load"
        )


def check_whole(optimizer: Optimizer) -> None:
    """Raises if the plain optimizer has loaded the part of a single rank, which torch's
    ``load_state_dict`` accepts because it does not compare shapes."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            _check_no_part(key, value, parameter.shape)


def _check_no_part(key: str, value: Any, shape: torch.Size) -> None:
    is_row = isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() > 1
    if is_row and value.shape != shape:
        raise Mismatch(
            f"DistributedOptimizer: {key} of a parameter of shape {list(shape)} has the shape "
            f"{list(value.shape)}, as in the part of one rank, which state_dict() gives, and with "
            "it torch.distributed.checkpoint. Save optimizer.full_state_dict(), which the plain "
            "optimizer can load, too"
        )


def by_number(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict with states keyed by the parameter's number. As in torch, only the order in
    the groups counts, so a parameter may be saved under any key: torch.distributed.checkpoint
    uses names. A state whose key is in no group is left out."""
    numbers: dict[Any, int] = {}
    for group in state_dict["param_groups"]:
        for name in group["params"]:
            numbers.setdefault(name, len(numbers))
    saved = state_dict["state"].items()
    state = {numbers[name]: values for name, values in saved if name in numbers}
    return {**state_dict, "state": state}


def take_hyperparameters(state_dict: Mapping[str, Any], groups: list[dict[str, Any]]) -> None:
    """Takes the saved hyperparameters of the groups, without their parameters."""
    for group, theirs in zip(groups, state_dict["param_groups"], strict=True):
        group.update({key: value for key, value in theirs.items() if key != "params"})


def state_of(state_dict: Mapping[str, Any], piece: SavedPiece) -> dict[str, Any]:
    """The state of a piece, from a state dict of either format."""
    found = state_dict["state"].get(piece.parameter, {})
    about = state_dict.get(_KEY)
    if about is not None:
        begin, end, *_ = about["pieces"].get(piece.parameter, (0, 0))
        if found and (begin, end) != (piece.begin, piece.end):
            raise Mismatch(
                f"load_state_dict: of parameter {piece.parameter}, this rank held elements {begin} "
                f"to {end} when it was saved, and holds {piece.begin} to {piece.end} now: buckets "
                "were cut differently. Save optimizer.full_state_dict(), which fits any buckets"
            )
        return {key: _copied(value) for key, value in found.items()}
    state = {}
    for key, value in found.items():
        _check_no_part(key, value, piece.size)
        if key != "step" and isinstance(value, torch.Tensor) and value.shape == piece.size:
            laid = torch.empty_strided(piece.size, piece.stride, dtype=value.dtype)
            laid.copy_(value)
            state[key] = _dense(laid)[piece.begin : piece.end].clone()
        else:
            state[key] = _copied(value)
    return state


def converted(
    state: Mapping[str, Any], parameter: torch.Tensor, group: Mapping[str, Any]
) -> dict[str, Any]:
    """A state converted as torch does it: to the parameter's type and device, except the step
    count, which some optimizers keep on the CPU."""
    dtype = parameter.dtype if parameter.dtype.is_floating_point else None
    counts_there = group.get("capturable") or group.get("fused")
    found = {}
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            found[key] = value
        elif key == "step":
            found[key] = value.to(parameter.device) if counts_there else value
        else:
            found[key] = value.to(parameter.device, dtype)
    return found


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
