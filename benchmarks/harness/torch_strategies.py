"""torch's own ways to share a model among ranks, each as a step of training.

What tests/torch_backend/test_parallel.py holds against one process is what
benchmarks/torch_parallel.py times: the same functions, with other sizes. Every rank draws the whole
model and the whole batch, alike, on torch's default device, and keeps its part. A function of
``STRATEGIES`` is given a function that makes a ``DeviceMesh``, and gives a ``Trainer``.
"""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

UNTIL_LOCAL, AVERAGED_EVERY = 1, 2  # steps, of PostLocalSGD
Grid = Callable[..., DeviceMesh]  # grid(data=2, tensor=-1)


class Sizes(NamedTuple):
    """Of the model and its batch. ``layers``: blocks, and the head behind them."""

    width: int = 8
    words: int = 12
    tokens: int = 8
    rows: int = 16
    microbatches: int = 8
    layers: int = 8
    dtype: torch.dtype = torch.float64


class Trainer(NamedTuple):
    """``step(inputs, targets)`` of the whole batch: forward, backward, update. ``weights()``: the
    parameters that this rank knows, whole. ``unchanged``: how many first steps update nothing."""

    mesh: DeviceMesh
    step: Callable[[Tensor, Tensor], None]
    weights: Callable[[], dict[str, Tensor]]
    unchanged: int = 0


class Block(nn.Module):
    """A norm and two matrices: what a layer of a transformer is without attention."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, dtype=dtype)
        self.up = nn.Linear(width, 4 * width, dtype=dtype)
        self.down = nn.Linear(4 * width, width, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def model_of(sizes: Sizes) -> nn.Sequential:
    torch.manual_seed(5)
    blocks = [Block(sizes.width, sizes.dtype) for _ in range(sizes.layers - 1)]
    return nn.Sequential(*blocks, nn.Linear(sizes.width, sizes.words, dtype=sizes.dtype))


def batch_of(sizes: Sizes, step: int) -> tuple[Tensor, Tensor]:
    chance = torch.Generator(torch.get_default_device()).manual_seed(step)
    shape = sizes.rows, sizes.tokens
    inputs = torch.randn(*shape, sizes.width, generator=chance, dtype=sizes.dtype)
    return inputs, torch.randint(sizes.words, shape, generator=chance)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """One parameter after the other: torch's fused loops refuse those of several meshes."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False)


def grid_over(backend: str, world: int) -> Grid:
    """Makes meshes whose groups have this backend; one axis may be -1, which is the rest. Meshes of
    the same axes are one."""

    @functools.cache
    def grid(**axes: int) -> DeviceMesh:
        known = math.prod(size for size in axes.values() if size != -1)
        shape = tuple(world // known if size == -1 else size for size in axes.values())
        over = dict.fromkeys(axes, backend)
        kind = torch.get_default_device().type
        return init_device_mesh(kind, shape, mesh_dim_names=tuple(axes), backend_override=over)

    return grid


def whole(module: nn.Module) -> dict[str, Tensor]:
    """All ranks of a parameter that is shared have to ask for it."""
    found = {name: parameter.detach() for name, parameter in module.named_parameters()}
    return {
        name.removeprefix("module."): value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in found.items()
    }


def trained(
    mesh: DeviceMesh,
    module: nn.Module,
    optimizer: Any = None,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    unchanged: int = 0,
) -> Trainer:
    """A module that each rank calls with its rows, where there is an axis "data". ``unchanged``: of
    an optimizer that a hook of DDP steps, which begins so many steps late."""
    optimizer = sgd(module.parameters()) if optimizer is None else optimizer
    parts, mine = 1, 0
    for axis in mesh.mesh_dim_names or ():
        if axis != "tensor":
            parts = parts * mesh[axis].size()
            mine = mine * mesh[axis].size() + mesh.get_local_rank(axis)

    def step(inputs: Tensor, targets: Tensor) -> None:
        optimizer.zero_grad()
        with around():
            loss_of(module(inputs.chunk(parts)[mine]), targets.chunk(parts)[mine]).backward()
        if not unchanged:
            optimizer.step()

    return Trainer(mesh, step, partial(whole, module), unchanged)


# ---- tensor parallel -----------------------------------------------------------------------------


def shared_by_columns_and_rows(module: nn.Sequential, mesh: DeviceMesh, **head: Any) -> None:
    for block in module[:-1]:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    parallelize_module(module[-1], mesh, ColwiseParallel(**head))


def columns_and_rows(grid: Grid, sizes: Sizes) -> Trainer:
    mesh, module = grid(tensor=-1), model_of(sizes)
    shared_by_columns_and_rows(module, mesh, output_layouts=Replicate())
    return trained(mesh, module)


def by_tokens(grid: Grid, sizes: Sizes) -> Trainer:
    mesh, module = grid(tensor=-1), model_of(sizes)
    for block in module[:-1]:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
        parallelize_module(block, mesh, plan)
    cut = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1))
    parallelize_module(module[0], mesh, cut)
    head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    parallelize_module(module[-1], mesh, head)
    return trained(mesh, module)


