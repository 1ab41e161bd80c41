"""Select the nodes holding an opaque update in a graph."""

from __future__ import annotations

from gopt.ir.graph import Graph, Node
from gopt.ir.opaque.table import OPERATORS
from gopt.ir.types import TensorType
from gopt.operators.kinds import CONTROL_FLOW, ELEMENTWISE, SPREADS

THROUGH = ELEMENTWISE | SPREADS
"""Operators through which a new state may hang on a call."""


def select_opaque_nodes(graph: Graph) -> set[int]:
    """Return the ids of the nodes to expand: operators of the table, and calls of model functions computing a new
    state.

    From every non-scalar output a walk goes back through values of the same shape. A call on the walk that reads this
    shape is part of an update, or close to an update, and may be expanded as well.
    """
    functions = {(function.domain, function.name, function.overload): function for function in graph.header.functions}
    chosen = {id(node) for node in graph.nodes if (node.domain, node.op_type) in OPERATORS}
    if not functions or chosen.issuperset(map(id, graph.nodes)):
        return chosen
    plain = {key for key, function in functions.items() if not _holds_control(key, functions)}
    called = [node for node in graph.nodes if _key(node) in plain]
    return chosen | _updates(graph, {id(node) for node in called}) if called else chosen


def _key(node: Node) -> tuple[str, str, str]:
    return (node.domain, node.op_type, proto.overload if (proto := node.proto) is not None else "")


def _holds_control(key: tuple[str, str, str], functions: dict[tuple[str, str, str], object]) -> bool:
    """Return whether a function, or a function called inside, branches or loops."""
    stack, reached = [key], set()
    while stack:
        top = stack.pop()
        if top in reached:
            continue
        reached.add(top)
        for node in functions[top].node:  # type: ignore[attr-defined]
            if node.op_type in CONTROL_FLOW and node.domain in ("", "ai.onnx"):
                return True
            inner = (node.domain, node.op_type, node.overload)
            if inner in functions:
                stack.append(inner)
    return False


def alike(type: TensorType, want: TensorType) -> bool:
    return type.shape == want.shape or (want.elements > 1 and type.elements == want.elements)


def _updates(graph: Graph, called: set[int]) -> set[int]:
    producers, types, updates, reached = graph.producers(), graph.types, set(), set()
    scalars = _of_scalars(graph, called)
    for output, declared in graph.outputs.items():
        want = types.get(output, declared)
        stack = [output]
        while stack:
            node = producers.get(stack.pop())
            if node is None or not (id(node) in called or node.is_in(THROUGH)):
                continue
            read = [
                name for name in node.inputs
                if name in types and alike(types[name], want) and (want.shape != () or name in scalars)
            ]  # fmt: skip
            if id(node) in called and any(want.shape != () or types[name] == want for name in read):
                updates.add(id(node))
            for name in read:
                if name not in reached:
                    reached.add(name)
                    stack.append(name)
    return updates


def _of_scalars(graph: Graph, called: set[int]) -> set[str]:
    """Return inputs and stored values without dimensions, and the scalar results behind."""
    names = {name for name in (*graph.inputs, *graph.initializers) if graph.type_of(name).shape == ()}
    for node in graph.nodes:
        on_way = id(node) in called or node.is_in(THROUGH)
        if on_way and not names.isdisjoint(node.inputs):
            names.update(name for name in node.outputs if graph.type_of(name).shape == ())
    return names
