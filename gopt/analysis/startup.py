"""Whether start-up graphs can replace the stored values of a step."""

from __future__ import annotations

from collections.abc import Iterator

from onnx import NodeProto

from gopt.analysis.hidden_draws import called_nodes
from gopt.analysis.training import TrainingGraph
from gopt.ir.graph import Graph
from gopt.ir.nodes import nested
from gopt.operators.kinds import MAY_DRAW, RANDOM
from gopt.text.sanitize import show


def why_unusable(startup: Graph, training: TrainingGraph) -> str:
    """Return why ranks cannot take their first states from a start-up graph; '' where possible.

    Every rank runs its own part of the graph: numbers drawn without a seed would differ between ranks. A rank takes
    only states from the graph: no other value of a rank can be replaced."""
    drawn = next(filter(_draws_anew, _all_nodes(startup)), None)
    if drawn is not None:
        return f"its {drawn.op_type} {show(drawn.name or drawn.output[0])} has no seed; give it one"
    states = {state.tensor for state in training.states}
    output = next((name for name in startup.outputs if name not in states), None)
    if output is not None:
        return f"it sets {show(output)}, which no step changes; store the value instead"
    return ""


def _all_nodes(startup: Graph) -> Iterator[NodeProto]:
    """The nodes of a graph, of the bodies, and of the called functions."""
    functions = bool(startup.header.functions)
    protos = [node.to_proto() for node in startup.nodes if functions or node.is_in(MAY_DRAW)]
    yield from nested(protos)
    yield from called_nodes(startup, protos)


def _draws_anew(node: NodeProto) -> bool:
    """Return whether a node draws other numbers in every run."""
    return node.op_type in RANDOM and all(attribute.name != "seed" for attribute in node.attribute)
