"""Inline a call of a model's function: its nodes, under names of the caller."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy

import onnx
from onnx import AttributeProto, FunctionProto, GraphProto, NodeProto

from gopt.ir.graph import EXPANDED, MADE_BY, Node
from gopt.ir.model_file import refill
from gopt.ir.nodes import reads
from gopt.ir.opaque.origin import Origin


def inline_call(function: FunctionProto, call: NodeProto, prefix: str) -> list[NodeProto]:
    """Return copies of the function's nodes for a call; inner values get names below ``prefix``.

    An operand left out stays absent; an unnamed result is still computed. A result that is an operand passes an
    Identity.
    """
    table = {"": ""}
    table.update(_formals(function.input, call.input))
    nodes: list[NodeProto] = []
    for formal, actual in _formals(function.output, call.output).items():
        if formal in table and actual:
            nodes.append(onnx.helper.make_node("Identity", [table[formal]], [actual]))
        elif actual:
            table[formal] = actual
    attributes = {default.name: default for default in function.attribute_proto}
    attributes.update((attribute.name, attribute) for attribute in call.attribute)
    rename = _Renaming(table, prefix, attributes)
    return [rename.node(node) for node in function.node] + nodes


def inline_branch(body: GraphProto, node: NodeProto, prefix: str) -> tuple[list[NodeProto], list[str]]:
    """Return copies of the nodes of a body without inputs, inside ``node``, and the results; inner values get names
    below ``prefix``. Stored values become Constant nodes."""
    rename = _Renaming({name: name for name in ("", *reads(node))}, prefix, {})
    stored = [onnx.helper.make_node("Constant", [], [tensor.name], value=tensor) for tensor in body.initializer]
    nodes = [rename.node(proto) for proto in (*stored, *body.node)]
    return nodes, [rename.name(value.name) for value in body.output]


def written_node(proto: NodeProto, origin: Origin | None = None) -> Node:
    """The node of a graph for one that was written out."""
    node = Node(
        proto.op_type, proto.input, proto.output,
        domain=proto.domain, name=proto.name, encoded=proto.SerializeToString(deterministic=True), made_by=EXPANDED,
    )  # fmt: skip
    if origin is not None and not proto.metadata_props:
        proto.metadata_props.add(key=MADE_BY, value=EXPANDED)
    node.origin = origin
    return node


def _formals(formals: Sequence[str], actuals: Sequence[str]) -> dict[str, str]:
    return {formal: actuals[index] if index < len(actuals) else "" for index, formal in enumerate(formals)}


class _Renaming:
    """Copies nodes with other names and the call's attributes."""

    def __init__(self, table: dict[str, str], prefix: str, attributes: Mapping[str, AttributeProto]) -> None:
        self.table, self.prefix, self.attributes = table, prefix, attributes

    def name(self, old: str) -> str:
        return self.table.setdefault(old, f"{self.prefix}.{old}")

    def node(self, source: NodeProto) -> NodeProto:
        copy = deepcopy(source)
        copy.input[:] = [self.name(name) for name in source.input]
        copy.output[:] = [self.name(name) for name in source.output]
        copy.name = f"{self.prefix}.{source.name}" if source.name else ""
        refill(copy.attribute, self._attributes(source))
        return copy

    def _attributes(self, source: NodeProto) -> Iterator[AttributeProto]:
        for attribute in source.attribute:
            copy = AttributeProto()
            if not attribute.ref_attr_name:
                copy.CopyFrom(attribute)
                for body in (copy.g,) if copy.HasField("g") else copy.graphs:
                    self._body(body)
            elif attribute.ref_attr_name in self.attributes:
                copy.CopyFrom(self.attributes[attribute.ref_attr_name])
                copy.name = attribute.name
            else:
                continue  # the call leaves it to the operator's own default
            yield copy

    def _body(self, body: GraphProto) -> None:
        for value in (*body.input, *body.output, *body.initializer, *body.value_info):
            value.name = self.name(value.name)
        refill(body.node, [self.node(node) for node in body.node])
