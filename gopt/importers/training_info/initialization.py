"""``initialization`` and the binding: a graph without inputs computing first values of initializers."""

from __future__ import annotations

from onnx import ModelProto, TrainingInfoProto

from gopt.importers.training_info.bindings import fits, value_types
from gopt.importers.training_info.names import broken, check_reads, stored_types
from gopt.ir.type_proto import read_type
from gopt.ir.types import TensorType, known
from gopt.text.sanitize import show


def initialization_model(model: ModelProto, info: TrainingInfoProto) -> ModelProto:
    """The initialization graph as a model, with the versions and functions of ``model``."""
    initialization = ModelProto(ir_version=model.ir_version)
    initialization.opset_import.extend(model.opset_import)
    initialization.functions.extend(model.functions)
    initialization.graph.CopyFrom(info.initialization)
    return initialization


def check_initialization(model: ModelProto, info: TrainingInfoProto, stored: dict[str, TensorType]) -> None:
    """Raise InputError for an initialization of an unstored value, or by a value its graph does not compute.

    ``stored``: the initializers of the inference graph and of the algorithm, with the types.
    """
    graph = info.initialization
    if graph.input:
        raise broken(f"initialization has an input, {show(graph.input[0].name)}", "it must compute values from nothing")
    check_reads(graph, "initialization")
    defined = {name for node in graph.node for name in node.output} | {tensor.name for tensor in graph.initializer}
    for value in graph.output:
        if value.name not in defined:
            raise broken(f"initialization has the output {show(value.name)}, which nothing makes")
    types = _types(initialization_model(model, info)) if info.initialization_binding else {}
    bound: set[str] = set()
    for entry in info.initialization_binding:
        if entry.key not in stored:
            raise broken(f"initialization_binding sets {show(entry.key)}, which is not an initializer")
        if entry.key in bound:
            raise broken(f"initialization_binding sets {show(entry.key)} twice")
        bound.add(entry.key)
        if entry.value not in types:
            raise broken(
                f"initialization_binding sets {show(entry.key)} to {show(entry.value)}, which is not an output "
                "of its graph"
            )
        if not fits(types[entry.value], stored[entry.key]):
            raise broken(
                f"initialization_binding sets {show(entry.key)}, {stored[entry.key]}, to {show(entry.value)}, which is "
                f"{types[entry.value]}"
            )


def _types(model: ModelProto) -> dict[str, TensorType]:
    """Types of the outputs: computed, or declared if not computed."""
    types = value_types(model, "initialization") | stored_types(model.graph)
    return {
        value.name: types[value.name] if known(types[value.name].dtype) else read_type(value.type)
        for value in model.graph.output
    }
