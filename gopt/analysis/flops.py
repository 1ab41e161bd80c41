"""Floating-point operations of a graph: products and convolutions, a multiplication and an addition each. Elementwise
operators do not count, as is usual."""

from __future__ import annotations

from collections.abc import Callable

from gopt.ir.graph import Graph, Node
from gopt.operators.operator import Shape
from gopt.operators.table import operator


def flops(graph: Graph) -> int:
    """Operations of one run; a node without known sizes counts 0."""
    return sum(flops_of(graph, node) for node in graph.nodes)


def flops_of(graph: Graph, node: Node) -> int:
    """Operations of one run of a node."""

    def shape(name: str) -> Shape | None:
        type = graph.types.get(name)
        return type.dims if type is not None and type.static else None

    return node_flops(node, shape)


def node_flops(node: Node, shape: Callable[[str], Shape | None]) -> int:
    """Operations of one run of a node; ``shape``: the shape of a value, None where it is unknown."""
    work = operator(node.op_type).work if not node.domain else None
    if work is None:
        return 0
    shapes = [found for name in (*node.inputs[:2], node.outputs[0]) if (found := shape(name)) is not None]
    return 2 * work(node.attributes, shapes[:-1], shapes[-1]) if len(shapes) == len(node.inputs[:2]) + 1 else 0
