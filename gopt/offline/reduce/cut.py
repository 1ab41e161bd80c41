"""Builds a candidate: a model without some nodes, outputs and values."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from onnx import ModelProto, NodeProto, ValueInfoProto

from gopt.offline.reduce.graph_view import GraphView, key_of, node_reads

_NONE: Mapping[str, str] = {}


def cut(
    view: GraphView, *, nodes: Collection[str] = (), outputs: Collection[str] = (), values: Collection[str] = (),
    instead: Mapping[str, str] = _NONE,
) -> ModelProto | None:  # fmt: skip
    """The model without the given nodes (by key), graph outputs and stored values; None for an invalid graph.

    A removed node's result with readers becomes an input; so does a stored value. ``instead``: readers of a value read
    another value. Nodes, inputs and values not needed by an output are left out. If no output is left, the last value
    read by removed nodes becomes the output."""
    remaining = [
        _renamed(node, instead) if any(name in instead for name in node.input) else node
        for node in view.nodes if key_of(node) not in nodes
    ]  # fmt: skip
    computed = {name for node in remaining for name in node.output if name}
    wanted = [name for name in view.outputs if name not in outputs and name in computed and name not in instead]
    if not wanted:
        wanted = _last_read(view, nodes, computed)
    remaining, needed = _live(remaining, wanted)
    computed = {name for node in remaining for name in node.output if name}
    if not remaining:
        return None
    infos = _inputs(view, needed - computed, values)
    ends = [view.types.get(name) for name in wanted]
    if infos is None or None in ends:
        return None
    model = ModelProto()
    model.CopyFrom(_header(view.model))
    model.graph.name = view.model.graph.name
    model.graph.node.extend(remaining)
    model.graph.input.extend(infos)
    model.graph.output.extend(info for info in ends if info is not None)
    model.graph.initializer.extend(
        tensor for name, tensor in view.stored.items() if name in needed and name not in values
    )
    listed = {info.name for info in infos} | set(wanted)
    model.graph.value_info.extend(
        info for info in view.model.graph.value_info if info.name in computed and info.name not in listed
    )
    return model


def _renamed(node: NodeProto, instead: Mapping[str, str]) -> NodeProto:
    copy = NodeProto()
    copy.CopyFrom(node)
    copy.input[:] = [instead.get(name, name) for name in node.input]
    return copy


def _last_read(view: GraphView, nodes: Collection[str], computed: set[str]) -> list[str]:
    for node, reads in zip(reversed(view.nodes), reversed(view.reads), strict=True):
        if key_of(node) in nodes:
            for name in reads:
                if name in computed:
                    return [name]
    return []


def _live(nodes: list[NodeProto], wanted: list[str]) -> tuple[list[NodeProto], set[str]]:
    """The nodes needed by outputs, in order, and every value read by these nodes and outputs."""
    needed, live = set(wanted), []
    for node in reversed(nodes):
        if any(name in needed for name in node.output):
            live.append(node)
            needed.update(node_reads(node))
    return live[::-1], needed


def _inputs(view: GraphView, read: set[str], values: Collection[str]) -> list[ValueInfoProto] | None:
    """The inputs of a candidate: the model's inputs with readers, then the new inputs; None for a missing type."""
    infos = [info for name, info in view.inputs.items() if name in read]
    plain = [name for name in view.stored if name in read and name in values and name not in view.inputs]
    cut_off = sorted(name for name in read if name not in view.inputs and name not in view.stored)
    for name in plain:
        tensor = view.stored[name]
        info = ValueInfoProto(name=name)
        info.type.tensor_type.elem_type = tensor.data_type
        info.type.tensor_type.shape.SetInParent()
        for size in tensor.dims:
            info.type.tensor_type.shape.dim.add(dim_value=size)
        infos.append(info)
    for name in cut_off:
        if name not in view.types:
            return None
        infos.append(view.types[name])
    return infos


def _header(model: ModelProto) -> ModelProto:
    header = ModelProto(ir_version=model.ir_version)
    header.opset_import.extend(model.opset_import)
    header.functions.extend(model.functions)
    header.metadata_props.extend(model.metadata_props)
    return header
