"""Whether a graph is sound: every value is made once and before it is read, and outputs exist."""

from __future__ import annotations

from gopt.errors import InvariantError
from gopt.ir.graph import Graph


def check_graph(graph: Graph) -> int:
    """Raise InvariantError on the first fault; returns how many reads were checked."""
    names = set(graph.inputs) | set(graph.initializers)
    reads = 0
    for node in graph.nodes:
        for name in node.reads:
            reads += 1
            if name not in names:
                raise InvariantError(f"{node.op_type} {node.label!r} reads {name!r}, which nothing makes before it")
        for name in node.outputs:
            if name in names:
                raise InvariantError(f"{name!r} is made twice, the second time by {node.op_type} {node.label!r}")
            if name:
                names.add(name)
    for name in graph.outputs:
        if name not in names:
            raise InvariantError(f"output {name!r} is made by nothing")
    return reads
