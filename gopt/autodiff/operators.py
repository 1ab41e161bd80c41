"""An operator of a differentiated model: attributes, types of operands, and the nodes emitted by a rule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto

from gopt.errors import UnsupportedError
from gopt.ir.attributes import attribute_value
from gopt.ir.nodes import nested, reads
from gopt.ir.type_proto import read_type
from gopt.ir.types import FLOATS, TensorType, dtype_name
from gopt.text.sanitize import show


@dataclass(frozen=True, slots=True)
class ForwardOperator:
    """A node with the attributes and the known types of values."""

    node: NodeProto
    attributes: Mapping[str, Any]
    types: Mapping[str, TensorType]

    @staticmethod
    def of(node: NodeProto, types: Mapping[str, TensorType]) -> ForwardOperator:
        return ForwardOperator(node, {attr.name: attribute_value(attr) for attr in node.attribute}, types)

    def shape(self, name: str) -> tuple[int, ...]:
        """The dimensions of an operand or result; raises UnsupportedError unless all are known."""
        kind = self.types.get(name)
        if kind is None or not kind.static:
            raise UnsupportedError(
                f"the shape of {show(name)} is unknown: {self.node.op_type} {show(self.node.output[0])} cannot be "
                "differentiated",
                "export the model with fixed shapes",
            )
        return kind.dims

    def dtype(self, name: str) -> str:
        kind = self.types.get(name)
        return "undefined" if kind is None else kind.dtype


def types_of(model: ModelProto) -> dict[str, TensorType]:
    """Return the types of a model's values, as far as onnx infers types, and of constants in bodies of control flow."""
    graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    types = {name: kind for body in bodies(model.graph.node) for name, kind in constants_in(body)}
    types |= {value.name: read_type(value.type) for value in (*graph.value_info, *graph.output, *graph.input)}
    types |= {tensor.name: _stored(tensor) for tensor in graph.initializer}
    return {name: kind for name, kind in types.items() if kind.dtype != "undefined"}


def bodies(nodes: Iterable[NodeProto]) -> Iterator[GraphProto]:
    """Return the bodies of control flow, inner bodies included."""
    for node in nested(nodes):
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield attribute.g
            yield from attribute.graphs


def constants_in(body: GraphProto) -> Iterator[tuple[str, TensorType]]:
    """Return the constants in a body, with types."""
    yield from ((tensor.name, _stored(tensor)) for tensor in body.initializer)
    for node in body.node:
        for attribute in node.attribute:
            if node.op_type == "Constant" and attribute.name == "value":
                yield node.output[0], _stored(attribute.t)


def _stored(tensor: TensorProto) -> TensorType:
    return TensorType(dtype_name(tensor.data_type), tuple(tensor.dims))


def between(
    model: ModelProto, sources: Iterable[str], scalar: str, types: Mapping[str, TensorType]
) -> tuple[set[str], set[str]]:
    """Return the values depending on ``sources``, and the values ``scalar`` depends on, with ``scalar``. Whole numbers
    and truth values end both, because no derivative passes."""

    def smooth(names: Iterable[str]) -> set[str]:
        return {name for name in names if name and (name not in types or types[name].dtype in FLOATS)}

    behind, ahead = set(sources), {scalar}
    for node in model.graph.node:
        if not behind.isdisjoint(reads(node)):
            behind |= smooth(node.output)
    for node in reversed(model.graph.node):
        if not ahead.isdisjoint(node.output):
            ahead |= smooth(reads(node))
    return behind, ahead


def names_of(model: ModelProto) -> set[str]:
    """Return every name of a value in a model, including bodies of control flow."""
    graph = model.graph
    names = {value.name for value in (*graph.input, *graph.output, *graph.initializer)}
    names.update(name for node in nested(graph.node) for name in node.output)
    for body in bodies(graph.node):
        names.update(value.name for value in (*body.input, *body.initializer))
    return names
