"""The start-up graph: ``initialization`` with outputs that have the names of the values they set."""

from __future__ import annotations

from onnx import GraphProto, ModelProto, TrainingInfoProto, compose, helper

from gopt.importers.training_info.initialization import initialization_model
from gopt.ir.nodes import reads

_PREFIX = "startup/"


def startup_model(model: ModelProto, info: TrainingInfoProto) -> ModelProto | None:
    """A model without inputs, with an output for each entry of ``initialization_binding``; None without entries.

    An output has the name of the initializer it sets. It is made by an Identity, and read by no node.
    ``check_initialization`` has passed.
    """
    if not info.initialization_binding:
        return None
    made_graph = initialization_model(model, info)
    wanted = {entry.key: entry.value for entry in info.initialization_binding}
    copies = _copies(made_graph.graph)
    inner = {name for node in made_graph.graph.node for name in node.output} | {
        tensor.name for tensor in made_graph.graph.initializer
    }
    prefix = ""
    if any(key in inner and not (key == value and key in copies) for key, value in wanted.items()):
        prefix = _PREFIX
        while any(key.startswith(prefix) for key in wanted):
            prefix += "_"
        compose.add_prefix_graph(made_graph.graph, prefix, inplace=True)
    types = {value.name: value.type for value in made_graph.graph.output}
    del made_graph.graph.output[:]
    for key, value in wanted.items():
        if key != prefix + value:
            made_graph.graph.node.append(helper.make_node("Identity", [prefix + value], [key]))
        made_graph.graph.output.add(name=key, type=types[prefix + value])
    return made_graph


def _copies(graph: GraphProto) -> set[str]:
    """Values an Identity makes and no node reads: how gopt itself writes the outputs."""
    copies = {node.output[0] for node in graph.node if node.op_type == "Identity" and node.domain in ("", "ai.onnx")}
    return copies.difference(*map(reads, graph.node))
