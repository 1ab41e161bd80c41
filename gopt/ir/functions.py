"""The model's own functions: how large a graph becomes when they are written out, counted before anyone does so."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

from onnx import ModelProto

from gopt import limits
from gopt.errors import InputError
from gopt.ir.external_data import show
from gopt.ir.nodes import nested

Key = tuple[str, str, str]


def check_functions(model: ModelProto) -> None:
    """Raise InputError where functions call themselves, or become more than FUNCTION_NODES or FUNCTION_DEPTH.

    The checker, shape inference and ``expand`` write them out, call by call: doublings take forever or all memory.
    """
    bodies = {(each.domain, each.name, each.overload): each.node for each in model.functions}
    if not bodies:
        return
    sizes: dict[Key, int] = {}
    calls: dict[Key, list[Key]] = {}
    for key, nodes in bodies.items():
        called = [(each.domain, each.op_type, each.overload) for each in nested(nodes)]
        sizes[key], calls[key] = len(called), [callee for callee in called if callee in bodies]
    nodes, depth = _extents(sizes, calls)
    for key in bodies:
        _refuse(key, nodes[key], depth[key])
    total = 0
    for node in nested(model.graph.node):
        key = (node.domain, node.op_type, node.overload)
        total += nodes.get(key, 0)
        _refuse(key, total, 0)


def _extents(sizes: dict[Key, int], calls: dict[Key, list[Key]]) -> tuple[dict[Key, int], dict[Key, int]]:
    """Nodes and depth of every function with all that it calls; raises InputError for a circle."""
    nodes: dict[Key, int] = {}
    depth: dict[Key, int] = {}
    try:
        for key in TopologicalSorter(calls).static_order():
            inner = calls[key]
            # Capped: a hostile chain of doublings would make an endless number.
            nodes[key] = min(sizes[key] + sum(nodes[callee] for callee in inner), limits.FUNCTION_NODES + 1)
            depth[key] = 1 + max((depth[callee] for callee in inner), default=0)
    except CycleError as error:
        raise InputError(f"function {show(error.args[1][0][1])} calls itself") from None
    return nodes, depth


def _refuse(key: Key, nodes: int, depth: int) -> None:
    if nodes > limits.FUNCTION_NODES:
        most = limits.FUNCTION_NODES
        raise InputError(f"function {show(key[1])} makes the graph longer than {most} nodes (FUNCTION_NODES)")
    if depth > limits.FUNCTION_DEPTH:
        most = limits.FUNCTION_DEPTH
        raise InputError(f"function {show(key[1])} nests calls of functions more than {most} deep (FUNCTION_DEPTH)")
