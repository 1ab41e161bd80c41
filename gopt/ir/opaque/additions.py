"""Write out counts that a scatter adds to an input: added to zeros first, and then to the input.

So the ranks' own counts stand apart from the old ones, which all ranks hold. Whole numbers are equal either way, and
what adds rows of a gradient to a parameter stays as it is.
"""

from __future__ import annotations

from dataclasses import replace

from gopt.ir.graph import Graph, Node
from gopt.ir.graph_index import GraphIndex, made_of
from gopt.ir.inference import infer_types
from gopt.ir.opaque.inline import written_node
from gopt.ir.opset import opset_of
from gopt.ir.tape import ProtoTape
from gopt.ir.types import FLOATS
from gopt.operators.kinds import SCATTERS


def part_additions(graph: Graph, prefix: str) -> Graph:
    """The graph with whole numbers that scatters add to inputs of static shapes apart; the same graph without any.

    New values are named ``<prefix>.added<number of the scatter>.…``.
    """
    chosen = {id(node): number for number, node in enumerate(n for n in graph.nodes if _adds_to_input(graph, n))}
    if not chosen:
        return graph
    nodes: list[Node] = []
    for node in graph.nodes:
        number = chosen.get(id(node))
        nodes += [node] if number is None else _written(graph, node, f"{prefix}.added{number}")
    result = replace(graph, nodes=nodes, types=dict(graph.types), file_nodes=graph.file_nodes or graph.nodes)
    infer_types(result)
    return result


def _adds_to_input(graph: Graph, node: Node) -> bool:
    if not node.is_in(SCATTERS) or node.attributes.get("reduction") != "add" or node.inputs[0] not in graph.inputs:
        return False
    type = graph.type_of(node.inputs[0])
    return type.static and (type.dtype not in FLOATS or _is_constant(graph, node.inputs[2]))


def _is_constant(graph: Graph, name: str) -> bool:
    """Return whether a value is made of constants and shapes alone, as numbers of samples are, and no step along a
    gradient."""
    return graph.inputs.keys().isdisjoint(made_of(GraphIndex(graph), [name]))


def _written(graph: Graph, node: Node, prefix: str) -> list[Node]:
    type, tape, added = graph.type_of(node.inputs[0]), ProtoTape(prefix, opset_of(graph.header)), f"{prefix}.counts"
    zeros = tape.zeros(type.dims, type.dtype)
    scatter = node.to_proto()
    scatter.input[0], scatter.output[0] = zeros, added
    tape.nodes.append(scatter)
    tape.op("Add", node.inputs[0], added, output=node.outputs[0])
    return [written_node(proto) for proto in tape.nodes]
