"""Roles from the operators' schemas; the user's role map overrides them, and data flow comes after them."""

from __future__ import annotations

from gopt.ir.graph import Graph
from gopt.ir.opaque.origin import OpaqueCall, Origin


def calls(graph: Graph) -> list[OpaqueCall]:
    """The expanded calls of a graph, in order."""
    origins = [node.origin for node in graph.nodes if node.origin is not None]
    call_of = {origin.call.number: origin.call for origin in origins if isinstance(origin, Origin)}
    return [call_of[number] for number in sorted(call_of)]


def pairs(graph: Graph) -> dict[str, str]:
    """States and the outputs replacing them, by the slots of opaque operators."""
    pair_of: dict[str, str] = {}
    inputs = {*graph.inputs, *graph.initializers}
    for call in calls(graph):
        if call.operator is None:
            continue
        for table, new in zip(call.slot_values.weights, call.slot_values.updated):
            for slot, result in call.operator.pairs.items():
                if table.get(slot) in inputs and new.get(result) in graph.outputs:
                    pair_of.setdefault(table[slot], new[result])
        if (
            call.slot_values.scalars.get("count") in inputs
            and call.slot_values.results.get("new_count") in graph.outputs
        ):
            pair_of.setdefault(call.slot_values.scalars["count"], call.slot_values.results["new_count"])
    return pair_of


def notes(graph: Graph) -> list[str]:
    """One line per kind of opaque operator: how many nodes, over how many weights."""
    nodes: dict[str, int] = {}
    weights: dict[str, int] = {}
    for call in calls(graph):
        nodes[call.op_type] = nodes.get(call.op_type, 0) + 1
        weights[call.op_type] = weights.get(call.op_type, 0) + len(call.slot_values.weights)
    return [
        f"{name}: {count} {'node' if count == 1 else 'nodes'} over {weights[name]} weights, read as standard operators"
        for name, count in nodes.items()
    ]
