"""Random numbers drawn by functions of the model. Analyses read the nodes of a graph, and never see such draws."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from onnx import NodeProto

from gopt.errors import UnsupportedError
from gopt.ir.graph import Graph
from gopt.ir.node_kinds import control_flow, never_draws
from gopt.ir.nodes import nested
from gopt.operators.kinds import RANDOM
from gopt.text.sanitize import show


def refuse_hidden_draws(graph: Graph) -> None:
    """Raise UnsupportedError where a function called by the graph draws random numbers.

    Ranks that must compute the same would draw different numbers, and ``gopt verify`` could not feed any."""
    names = {function.name for function in graph.header.functions}
    for node in graph.nodes if names else ():
        if node.op_type not in names and not control_flow(node):
            continue
        for inner in called_nodes(graph, [node.to_proto()]):
            if _draws(inner):
                raise UnsupportedError(
                    f"{node.op_type} {show(node.label)} is a function that draws random numbers, by {inner.op_type} "
                    f"{show(inner.name or inner.output[0])}: gopt looks for draws in the graph alone",
                    "inline it first: onnx.inliner.inline_local_functions(model)",
                )


def called_nodes(graph: Graph, nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """The nodes of the functions called by ``nodes``, of functions called there, and of all bodies."""
    functions = {(function.domain, function.name, function.overload): function for function in graph.header.functions}
    waiting = list(nested(nodes))
    while waiting:
        node = waiting.pop()
        called = functions.pop((node.domain, node.op_type, node.overload), None)
        if called is not None:
            inner = list(nested(called.node))
            yield from inner
            waiting += inner


def _draws(node: NodeProto) -> bool:
    """Return whether a node draws; a Dropout without a mode passes the operand on."""
    standard = node.domain in ("", "ai.onnx") and node.op_type in RANDOM
    return standard and not never_draws(node.op_type, node.input)
