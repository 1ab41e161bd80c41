"""A model with tables for the steps: the maker, the readers and the type of a value. Built in linear time."""

from __future__ import annotations

from collections.abc import Iterator

import onnx
from onnx import GraphProto, ModelProto, NodeProto, ValueInfoProto


def body_reads(body: GraphProto) -> Iterator[str]:
    """Outer values read by a body of control flow."""
    defined = {info.name for info in body.input} | {tensor.name for tensor in body.initializer}
    for node in body.node:
        yield from (name for name in node_reads(node) if name not in defined)
        defined.update(node.output)
    yield from (info.name for info in body.output if info.name not in defined)


def captures(node: NodeProto) -> Iterator[str]:
    """Outer values read by the bodies of a node."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield from body_reads(attribute.g)
        for body in attribute.graphs:
            yield from body_reads(body)


def node_reads(node: NodeProto) -> Iterator[str]:
    """Values read by a node and its bodies."""
    yield from filter(None, node.input)
    yield from captures(node)


def key_of(node: NodeProto) -> str:
    """Return the name of a node, the same in all candidates: the first output."""
    return next(filter(None, node.output), "")


class GraphView:
    """A model, not to be changed, and tables."""

    def __init__(self, model: ModelProto) -> None:
        self.model = model
        graph = model.graph
        self.nodes = list(graph.node)
        self.reads = [tuple(node_reads(node)) for node in self.nodes]
        self.captured = {name for node in self.nodes for name in captures(node)}
        self.inputs = {info.name: info for info in graph.input}
        self.outputs = [info.name for info in graph.output]
        self.stored = {tensor.name: tensor for tensor in graph.initializer}
        self.types = _types(model)

    @property
    def keys(self) -> list[str]:
        """The nodes in order, by key."""
        return [key for key in map(key_of, self.nodes) if key]


def _types(model: ModelProto) -> dict[str, ValueInfoProto]:
    """The known types of values, from the model or from inference."""
    try:
        graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    except MemoryError:
        raise
    except Exception:  # inference raises many types on models that are wrong, which may be the very failure
        graph = model.graph
    infos = {info.name: info for info in (*model.graph.value_info, *graph.value_info, *graph.input, *graph.output)}
    return {name: info for name, info in infos.items() if info.type.tensor_type.HasField("shape")}
