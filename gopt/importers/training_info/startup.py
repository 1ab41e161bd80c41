"""The start-up graph: ``initialization`` with outputs that have the names of the values they set."""

from __future__ import annotations

from onnx import GraphProto, ModelProto, TrainingInfoProto, compose, helper

from gopt.importers.training_info.initialization import initialization_model
from gopt.ir.nodes import reads

_PREFIX = "startup/"


def startup_model(model: ModelProto, info: TrainingInfoProto) -> ModelProto | None:
    """A model without inputs, with an output for each entry of ``initialization_binding``; None where there is none.

    An output has the name of the initializer that it sets. It is made by an Identity, and read by no node.
    ``check_initialization`` has passed.
    """
    if not info.initialization_binding:
        return None
    made = initialization_model(model, info)
    wanted = {entry.key: entry.value for entry in info.initialization_binding}
    copies = _copies(made.graph)
    inner = {name for node in made.graph.node for name in node.output} | {each.name for each in made.graph.initializer}
    prefix = ""
    if any(key in inner and not (key == value and key in copies) for key, value in wanted.items()):
        prefix = _PREFIX
        while any(key.startswith(prefix) for key in wanted):
            prefix += "_"
        compose.add_prefix_graph(made.graph, prefix, inplace=True)
    types = {each.name: each.type for each in made.graph.output}
    del made.graph.output[:]
    for key, value in wanted.items():
        if key != prefix + value:
            made.graph.node.append(helper.make_node("Identity", [prefix + value], [key]))
        made.graph.output.add(name=key, type=types[prefix + value])
    return made


def _copies(graph: GraphProto) -> set[str]:
    """Values that an Identity makes and no node reads: how gopt itself writes the outputs."""
    made = {node.output[0] for node in graph.node if node.op_type == "Identity" and node.domain in ("", "ai.onnx")}
    return made.difference(*map(reads, graph.node))
