"""Functions of a model, written out before an engine sees a graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import onnx
from onnx import ModelProto

from gopt.ir.functions import inline_functions
from gopt.ir.graph import COMM, Graph
from gopt.ir.type_proto import read_type, value_info
from gopt.runtime.proto import as_node, build_model


def inlined(graph: Graph) -> Graph:
    """Return the graph with inlined functions, and the types of the values inside; a graph without functions is
    returned unchanged.

    No engine sees a function: ONNX Runtime's own inlining crashes where a call omits an operand and a body inside the
    function uses the operand's name."""
    if not graph.header.functions:
        return graph
    border = {name: tensor.type for name, tensor in graph.initializers.items() if name not in graph.inputs}
    model = build_model(graph.header, graph.nodes, {**graph.inputs, **border}, graph.outputs)
    for node in graph.nodes:
        if node.domain == COMM:
            model.graph.value_info.extend(_infos(graph, node.outputs))
    model.opset_import.extend(entry for entry in graph.header.opset_import if entry.domain == COMM)
    model = onnx.shape_inference.infer_shapes(inline_functions(model))
    types = {info.name: read_type(info.type) for info in model.graph.value_info}
    header = ModelProto()
    header.CopyFrom(graph.header)
    del header.functions[:], header.opset_import[:]
    header.opset_import.extend(model.opset_import)
    return replace(graph, nodes=[as_node(node) for node in model.graph.node], types=types | graph.types, header=header)


def _infos(graph: Graph, names: Iterable[str]) -> Iterator[onnx.ValueInfoProto]:
    return (value_info(name, graph.types[name]) for name in names if name in graph.types)
