"""Floating-point operations of a graph: products and convolutions, a multiplication and an addition each. Elementwise
operators do not count, as is usual."""

from __future__ import annotations

from gopt.ir.graph import Graph, Node
from gopt.operators.table import operator


def flops(graph: Graph) -> int:
    """Operations of one run; a node without known sizes counts 0."""
    return sum(flops_of(graph, node) for node in graph.nodes)


def flops_of(graph: Graph, node: Node) -> int:
    """Operations of one run of a node."""
    work = operator(node.op_type).work if not node.domain else None
    if work is None:
        return 0
    types = [graph.types.get(name) for name in (*node.inputs[:2], node.outputs[0])]
    shapes = [type.dims for type in types if type is not None and type.static]
    return 2 * work(node.attributes, shapes[:-1], shapes[-1]) if len(shapes) == len(types) else 0
