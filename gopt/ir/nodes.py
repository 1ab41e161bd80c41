"""Nodes of a file: operators and attributes checked, names defined, the bodies of control flow searched."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from onnx import AttributeProto, GraphProto, NodeProto, TensorProto

from gopt import limits
from gopt.errors import InputError, UnsupportedError
from gopt.ir.external_data import show
from gopt.ir.graph import MADE_BY, NO_ATTRIBUTES, SPMD, Node
from gopt.ir.graph_io import declared, refuse_sparse
from gopt.ir.symbol_table import RESERVED, SymbolTable, text
from gopt.ir.tensor_proto import check_data, stored_type

_TENSOR_ATTRIBUTES = {AttributeProto.TENSOR, AttributeProto.TENSORS}
_GRAPH_ATTRIBUTES = {AttributeProto.GRAPH, AttributeProto.GRAPHS}
_SPARSE_ATTRIBUTES = {AttributeProto.SPARSE_TENSOR, AttributeProto.SPARSE_TENSORS}
_LOOKED_AT = _TENSOR_ATTRIBUTES | _GRAPH_ATTRIBUTES | _SPARSE_ATTRIBUTES | {AttributeProto.UNDEFINED}
_SIZED = frozenset({"num_outputs", "shape", "axes"})
"""Attributes that determine how many outputs or dimensions shape inference allocates."""


def read_node(proto: NodeProto, symbols: SymbolTable, from_gopt: bool) -> Node:
    """Convert a node and define its outputs in ``symbols``.

    ``from_gopt``: the node may carry the name of a gopt pass.
    """
    names, op_type, domain = symbols.defined, proto.op_type, proto.domain
    if type(op_type) is str and type(domain) is str:  # else they are not text, which is refused later
        op_type, domain = sys.intern(op_type), sys.intern(domain)
    node = Node(
        op_type, [names.get(name, name) for name in proto.input], proto.output,
        domain=domain, name=proto.name, encoded=proto.SerializeToString(deterministic=True),
        attributes=None if proto.attribute else NO_ATTRIBUTES,
    )  # fmt: skip
    for name in node.outputs:
        if name:
            symbols.define(name, "a node output")
    if node.name[: len(RESERVED)] == RESERVED or type(node.name) is not str or len(node.name) > limits.NAME_LENGTH:
        symbols.allow(node.name, "node")
    if proto.attribute:
        node.captures = tuple(captures(proto, symbols))
    elif type(node.op_type) is not str or type(node.domain) is not str or node.op_type in ("Gradient", ""):
        _check_operator(proto)
    if node.domain == SPMD:
        _refuse_spmd(proto)
    if from_gopt:
        node.made_by = next((entry.value for entry in proto.metadata_props if entry.key == MADE_BY), "")
    return node


def name_apart(nodes: Sequence[Node]) -> None:
    """Rename later nodes of the same name: reports tell nodes apart by name, and ONNX Runtime wants unique names."""
    names = [node.name for node in nodes if node.name]
    names_used = set(names)
    if len(names_used) == len(names):
        return
    labels: set[str] = set()
    count = 1
    for node in nodes:
        if node.name in labels:
            name = node.name
            while node.name in names_used:
                count += 1
                node.name = f"{name}_{count}"
            names_used.add(node.name)
            proto = node.proto
            assert proto is not None
            proto.name = node.name
            node.proto = proto
        if node.name:
            labels.add(node.name)


def is_gradient(proto: NodeProto) -> bool:
    """Return whether a node is ONNX's own operator for a gradient."""
    return text(proto.op_type) == "Gradient" and proto.domain == "ai.onnx.preview.training"


def _check_operator(proto: NodeProto) -> None:
    if is_gradient(proto):
        value = show(proto.output[0] if proto.output else proto.name)
        raise UnsupportedError(
            f"{value} comes from a Gradient operator, which says what to differentiate and not how",
            "export the step with its backward pass written out in standard operators",
        )
    if text(proto.domain) == SPMD:
        _refuse_spmd(proto)
    if not proto.op_type:
        raise InputError(f"node {show(proto.name)} has no operator type")


def _refuse_spmd(proto: NodeProto) -> None:
    value = show(proto.name or "".join(proto.output[:1]))
    raise InputError(
        f"node {value}: the domain {SPMD} is gopt's own and must not be in a file", "export the step again"
    )


