"""The fixed tree in which the shards' gradients are added, whatever the number of ranks.

A node of the tree covers the shards from ``begin`` up to ``end``. Its left child has a power of
two of them, at a multiple of that number, and its right child has as many, or what is left at the
end of the batch:

    shards                0   1   2   3   4   5   6
    nodes of two          [0, 2)  [2, 4)  [4, 6)  |
    nodes of four         [0, 4)          [4, 7)--+
    the root              [0, 7)

A rank has neighbouring shards, and adds them up to the largest nodes that it can complete, as a
counter carries: at most 2 * log2(shards) of them. The ranks' nodes, in order, are added in the same
way. So the additions are always those of the tree, and their rounding too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

Node = tuple[int, int]
_Value = TypeVar("_Value")


def part_of(number: int, parts: int, whole: int) -> range:
    """Part ``number`` of ``parts`` of the numbers below ``whole``; their sizes differ by one at
    most.

    >>> [part_of(rank, 3, 8) for rank in range(3)]
    [range(0, 2), range(2, 5), range(5, 8)]
    """
    return range(number * whole // parts, (number + 1) * whole // parts)


def are_children(left: Node, right: Node, shards: int) -> bool:
    """Whether two neighbouring nodes have one parent.

    >>> are_children((4, 6), (6, 7), 7), are_children((2, 4), (4, 6), 7)
    (True, False)
    """
    begin, middle = left
    size = middle - begin
    return (
        size & (size - 1) == 0
        and begin % (2 * size) == 0
        and right == (middle, min(middle + size, shards))
    )


def push(
    nodes: list[tuple[Node, _Value]],
    node: Node,
    value: _Value,
    add: Callable[[_Value, _Value, Node], _Value],
    shards: int,
) -> None:
    """Appends a node, and puts the sum of two children in their place while there are two. ``add``
    also gets the node whose sum it is."""
    while nodes and are_children(nodes[-1][0], node, shards):
        left, its = nodes.pop()
        node = (left[0], node[1])
        value = add(its, value, node)
    nodes.append((node, value))


def nodes_of(own: Iterable[int], shards: int) -> list[Node]:
    """The largest nodes that a rank with these shards can complete.

    >>> nodes_of(range(3, 8), 8), nodes_of(range(8), 8)
    ([(3, 4), (4, 8)], [(0, 8)])
    """
    nodes: list[tuple[Node, None]] = []
    for shard in own:
        push(nodes, (shard, shard + 1), None, lambda left, right, node: None, shards)
    return [node for node, _ in nodes]
