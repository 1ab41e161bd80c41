"""The model's own functions: how large a graph becomes when functions are written out, counted beforehand."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from copy import deepcopy
from graphlib import CycleError, TopologicalSorter

import onnx.inliner
from onnx import ModelProto, NodeProto

from gopt import limits
from gopt.errors import InputError, UnsupportedError
from gopt.ir.external_data import show
from gopt.ir.nodes import nested

Key = tuple[str, str, str]


_ENDLESS = 1 << 48
"""Nodes beyond which it is no matter how many there are."""


def check_functions(model: ModelProto) -> None:
    """Raise InputError where functions call themselves, or become more than FUNCTION_NODES, FUNCTION_GROWTH and
    FUNCTION_DEPTH allow.

    The checker, shape inference and ``expand`` write functions out, call by call: doublings take forever or all memory.
    """
    bodies = {(function.domain, function.name, function.overload): function.node for function in model.functions}
    if not bodies:
        return
    sizes: dict[Key, int] = {}
    calls: dict[Key, list[Key]] = {}
    for key, nodes in bodies.items():
        called = [(node.domain, node.op_type, node.overload) for node in nested(nodes)]
        sizes[key], calls[key] = len(called), [callee for callee in called if callee in bodies]
    nodes, depth = _extents(sizes, calls)
    keys = [(node.domain, node.op_type, node.overload) for node in nested(model.graph.node)]
    most = max(limits.FUNCTION_NODES, limits.FUNCTION_GROWTH * (len(keys) + sum(sizes.values())))
    for key in bodies:
        _refuse(key, nodes[key], most)
        if depth[key] > limits.FUNCTION_DEPTH:
            raise InputError(
                f"function {show(key[1])} nests calls of functions more than {limits.FUNCTION_DEPTH} deep "
                "(FUNCTION_DEPTH)",
                limits.hint("FUNCTION_DEPTH", depth[key]),
            )
    total = 0
    for key in keys:
        total += nodes.get(key, 0)
        if total > most:
            _refuse(key, sum(nodes.get(key, 0) for key in keys), most)


def inline_functions(model: ModelProto, chosen: Collection[Key] | None = None) -> ModelProto:
    """The model with the functions written out, or with the chosen ones, for a model ``check_functions`` accepts.

    onnx's inliner leaves a function with another version of an operator set: the checker accepts such a function only
    if the operators are the same in the model's version, so the function may import the model's version. The inliner
    also forgets defaults of attributes: calls get the defaults first. Raises UnsupportedError for a call that may or
    may not use a default.
    """
    versions = {opset.domain: opset.version for opset in model.opset_import}
    copy = deepcopy(model)
    for function in copy.functions:
        for entry in function.opset_import:
            entry.version = versions.get(entry.domain, entry.version)
    _spell_defaults(copy)
    if chosen is None:
        return onnx.inliner.inline_local_functions(copy)
    return onnx.inliner.inline_selected_functions(copy, sorted({(domain, name) for domain, name, _ in chosen}))


def reached_functions(model: ModelProto, nodes: Iterable[NodeProto]) -> set[Key]:
    """Return the functions called by nodes, also in bodies and in functions."""
    bodies = {(function.domain, function.name, function.overload): function.node for function in model.functions}
    functions, stack = set[Key](), [*nodes]
    while stack:
        for node in nested([stack.pop()]):
            key = (node.domain, node.op_type, node.overload)
            if key in bodies and key not in functions:
                functions.add(key)
                stack.extend(bodies[key])
    return functions


def _spell_defaults(model: ModelProto) -> None:
    """Give every call the attributes its function has defaults for."""
    defaults = {
        (function.domain, function.name, function.overload): function.attribute_proto for function in model.functions
    }
    bodies = [
        (model.graph.node, set[str]()),
        *((function.node, set(function.attribute)) for function in model.functions),
    ]
    for nodes, optional in bodies:
        for node in nested(nodes):
            names = {attribute.name: attribute for attribute in node.attribute}
            for default in defaults.get((node.domain, node.op_type, node.overload), ()):
                if default.name not in names:
                    node.attribute.append(default)
                elif names[default.name].ref_attr_name in optional:
                    raise UnsupportedError(
                        f"function {show(node.op_type)} has a default for attribute {show(default.name)}, which a call "
                        "inside another function gives only if the caller of that function does",
                        "give the attribute a default in both functions",
                    )


def _extents(sizes: dict[Key, int], calls: dict[Key, list[Key]]) -> tuple[dict[Key, int], dict[Key, int]]:
    """Return nodes and depth of every function with all calls; raises InputError for a circle."""
    nodes: dict[Key, int] = {}
    depth: dict[Key, int] = {}
    try:
        for key in TopologicalSorter(calls).static_order():
            inner = calls[key]
            # Capped: a hostile chain of doublings would make an endless number.
            nodes[key] = min(sizes[key] + sum(nodes[callee] for callee in inner), _ENDLESS)
            depth[key] = 1 + max((depth[callee] for callee in inner), default=0)
    except CycleError as error:
        raise InputError(f"function {show(error.args[1][0][1])} calls itself") from None
    return nodes, depth


def _refuse(key: Key, nodes: int, most: int) -> None:
    if nodes > most:
        raise InputError(
            f"function {show(key[1])} makes the graph longer than {most} nodes (FUNCTION_NODES)",
            limits.hint("FUNCTION_NODES", nodes),
        )