def logits_that_stay_cut(grid: Grid, sizes: Sizes) -> Trainer:
    mesh, module = grid(tensor=-1), model_of(sizes)
    shared_by_columns_and_rows(module, mesh, output_layouts=Shard(-1), use_local_output=False)
    return trained(mesh, module, around=loss_parallel)


# ---- sharded data parallel -----------------------------------------------------------------------


def each_layer(share: Callable[..., Any], module: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    for layer in module:
        share(layer, mesh=mesh)
    share(module, mesh=mesh)
    return module


def sharded(grid: Grid, sizes: Sizes) -> Trainer:
    mesh = grid(data=-1)
    return trained(mesh, each_layer(fully_shard, model_of(sizes), mesh))


def sharded_in_copies(grid: Grid, sizes: Sizes) -> Trainer:
    mesh = grid(copies=2, data=-1)
    return trained(mesh, each_layer(fully_shard, model_of(sizes), mesh))


def with_tensor(share: Callable[..., Any], grid: Grid, sizes: Sizes) -> Trainer:
    mesh, module = grid(data=-1, tensor=2), model_of(sizes)
    shared_by_columns_and_rows(module, mesh["tensor"], output_layouts=Replicate())
    return trained(mesh, each_layer(share, module, mesh["data"]))


# ---- pipelines -----------------------------------------------------------------------------------


def stages_of(
    sizes: Sizes, count: int, mine: Sequence[int], mesh: DeviceMesh, data: DeviceMesh | None = None
) -> list[PipelineStage]:
    """This rank's stages. Layers keep the names that they have in the whole model."""
    layers = list(model_of(sizes).named_children())
    size = -(-len(layers) // count)
    made = []
    for stage in mine:
        part = nn.Sequential(OrderedDict(layers[stage * size : (stage + 1) * size]))
        if data is not None:
            each_layer(fully_shard, part, data)
        device, group = torch.get_default_device(), mesh.get_group("pipeline")
        made.append(PipelineStage(part, stage, count, device, group=group))
    return made


def piped(mesh: DeviceMesh, stages: Sequence[PipelineStage], schedule: Any) -> Trainer:
    """Trains this rank's stages by a schedule of torch's, each copy of the pipeline on its rows."""
    optimizer = sgd([p for stage in stages for p in stage.submod.parameters()])
    has_data = "data" in (mesh.mesh_dim_names or ())
    parts, mine = (mesh["data"].size(), mesh.get_local_rank("data")) if has_data else (1, 0)

    def step(inputs: Tensor, targets: Tensor) -> None:
        optimizer.zero_grad()
        given = [inputs.chunk(parts)[mine]] if any(stage.is_first for stage in stages) else []
        last = any(stage.is_last for stage in stages)
        schedule.step(*given, target=targets.chunk(parts)[mine] if last else None)
        optimizer.step()

    def weights() -> dict[str, Tensor]:
        return {k: v for stage in stages for k, v in whole(stage.submod).items()}

    return Trainer(mesh, step, weights)


def scheduled(
    name: str, each: int, v_shaped: bool, grid: Grid, sizes: Sizes, copies: bool = False
) -> Trainer:
    """``each``: stages on a rank, in turns (0, 4; 1, 5; ...) or as a V (0, 7; 1, 6; ...)."""
    mesh = grid(pipeline=2, data=-1) if copies else grid(pipeline=-1)
    ranks, rank = mesh["pipeline"].size(), mesh.get_local_rank("pipeline")
    count = ranks * each
    mine = [rank, count - 1 - rank] if v_shaped else list(range(rank, count, ranks))
    stages = stages_of(sizes, count, mine, mesh, mesh["data"] if copies else None)
    kind = get_schedule_class(name)
    takes: Any = stages if issubclass(kind, PipelineScheduleMulti) else stages[0]
    return piped(mesh, stages, kind(takes, sizes.microbatches, loss_fn=loss_of))


# ---- beside DistributedDataParallel --------------------------------------------------------------


def zero_optimizer(
    module: DistributedDataParallel, kind: Any, overlapping: bool, **options: Any
) -> ZeroRedundancyOptimizer:
    """torch's, of the module's group. One that overlaps steps in backward, by a hook."""
    group = module.process_group
    optimizer = ZeroRedundancyOptimizer(
        module.parameters(), kind, process_group=group, overlap_with_ddp=overlapping, **options
    )
    if overlapping:
        hook = hook_with_zero_step(default_hooks.allreduce_hook, module, optimizer)
        module.register_comm_hook(group, hook)
    return optimizer


def optimizer_in_parts(overlapping: bool, grid: Grid, sizes: Sizes) -> Trainer:
    mesh = grid(data=-1)
    module = DistributedDataParallel(
        model_of(sizes), process_group=mesh.get_group(), gradient_as_bucket_view=True
    )
    optimizer = zero_optimizer(module, torch.optim.SGD, overlapping, lr=0.1, momentum=0.9)
    return trained(mesh, module, optimizer, unchanged=2 if overlapping else 0)


def local_after_a_while(grid: Grid, sizes: Sizes) -> Trainer:
    mesh = grid(data=-1)
    group = mesh.get_group()
    module = DistributedDataParallel(model_of(sizes), process_group=group)
    state = post_localSGD_hook.PostLocalSGDState(
        group, None, UNTIL_LOCAL, post_local_gradient_allreduce=False
    )
    module.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(AVERAGED_EVERY, UNTIL_LOCAL, group)
    return trained(mesh, module, PostLocalSGDOptimizer(sgd(module.parameters()), averager))


OVERLAPPING = "ZeroRedundancyOptimizer, overlapping"
POST_LOCAL = "PostLocalSGDOptimizer"
STRATEGIES: dict[str, Callable[[Grid, Sizes], Trainer]] = {
    "ColwiseParallel, RowwiseParallel": columns_and_rows,
    "SequenceParallel": by_tokens,
    "loss_parallel": logits_that_stay_cut,
    "fully_shard (FSDP2)": sharded,
    "fully_shard in copies (HSDP)": sharded_in_copies,
    "fully_shard x tensor": partial(with_tensor, fully_shard),
    "replicate x tensor": partial(with_tensor, replicate),
    "GPipe": partial(scheduled, "GPipe", 1, False),
    "1F1B": partial(scheduled, "1F1B", 1, False),
    "Interleaved1F1B": partial(scheduled, "Interleaved1F1B", 2, False),
    "InterleavedZeroBubble": partial(scheduled, "InterleavedZeroBubble", 2, False),
    "ZBVZeroBubble": partial(scheduled, "ZBVZeroBubble", 2, True),
    "DualPipeV": partial(scheduled, "DualPipeV", 2, True),
    "Interleaved1F1B x fully_shard": partial(scheduled, "Interleaved1F1B", 2, False, copies=True),
    "ZeroRedundancyOptimizer": partial(optimizer_in_parts, False),
    OVERLAPPING: partial(optimizer_in_parts, True),
    POST_LOCAL: local_after_a_while,
}
