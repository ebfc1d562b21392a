"""Two passes over Inductor's graphs, so that gradients leave while backward still runs.

``AnnounceGradients`` sees the graph of forward and backward together, in which gradients are the
last outputs. Behind each of them it puts ``dpcore::gradient_computed(gradient, output)``, where
``output`` is the number of the edge on which autograd will deliver the gradient. The operation has
a side effect, so that nothing removes it, and returns nothing, so that nothing depends on it.

Inductor then orders what it has made by the memory that lives, and may move the operations to the
end of backward. ``behind_producers`` is the last pass over that order, and puts each of them behind
what computes its gradient. On a CPU, Inductor writes loops that follow each other into one C++
function, and an operation between them would make two of it, which take longer to compile. There
an operation waits for the next matrix product, convolution or the like, or for a few loops.

Importing this file takes seconds, because it imports Inductor: dpcore does so when dynamo compiles
a wrapped model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass

from dpcore import _C  # noqa: F401 - it defines the operation
from dpcore.ddp.compiled import torch_private

OPERATION = torch.ops.dpcore.gradient_computed.default
VERSION = 3  # of what the passes do, for the caches of Inductor

_LOOPS = 8  # that an operation waits for

torch.fx.node.has_side_effect(OPERATION)


class CacheKey(CustomGraphPass):
    """A pass over joint graphs that runs those of the program, if there are any, and whose only
    effect is on the key of Inductor's cache of graphs.

    Inductor writes into saved tensors that it takes for donated: no later backward needs them. Its
    key does not say which ones, so that a program that keeps its graph for a second backward would
    get code from the cache of one that does not, and wrong gradients without an error.
    """

    def __init__(self, before: Any = ()) -> None:
        self.before = before if isinstance(before, (list, tuple)) else (before,)

    def __call__(self, graph: torch.fx.Graph) -> None:
        for one in self.before:
            one(graph)

    def uuid(self) -> Any | None:
        """Equal for equal graphs in all processes, so that caches serve them."""
        known = [one.uuid() if isinstance(one, CustomGraphPass) else None for one in self.before]
        return ("dpcore", VERSION, torch_private.donated(), *known) if all(known) else None


class AnnounceGradients(CacheKey):
    """Puts operations into joint graphs."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        super().__call__(graph)
        announce(graph)

    def uuid(self) -> Any | None:
        known = super().uuid()
        return known and (*known, "announces")


def announce(graph: torch.fx.Graph) -> int:
    """Puts the operation behind each gradient that the graph returns. Returns their number."""
    inputs = graph.find_nodes(op="placeholder")
    # Autograd has an edge for each tensor that went into the graph.
    tensors = [node for node in inputs if isinstance(node.meta.get("val"), torch.Tensor)]
    edge_of = {node.meta.get("desc"): number for number, node in enumerate(tensors)}
    (output,) = graph.find_nodes(op="output")
    count = 0
    for node, what in zip(output.args[0], output.meta.get("desc", ()), strict=False):
        edge = edge_of.get(getattr(what, "grad_of", None))
        if edge is None or not isinstance(node, torch.fx.Node):
            continue
        with graph.inserting_before(output):
            call = graph.call_function(OPERATION, (node, edge))
        call.meta["val"] = None
        call.meta["partitioner_tag"] = "must_be_in_backward"
        count += 1
    return count


def behind_producers(nodes: list[Any]) -> list[Any]:
    """The nodes of a schedule, with each operation behind what computes its gradient."""
    operations = [node for node in nodes if _is_operation(node)]
    if not operations:
        return nodes
    others = [node for node in nodes if not _is_operation(node)]
    made_at = {name: place for place, node in enumerate(others) for name in node.get_buffer_names()}
    followers: dict[int, list[Any]] = {}
    for node in operations:
        needed = [made_at.get(need.name, -1) for need in node.unmet_dependencies]
        followers.setdefault(max(needed, default=-1), []).append(node)
    order: list[Any] = []
    waiting = list(followers.get(-1, ()))
    loops = _LOOPS  # since the first one began to wait
    for place, node in enumerate(others):
        loops += 1
        if loops > _LOOPS or not (place and _is_loop(others[place - 1]) and _is_loop(node)):
            order += waiting
            waiting = []
        order.append(node)
        if place in followers:
            loops = loops if waiting else 0
            waiting += followers[place]
    return order + waiting


def _is_loop(node: Any) -> bool:
    """Whether Inductor writes it into one function with the loops before and behind it."""
    device = node.get_device()
    is_on_cpu = device is not None and device.type == "cpu"
    return is_on_cpu and not node.is_extern() and not node.is_template()


def _is_operation(node: Any) -> bool:
    return getattr(node.node, "op_overload", None) is OPERATION
