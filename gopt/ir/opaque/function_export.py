"""Functions for opaque operators, so that any runtime can run the file: a function for each distinct body."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy

from onnx import FunctionProto, ModelProto

from gopt.ir.graph import Graph, Node
from gopt.ir.opaque.origin import OpaqueCall, Origin
from gopt.ir.opaque.table_body import table_body
from gopt.ir.opset import opset_of


def with_functions(
    nodes: Iterable[tuple[Node, FunctionProto | None]], header: ModelProto
) -> tuple[list[Node], list[FunctionProto]]:
    """Return the nodes calling functions of the file, and the functions missing from the header.

    A second body of an operator, and its nodes, get another overload.
    """
    body_of = {(function.domain, function.name, function.overload): _bytes(function) for function in header.functions}
    functions: list[FunctionProto] = []
    result: list[Node] = []
    for node, function in nodes:
        if function is None:
            result.append(node)
            continue
        body, number, overload = _bytes(function), 0, ""
        while body_of.get((function.domain, function.name, overload), body) != body:
            number += 1
            overload = f"body{number}"
        key = (function.domain, function.name, overload)
        if key not in body_of:
            body_of[key] = body
            copy = deepcopy(function)
            copy.overload = overload
            functions.append(copy)
        result.append(_overloaded(node, overload) if overload else node)
    return result, functions


def _bytes(function: FunctionProto) -> bytes:
    copy = deepcopy(function)
    copy.ClearField("overload")
    data: bytes = copy.SerializeToString(deterministic=True)
    return data


def _overloaded(node: Node, overload: str) -> Node:
    proto = deepcopy(node.to_proto())
    proto.overload = overload
    return Node(
        node.op_type,
        node.inputs,
        node.outputs,
        domain=node.domain,
        name=node.name,
        made_by=node.made_by,
        encoded=proto.SerializeToString(deterministic=True),
    )


def source_nodes(graph: Graph) -> tuple[list[Node], list[FunctionProto]]:
    """Return the source's nodes as in the file, and the functions needed to run them."""
    if graph.file_nodes is None:
        return graph.nodes, []
    calls = {id(call.node): call for call in _calls(graph)}
    pairs = [(node, _function(graph, calls.get(id(node)))) for node in graph.file_nodes]
    return with_functions(pairs, graph.header)


def _calls(graph: Graph) -> list[OpaqueCall]:
    call_of = {node.origin.call.number: node.origin.call for node in graph.nodes if isinstance(node.origin, Origin)}
    return list(call_of.values())


def _function(graph: Graph, call: OpaqueCall | None) -> FunctionProto | None:
    if call is None or call.operator is None:
        return None
    return table_body(call.operator, call.node, call.slot_values, graph.types, opset_of(graph.header))[0]


def prepare(header: ModelProto, functions: Sequence[FunctionProto]) -> None:
    """Prepare a file's header for functions: the version with functions, and imported operator sets."""
    if not functions:
        return
    oldest = 10 if any(function.overload for function in functions) else 8
    header.ir_version = max(header.ir_version, oldest)
    header.functions.extend(functions)
    domains = {opset.domain for opset in header.opset_import}
    for domain in dict.fromkeys(function.domain for function in functions):
        if domain not in domains:
            header.opset_import.add(domain=domain, version=1)
