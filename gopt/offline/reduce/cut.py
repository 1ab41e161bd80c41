"""Builds a candidate: a model without some of its nodes, outputs and values."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from onnx import ModelProto, NodeProto, ValueInfoProto

from gopt.offline.reduce.graph_view import GraphView, key_of, node_reads

_NONE: Mapping[str, str] = {}


def cut(
    view: GraphView, *, nodes: Collection[str] = (), outputs: Collection[str] = (), values: Collection[str] = (),
    instead: Mapping[str, str] = _NONE,
) -> ModelProto | None:  # fmt: skip
    """The model without the given nodes (by their keys), graph outputs and stored values; None where that is no graph.

    What a removed node made, and others read, becomes an input; so does a stored value. ``instead``: readers of a
    value read another one. Nodes, inputs and values that no output needs are left out. If no output is left, the last
    value that removed nodes read is one.
    """
    kept = [
        _renamed(node, instead) if any(name in instead for name in node.input) else node
        for node in view.nodes if key_of(node) not in nodes
    ]  # fmt: skip
    made = {name for node in kept for name in node.output if name}
    wanted = [name for name in view.outputs if name not in outputs and name in made and name not in instead]
    if not wanted:
        wanted = _last_read(view, nodes, made)
    kept, needed = _live(kept, wanted)
    made = {name for node in kept for name in node.output if name}
    if not kept:
        return None
    infos = _inputs(view, needed - made, values)
    ends = [view.types.get(name) for name in wanted]
    if infos is None or None in ends:
        return None
    model = ModelProto()
    model.CopyFrom(_header(view.model))
    model.graph.name = view.model.graph.name
    model.graph.node.extend(kept)
    model.graph.input.extend(infos)
    model.graph.output.extend(info for info in ends if info is not None)
    model.graph.initializer.extend(
        tensor for name, tensor in view.stored.items() if name in needed and name not in values
    )
    listed = {info.name for info in infos} | set(wanted)
    model.graph.value_info.extend(
        info for info in view.model.graph.value_info if info.name in made and info.name not in listed
    )
    return model


def _renamed(node: NodeProto, instead: Mapping[str, str]) -> NodeProto:
    copy = NodeProto()
    copy.CopyFrom(node)
    copy.input[:] = [instead.get(name, name) for name in node.input]
    return copy


def _last_read(view: GraphView, nodes: Collection[str], made: set[str]) -> list[str]:
    for node, reads in zip(reversed(view.nodes), reversed(view.reads), strict=True):
        if key_of(node) in nodes:
            for name in reads:
                if name in made:
                    return [name]
    return []


def _live(nodes: list[NodeProto], wanted: list[str]) -> tuple[list[NodeProto], set[str]]:
    """The nodes that outputs need, in order, and every value that these nodes and outputs read."""
    needed, kept = set(wanted), []
    for node in reversed(nodes):
        if any(name in needed for name in node.output):
            kept.append(node)
            needed.update(node_reads(node))
    return kept[::-1], needed


def _inputs(view: GraphView, read: set[str], values: Collection[str]) -> list[ValueInfoProto] | None:
    """The inputs of a candidate: those of the model that are read, then what has become one; None without a type."""
    found = [info for name, info in view.inputs.items() if name in read]
    plain = [name for name in view.stored if name in read and name in values and name not in view.inputs]
    cut_off = sorted(name for name in read if name not in view.inputs and name not in view.stored)
    for name in plain:
        tensor = view.stored[name]
        info = ValueInfoProto(name=name)
        info.type.tensor_type.elem_type = tensor.data_type
        info.type.tensor_type.shape.SetInParent()
        for size in tensor.dims:
            info.type.tensor_type.shape.dim.add(dim_value=size)
        found.append(info)
    for name in cut_off:
        if name not in view.types:
            return None
        found.append(view.types[name])
    return found


def _header(model: ModelProto) -> ModelProto:
    header = ModelProto(ir_version=model.ir_version)
    header.opset_import.extend(model.opset_import)
    header.functions.extend(model.functions)
    header.metadata_props.extend(model.metadata_props)
    return header
