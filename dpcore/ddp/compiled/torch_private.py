"""The private interfaces of torch that compiled models need, and a probe for each.

Where the probe finds something missing, graphs are cut by torch's DDPOptimizer as for torch's own
class, and a warning says so once. Tried with torch 2.11 to 2.15.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

_GRAPH_PASS = "joint_custom_post_pass"
_REORDERS = "reorder_for_compute_comm_overlap"
_PASSES = "reorder_for_compute_comm_overlap_passes"


@functools.cache
def missing() -> str:
    """The name of the first interface that this torch lacks; empty if it has all of them."""
    try:
        from torch._dynamo.backends.distributed import DDPOptimizer
        from torch._functorch._aot_autograd.descriptors import GradAOTOutput
        from torch._functorch.partitioners import _must_be_in_backward  # noqa: F401
        from torch._inductor import config as of_inductor
        from torch._inductor.custom_graph_pass import CustomGraphPass  # noqa: F401
        from torch._inductor.scheduler import BaseSchedulerNode
        from torch._inductor.utils import get_donated_idxs  # noqa: F401
    except ImportError as problem:
        return str(problem)
    wanted = {
        "DDPOptimizer.compile_fn": hasattr(DDPOptimizer, "compile_fn"),
        "DDPOptimizer.backend_compile_fn": "backend_compile_fn"
        in inspect.signature(DDPOptimizer).parameters,
        "GradAOTOutput.grad_of": "grad_of" in getattr(GradAOTOutput, "__annotations__", {}),
        "BaseSchedulerNode.get_buffer_names": hasattr(BaseSchedulerNode, "get_buffer_names"),
        "_TorchCompileInductorWrapper.config": "self.config"
        in inspect.getsource(vars(torch).get("_TorchCompileInductorWrapper", object)),
        **{f"torch._inductor.config.{name}": hasattr(of_inductor, name)
           for name in (_GRAPH_PASS, _REORDERS, _PASSES)},
    }  # fmt: skip
    return next((name for name, is_there in wanted.items() if not is_there), "")


def when_dynamo_compiles(
    compile_graph: Callable[[Any, Any, Any, Callable[[], Any]], Any],
    is_ours: Callable[[], bool],
) -> None:
    """Calls ``compile_graph(backend, graph, inputs, cut)`` for each graph that dynamo compiles in
    the forward of a wrapped model, where ``cut()`` is what torch does: it cuts the graph. Buckets
    of the model whose forward runs may be smaller than torch's first bucket, which DDPOptimizer
    refuses, if ``is_ours`` says that the model is not of torch's own class."""
    from torch._dynamo.backends.distributed import DDPOptimizer

    torchs, torchs_init = DDPOptimizer.compile_fn, DDPOptimizer.__init__
    least = vars(torch.distributed)["_DEFAULT_FIRST_BUCKET_BYTES"]

    @functools.wraps(torchs_init)
    def init(self: Any, bucket_bytes_cap: int, *args: Any, **named: Any) -> None:
        cap = max(bucket_bytes_cap, least) if is_ours() else bucket_bytes_cap
        torchs_init(self, cap, *args, **named)

    def compile_fn(self: Any, graph: Any, inputs: Any, **configs: Any) -> Any:
        cut = functools.partial(torchs, self, graph, inputs, **configs)
        return compile_graph(self.backend_compile_fn, graph, inputs, cut)

    DDPOptimizer.__init__ = init  # type: ignore[method-assign]
    DDPOptimizer.compile_fn = compile_fn  # type: ignore[method-assign, assignment]


def why_dynamo_does_not_ask() -> str:
    """Why it does not ask which model's forward is running; empty if it does."""
    from torch._dynamo import config

    asks = config.optimize_ddp in (True, "ddp_optimizer")
    return "" if asks else f"torch._dynamo.config.optimize_ddp is {config.optimize_ddp!r}"


def is_compiling() -> bool:
    """Whether functions that are called from here are to be compiled."""
    callback: Any = torch._C._dynamo.eval_frame.get_eval_frame_callback()
    return callback is not None and callback is not False


def is_skipped(module: torch.nn.Module) -> bool:
    """Whether dynamo skips the module's forward, as it does torch's own files."""
    kind = type(module)
    return kind.__call__ is torch.nn.Module.__call__ and _skips(kind.forward)


@functools.lru_cache(maxsize=256)
def _skips(function: Callable[..., Any]) -> bool:
    from torch._dynamo import trace_rules

    return bool(trace_rules.check(function))


def in_a_frame_of_its_own(module: torch.nn.Module) -> Callable[..., Any]:
    """What ``torch.compile(module)`` makes of a module whose forward dynamo skips."""
    from torch._dynamo.external_utils import wrap_inline

    return wrap_inline(module)


def is_inductor(backend: Any) -> bool:
    """Whether it is what ``torch.compile`` makes of Inductor."""
    kind: Any = vars(torch)["_TorchCompileInductorWrapper"]
    return isinstance(_innermost(backend), kind)


def takes_operations(inductor: Any) -> bool:
    """Whether its wrappers are in Python, and no option names another pass over joint graphs."""
    from torch._inductor import config

    options = {"cpp_wrapper": config.cpp_wrapper, **_innermost(inductor).config}
    return not options["cpp_wrapper"] and _GRAPH_PASS not in options


def _innermost(backend: Any) -> Any:
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return backend


def donated() -> tuple[int, ...]:
    """Numbers of the saved tensors that the backward which is being compiled may overwrite."""
    from torch._inductor.utils import get_donated_idxs

    return tuple(get_donated_idxs() or ())


def has_graphs_within(graph: Any) -> bool:
    """Whether the graph calls others with inputs of their own, as regional compilation does."""
    return any(
        "invoke_subgraph" in str(node.target)
        for part in graph.modules()
        if isinstance(part, torch.fx.GraphModule)
        for node in part.graph.nodes
    )


def options_of_passes(
    graph_pass: Any,
    scheduler_pass: Callable[[list[Any]], list[Any]] | None,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Options of Inductor for these passes; a scheduler pass comes after those in ``options``."""
    from torch._inductor import config

    ours = {_GRAPH_PASS: graph_pass}
    if scheduler_pass is not None:
        reorders = options.get(_REORDERS, getattr(config, _REORDERS))
        others = options.get(_PASSES, getattr(config, _PASSES)) if reorders else []
        ours |= {_REORDERS: True, _PASSES: [*others, scheduler_pass]}
    return ours


@contextlib.contextmanager
def passes(
    backend: Any,
    make_graph_pass: Callable[[Any], Any],
    scheduler_pass: Callable[[list[Any]], list[Any]] | None = None,
) -> Iterator[None]:
    """Graphs that are given to this Inductor in the block go through these passes, after those of
    the program, also when their backward is compiled later, as it runs first."""
    from torch._inductor import config

    inductor = _innermost(backend)
    options = inductor.config
    before = options.get(_GRAPH_PASS, getattr(config, _GRAPH_PASS))
    graph_pass = make_graph_pass(before if before is not None else ())
    inductor.config = {**options, **options_of_passes(graph_pass, scheduler_pass, options)}
    try:
        yield
    finally:
        inductor.config = options
