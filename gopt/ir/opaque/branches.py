"""Write out an If around an update: both branches run, and Where chooses by the condition.

A gate closed by a finite check is often written so: one branch updates, the other returns old values. With Where, the
update can be cut like any other. Where computes nothing, so values equal the If's to the bit. A branch with an
operator that may fail on values excluded by the condition stays in the If.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from onnx import NodeProto, TensorProto, helper

from gopt.ir.graph import Graph, Node
from gopt.ir.inference import infer_types
from gopt.ir.node_kinds import divisor_of
from gopt.ir.nodes import nested
from gopt.ir.opaque.inline import inline_branch, written_node
from gopt.ir.opaque.selection import THROUGH, alike
from gopt.ir.opset import opset_of
from gopt.ir.types import FLOATS
from gopt.operators.table import names

_TOTAL = names(lambda record: record.total) | {"If"}
"""Operators that have a result for all operands of static shapes, but for a Div of whole numbers."""
_OF_BFLOAT16 = 16
"""The operator set since which Where takes bfloat16."""


def open_branches(graph: Graph, prefix: str) -> Graph:
    """The graph with the Ifs around its updates written out; the same graph without such Ifs.

    Values of branches are named ``<prefix>.if<number of the If>.…``.
    """
    chosen = _chosen(graph)
    while chosen:
        result, opened = _opened(graph, chosen, prefix)
        failing = {key for key, nodes in opened.items() if not all(_never_fails(result, node) for node in nodes)}
        if not failing:
            return result
        chosen -= failing
    return graph


def _chosen(graph: Graph) -> set[int]:
    """Return ids of the Ifs in front of a possible new state, with only operators that never fail: a walk goes back
    from every output through values of the same size."""
    ifs = {id(node) for node in graph.nodes if node.is_a("If") and _writable(graph, node)}
    if not ifs:
        return ifs
    producers, chosen_ids, visited = graph.producers(), set[int](), set[str]()
    for output, declared in graph.outputs.items():
        want = graph.types.get(output, declared)
        stack = [output]
        while stack:
            name = stack.pop()
            node = producers.get(name)
            if name in visited or node is None or not (id(node) in ifs or node.is_in(THROUGH)):
                continue
            visited.add(name)
            if id(node) in ifs:
                chosen_ids.add(id(node))
            stack.extend(name for name in node.reads if alike(graph.type_of(name), want))
    return chosen_ids


def _writable(graph: Graph, node: Node) -> bool:
    """Return whether Where can stand for an If: one condition, results of one static type, known operators."""
    types = [graph.type_of(name) for name in node.outputs if name]
    inner = nested([node.to_proto()])
    return (
        graph.type_of(node.inputs[0]).elements == 1
        and all(type.static for type in types)
        and (opset_of(graph.header) >= _OF_BFLOAT16 or all(type.dtype != "bfloat16" for type in types))
        and all(node.domain in ("", "ai.onnx") and node.op_type in _TOTAL for node in inner)
    )


def _opened(graph: Graph, chosen: set[int], prefix: str) -> tuple[Graph, dict[int, list[Node]]]:
    """Return the graph with these Ifs written out, and the nodes in place of each."""
    nodes: list[Node] = []
    written_of: dict[int, list[Node]] = {}
    for node in graph.nodes:
        if id(node) not in chosen:
            nodes.append(node)
            continue
        written = _written(node.to_proto(), f"{prefix}.if{len(written_of)}", graph.type_of(node.inputs[0]).shape == ())
        written_of[id(node)] = [written_node(node) for node in written]
        nodes += written_of[id(node)]
    result = replace(graph, nodes=nodes, types=dict(graph.types), file_nodes=graph.file_nodes or graph.nodes)
    infer_types(result)
    return result, written_of


def _written(proto: NodeProto, prefix: str, scalar: bool) -> list[NodeProto]:
    """The nodes of both branches, and a Where for each result; ``scalar``: the condition has no dimensions."""
    condition, nodes = proto.input[0], list[NodeProto]()
    if not scalar:
        condition = f"{prefix}.condition"
        nodes.append(helper.make_node("Squeeze", proto.input, [condition]))
    results: dict[str, Sequence[str]] = {}
    kinds: Sequence[int] = ()
    for attribute in proto.attribute:
        at = f"{prefix}.{attribute.name[:4]}"
        inner, results[attribute.name] = inline_branch(attribute.g, proto, at)
        kinds = [value.type.tensor_type.elem_type for value in attribute.g.output]
        for number, node in enumerate(inner):
            nodes += _written(node, f"{at}.if{number}", False) if node.op_type == "If" else [node]
    label = proto.name if len(proto.output) == 1 else ""
    rows = zip(proto.output, results["then_branch"], results["else_branch"], kinds, strict=True)
    for number, (name, then, otherwise, kind) in enumerate(rows):
        if name and kind == TensorProto.BOOL:
            nodes += _flag(condition, then, otherwise, name, label, f"{prefix}.{number}")
        elif name:
            nodes.append(helper.make_node("Where", [condition, then, otherwise], [name], name=label))
    return nodes


def _flag(condition: str, then: str, otherwise: str, name: str, label: str, prefix: str) -> list[NodeProto]:
    """Write a Where of truth values as And, Not, Or, because ONNX Runtime has no kernel."""
    return [
        helper.make_node("And", [condition, then], [f"{prefix}.first"]),
        helper.make_node("Not", [condition], [f"{prefix}.not"]),
        helper.make_node("And", [f"{prefix}.not", otherwise], [f"{prefix}.second"]),
        helper.make_node("Or", [f"{prefix}.first", f"{prefix}.second"], [name], name=label),
    ]


def _never_fails(graph: Graph, node: Node) -> bool:
    """Return whether a node written out has a result whatever the condition is."""
    if not all(graph.type_of(name).static for name in node.outputs if name):
        return False
    return not divisor_of(node) or graph.type_of(node.outputs[0]).dtype in FLOATS