def captures(proto: NodeProto, symbols: SymbolTable) -> dict[str, None]:
    """Return the outer values read by bodies in a node's attributes, in order; also checks the attributes."""
    _check_operator(proto)
    captured: dict[str, None] = {}
    for attribute in proto.attribute:
        kind = attribute.type
        if attribute.name in _SIZED:
            _refuse_sizes(proto, attribute)
        if attribute.ref_attr_name and not symbols.function:
            where = show(proto.name or "".join(proto.output[:1]))
            raise InputError(
                f"attribute {show(attribute.name)} of node {where} refers to {show(attribute.ref_attr_name)}, and only "
                "the nodes of a function can refer to attributes"
            )
        if kind not in _LOOKED_AT:
            continue
        owner = f"attribute {show(attribute.name)} of node {show(proto.name or ''.join(proto.output[:1]))}"
        if kind in _TENSOR_ATTRIBUTES:
            _check_attribute_tensors(attribute, owner)
        elif kind in _GRAPH_ATTRIBUTES:
            for body in (attribute.g,) if kind == AttributeProto.GRAPH else attribute.graphs:
                captured.update(_body_captures(body, symbols.inner()))
        elif kind in _SPARSE_ATTRIBUTES:
            raise UnsupportedError(f"{owner} is a sparse tensor", "store it as a dense tensor")
        elif not attribute.ref_attr_name:
            raise InputError(f"{owner} has no type")
    return captured


def _refuse_sizes(proto: NodeProto, attribute: AttributeProto) -> None:
    """Raise InputError for too many outputs or dimensions: shape inference trusts such numbers."""
    owner = f"attribute {show(attribute.name)} of node {show(proto.name or ''.join(proto.output[:1]))}"
    if attribute.name == "num_outputs" and attribute.i > len(proto.output):
        raise InputError(f"{owner} is {attribute.i}, and the node has {len(proto.output)} outputs")
    if attribute.name != "num_outputs" and len(attribute.ints) > limits.DIMENSIONS:
        raise InputError(
            f"{owner} has {len(attribute.ints)} entries, and a tensor at most {limits.DIMENSIONS} dimensions"
        )


def _check_attribute_tensors(attribute: AttributeProto, owner: str) -> None:
    for tensor in (attribute.t,) if attribute.type == AttributeProto.TENSOR else attribute.tensors:
        if attribute.ref_attr_name:
            continue
        if tensor.data_location == TensorProto.EXTERNAL:
            raise UnsupportedError(f"{owner} lies in external data", "make it an initializer of the graph")
        check_data(tensor, stored_type(tensor, owner), owner)


def _body_captures(body: GraphProto, symbols: SymbolTable) -> dict[str, None]:
    """Return the outer values read or returned by a control-flow body.

    In file order, a value used before its node counts as an outer value, and is found undefined.
    """
    captured: dict[str, None] = {}
    refuse_sparse(body)
    for info in body.input:
        symbols.define(info.name, "an input of a body")
        declared(info, f"value {show(info.name)}")
    for tensor in body.initializer:
        if tensor.name not in {info.name for info in body.input}:
            symbols.define(tensor.name, "an initializer")
        owner = f"initializer {show(tensor.name)}"
        if tensor.data_location == TensorProto.EXTERNAL:
            raise UnsupportedError(f"{owner} of a body lies in external data", "make it one of the outer graph")
        check_data(tensor, stored_type(tensor, owner), owner)
    for node in body.node:
        inner = captures(node, symbols)
        captured.update((name, None) for name in (*node.input, *inner) if name not in symbols.defined)
        symbols.allow(node.name, "node")
        for name in node.output:
            if name:
                symbols.define(name, "a node output")
    captured.update((info.name, None) for info in body.output if info.name not in symbols.defined)
    return captured


def nested(nodes: Iterable[NodeProto]) -> Iterable[NodeProto]:
    """Yield nodes, and nodes in bodies of control flow."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            if attribute.type in _GRAPH_ATTRIBUTES:
                for body in (attribute.g, *attribute.graphs):
                    yield from nested(body.node)


def reads(node: NodeProto) -> set[str]:
    """Return values read by a node, also in bodies; a body's own values are left out."""
    names = set(node.input)
    for attribute in node.attribute:
        if attribute.type in _GRAPH_ATTRIBUTES:
            for body in (attribute.g, *attribute.graphs):
                names |= _outer_reads(body)
    return names - {""}


def _outer_reads(body: GraphProto) -> set[str]:
    names = {value.name for value in (*body.input, *body.initializer)}
    names.update(sparse.values.name for sparse in body.sparse_initializer)
    names.update(name for node in body.node for name in node.output)
    return ({name for node in body.node for name in reads(node)} | {value.name for value in body.output}) - names
