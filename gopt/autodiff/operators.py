"""An operator of a model that is differentiated: attributes, types of operands, and the nodes that a rule emits."""

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
    """A node with its attributes and the known types of values."""

    node: NodeProto
    attributes: Mapping[str, Any]
    types: Mapping[str, TensorType]

    @staticmethod
    def of(node: NodeProto, types: Mapping[str, TensorType]) -> ForwardOperator:
        return ForwardOperator(node, {each.name: attribute_value(each) for each in node.attribute}, types)

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
    """The types of a model's values, as far as onnx infers them, and of constants in bodies of control flow."""
    graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    known = {name: kind for body in bodies(model.graph.node) for name, kind in constants_in(body)}
    known |= {each.name: read_type(each.type) for each in (*graph.value_info, *graph.output, *graph.input)}
    known |= {each.name: _stored(each) for each in graph.initializer}
    return {name: kind for name, kind in known.items() if kind.dtype != "undefined"}


def bodies(nodes: Iterable[NodeProto]) -> Iterator[GraphProto]:
    """The bodies of control flow, those inside others included."""
    for node in nested(nodes):
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield attribute.g
            yield from attribute.graphs


def constants_in(body: GraphProto) -> Iterator[tuple[str, TensorType]]:
    """The constants that stand in a body, with their types."""
    yield from ((each.name, _stored(each)) for each in body.initializer)
    for node in body.node:
        for attribute in node.attribute:
            if node.op_type == "Constant" and attribute.name == "value":
                yield node.output[0], _stored(attribute.t)


def _stored(tensor: TensorProto) -> TensorType:
    return TensorType(dtype_name(tensor.data_type), tuple(tensor.dims))


def between(
    model: ModelProto, sources: Iterable[str], scalar: str, types: Mapping[str, TensorType]
) -> tuple[set[str], set[str]]:
    """The values that depend on ``sources``, and those on which ``scalar`` depends, itself included. Whole numbers and
    truth values end both: no derivative goes through them."""

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


def free_prefix(stem: str, taken: Iterable[str]) -> str:
    """``STEM``, ``STEM2``, ...: the first with which no name begins."""
    names, number, prefix = list(taken), 1, stem
    while any(name.startswith(prefix) for name in names):
        number += 1
        prefix = f"{stem}{number}"
    return prefix


class FreeNames:
    """Gives values names that no value has: the one that is asked for, or ``NAME.2``, ``NAME.3``, ...

    ``renamed``: name that was given -> another one that was asked for.
    """

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = set(taken)
        self.renamed: dict[str, str] = {}

    def add(self, taken: Iterable[str]) -> None:
        """Add names that are taken."""
        self._taken.update(taken)

    def take(self, wished: str) -> str:
        """A free name, which is taken then."""
        number, name = 1, wished
        while name in self._taken:
            number += 1
            name = f"{wished}.{number}"
        self._taken.add(name)
        if number > 1:
            self.renamed[name] = wished
        return name

    def prefix(self, stem: str) -> str:
        """``STEM``, ``STEM2``, ...: the first with which no name begins."""
        return free_prefix(stem, self._taken)


def names_of(model: ModelProto) -> set[str]:
    """Every name that a model gives a value, those inside bodies of control flow included."""
    graph = model.graph
    found = {each.name for each in (*graph.input, *graph.output, *graph.initializer)}
    found.update(name for node in nested(graph.node) for name in node.output)
    for body in bodies(graph.node):
        found.update(each.name for each in (*body.input, *body.initializer))
    return found
