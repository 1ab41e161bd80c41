"""Recognises collectives of a source, of whichever exporter, checks them and gives them types.

``gopt.comm`` nodes are taken as they are. Of the ``com.microsoft`` ones the group is an integer whose meaning changed
between schema generations (0 = all ranks or the data group, 1 = data or tensor group), so the user must declare it.
``_c10d_functional`` ones are torch's functional collectives, with torch's names of arguments as attributes; their group
is the name of a process group, a number as a rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import onnx

from gopt.collectives import schemas
from gopt.collectives.table import COLLECTIVES
from gopt.errors import InputError, OptionError, UnsupportedError
from gopt.ir.graph import COMM, COPIES, Graph, Node
from gopt.ir.inference import infer_types

MICROSOFT = "com.microsoft"
TORCH = "_c10d_functional"
HORIZONTAL = 4
"""The ``group_type`` of MegatronF and MegatronG; some of their schemas omit it."""
DECLARED = "gopt.group_type"
"""Key of the model's metadata that may contain the value of ``--group-type``."""
WORLD = "all"
"""Name of the group of operators that do not specify one."""
_PACKED = ("NcclAllGather", "NcclReduceScatter")
_UNSUPPORTED = frozenset([
    "AdasumAllReduce", "HorovodAllReduce", "HorovodBarrier", "AllToAll", "Send", "Recv",
    "DistributedMatMul", "DistributedSlice", "DistributedReshape", "DistributedExpand", "DistributedReduceSum",
])  # fmt: skip


def parse_groups(text: str) -> dict[str, str]:
    """``1=shard,4=tp`` -> ``{"1": "shard", "4": "tp"}``; raises OptionError on anything else."""
    groups = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        number, equals, group = part.partition("=")
        axes = group.split("+")
        if not equals or not (number.isdigit() or number == WORLD) or not all(map(str.isidentifier, axes)):
            raise OptionError(f"cannot read {part!r} as a group type", "write --group-type 1=shard,4=tp")
        groups[number] = group
    return groups


def recognise(graph: Graph, groups: Mapping[str, str]) -> None:
    """Turn all collectives of a loaded source into ``gopt.comm`` nodes with known types.

    ``groups`` maps the integer ``group_type`` (or ``all``) to mesh axes, over what the model's own metadata says.
    Raises UnsupportedError for a call whose group is not declared or that gopt cannot take, InputError for a
    malformed one.
    """
    groups = parse_groups(graph.metadata.get(DECLARED, "")) | dict(groups)
    copies = [node for node in graph.nodes if node.domain == MICROSOFT and node.op_type == "MegatronF"]
    if copies:
        lines = [f"{node.outputs[0]}={_megatron(node, groups)}" for node in copies]
        graph.metadata[COPIES] = "\n".join(lines)
    nodes = [recognised(graph, node, groups) for node in graph.nodes]
    graph.nodes = nodes
    calls = [node for node in nodes if node.domain == COMM]
    if not calls:
        return
    declare(graph, groups)
    if not all(graph.type_of(name).static for node in nodes for name in node.outputs if name):
        schemas.register()
        infer_types(graph)
    for node in calls:
        _check(graph, node)


def recognised(graph: Graph, node: Node, groups: Mapping[str, str]) -> Node:
    """The node, or the call that a node of another dialect is."""
    if node.domain == TORCH:
        return _of_torch(graph, node, groups)
    if node.domain != MICROSOFT:
        return node
    if node.op_type in _PACKED:
        raise UnsupportedError(
            f"{node.op_type} {node.label!r} leaves each rank its own range of the packed tensors: the source is "
            "sharded already",
            "start from the step before its optimizer was shared out",
        )
    if node.op_type in _UNSUPPORTED:
        raise UnsupportedError(
            f"{node.op_type} {node.label!r} is a collective that gopt cannot take", f"write it in {COMM} operators"
        )
    if node.op_type == "NcclAllReduce":
        return made(node, "AllReduce", group=_group(node, str(node.attributes.get("group_type", 0)), groups))
    if node.op_type == "MegatronF":
        return _identity(node)
    if node.op_type == "MegatronG":
        return made(node, "AllReduce", group=_megatron(node, groups))
    if node.op_type == "AllReduce":
        return made(node, "AllReduce", group=_group(node, WORLD, groups))
    if node.op_type == "AllGather":
        return _gather(graph, node, _group(node, WORLD, groups))
    return node


def _group(node: Node, number: str, groups: Mapping[str, str]) -> str:
    if number in groups:
        return groups[number]
    what = "names no group" if number == WORLD else f"has group_type {number}"
    why = "" if number == WORLD else ": that number means different groups in different versions of the operator"
    raise UnsupportedError(
        f"{node.op_type} {node.label!r} {what}{why}",
        f"say which mesh axes it is: --group-type {number}=shard, or the model's metadata {DECLARED}",
    )


def _megatron(node: Node, groups: Mapping[str, str]) -> str:
    return _group(node, str(node.attributes.get("group_type", HORIZONTAL)), groups)


def _of_torch(graph: Graph, node: Node, groups: Mapping[str, str]) -> Node:
    """A functional collective of torch: its attributes are named as torch names the arguments."""
    attributes = node.attributes
    if node.op_type == "wait_tensor":
        return _identity(node)
    makers = {"all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"}
    if node.op_type not in makers or len(node.inputs) != 1:
        raise UnsupportedError(
            f"{node.op_type} {node.label!r} is a collective that gopt cannot take", f"write it in {COMM} operators"
        )
    group = _group(node, _text(attributes.get("group_name", WORLD)), groups)
    reduce = {"avg": "mean"}.get(_text(attributes.get("reduce_op", "sum")), _text(attributes.get("reduce_op", "sum")))
    if node.op_type == "all_reduce":
        return made(node, "AllReduce", group=group, reduce=reduce)
    type, members = graph.type_of(node.inputs[0]), int(attributes.get("group_size", 0))
    splits = [list(attributes.get(key, ())) for key in ("output_split_sizes", "input_split_sizes")]
    if not type.static or not type.dims or (node.op_type != "all_to_all_single" and members < 1):
        raise UnsupportedError(
            f"{node.op_type} {node.label!r} needs group_size and the shape of {node.inputs[0]!r}: one is unknown",
            "give the node group_size, and declare the shape in the file (value_info)",
        )
    length = type.dims[0]
    if node.op_type == "all_gather_into_tensor":
        return made(node, "AllGather", group=group, axis=0, sizes=[length] * members)
    if node.op_type == "reduce_scatter_tensor" and length % members == 0:
        return made(node, "ReduceScatter", group=group, reduce=reduce, axis=0, sizes=[length // members] * members)
    raise UnsupportedError(
        f"{node.op_type} {node.label!r} splits and concatenates the same axis in {splits[0] or length} parts: "
        "gopt's AllToAll exchanges two axes" if node.op_type == "all_to_all_single"
        else f"{node.op_type} {node.label!r}: {length} rows cannot be shared out evenly among {members} members",
        f"write it in {COMM} operators",
    )  # fmt: skip


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _identity(node: Node) -> Node:
    identity = Node("Identity", node.inputs[:1], node.outputs[:1], name=node.name, attributes={})
    identity.proto = identity.to_proto()
    return identity


def _gather(graph: Graph, node: Node, group: str) -> Node:
    axis, size = node.attributes.get("axis"), node.attributes.get("group_size")
    type = graph.type_of(node.inputs[0])
    if axis is None or size is None or len(node.inputs) != 1 or not type.static:
        raise UnsupportedError(
            f"AllGather {node.label!r} needs one input of known shape, axis and group_size, and one of them is missing",
            "give the node axis and group_size, and declare the shape in the file (value_info)",
        )
    axis = axis % max(len(type.dims), 1)
    if axis >= len(type.dims):
        raise InputError(
            f"AllGather {node.label!r}: its input {type} has no axis {axis}",
            f"an axis is from {-len(type.dims)} to {len(type.dims) - 1}" if type.dims else "gather a tensor with axes",
        )
    return made(node, "AllGather", group=group, axis=axis, sizes=[type.dims[axis]] * size)


def made(node: Node, op_type: str, **attributes: Any) -> Node:
    """The node as a ``gopt.comm`` one; it keeps its name and values, and counts as the source's own."""
    call = Node(op_type, node.inputs, node.outputs, domain=COMM, name=node.name, attributes=attributes)
    call.proto = call.to_proto()
    return call


def declare(graph: Graph, groups: Mapping[str, str]) -> None:
    """Import the dialect in the header, and store the declared groups for later readers of the source."""
    header = deepcopy(graph.header)
    if not any(opset.domain == COMM for opset in header.opset_import):
        header.opset_import.append(onnx.helper.make_opsetid(COMM, 1))
    text = ",".join(f"{number}={group}" for number, group in sorted(groups.items()))
    entries = {DECLARED: text, COPIES: graph.metadata.get(COPIES, "")}
    entries = {key: value for key, value in entries.items() if value}
    rest = [entry for entry in header.metadata_props if entry.key not in entries]
    del header.metadata_props[:]
    added = [onnx.StringStringEntryProto(key=key, value=value) for key, value in entries.items()]
    header.metadata_props.extend([*rest, *added])
    graph.header = header


def _check(graph: Graph, node: Node) -> None:
    """Refuse a call that is malformed, or that no rank-independent graph can hold; settle its outputs' types."""
    record = COLLECTIVES.get(node.op_type)
    if record is None:
        raise InputError(f"{node.label!r}: {COMM} has no operator {node.op_type!r}", f"it has {', '.join(COLLECTIVES)}")
    if record.pairwise:
        raise UnsupportedError(
            f"{node.op_type} {node.label!r} joins two ranks: gopt does not take such sources",
            f"give it a step without pipeline stages; of {COMM} it takes "
            f"{', '.join(name for name, collective in COLLECTIVES.items() if not collective.pairwise)}",
        )
    if not all((*node.inputs, *node.outputs)):
        raise InputError(
            f"{node.op_type} {node.label!r} has an absent operand or result", "name all its inputs and outputs"
        )
    operands = [graph.type_of(name) for name in node.inputs]
    try:
        attributes = record.resolve(node.attributes)
        types = record.infer(node.attributes, [(type.dtype, type.shape) for type in operands])
    except (InputError, UnsupportedError) as error:
        raise type(error)(f"{node.label!r}: {error.message}", *error.hints) from error
    if "cuts" in attributes:
        raise UnsupportedError(
            f"{node.op_type} {node.label!r} has cuts: the source is sharded already",
            "give gopt the step that was sharded (source.onnx of an output folder)",
        )
    uneven = [name for name in attributes if name.endswith("sizes") and len(set(attributes[name])) > 1]
    if uneven:
        raise UnsupportedError(
            f"{node.op_type} {node.label!r}: {uneven[0]} differ, so its members' shapes do too",
            f"one graph for all members needs equal {uneven[0]}: pad the tensor, or give gopt the step before sharding",
        )
    if len(types) != len(node.outputs):
        raise InputError(
            f"{node.op_type} {node.label!r} gives {len(types)} values, and has {len(node.outputs)} outputs",
            f"give the node {len(types)}",
        )
    unknown = [name for name in (*node.inputs, *node.outputs) if not graph.type_of(name).static]
    if unknown:
        raise UnsupportedError(
            f"the shape of {unknown[0]!r}, which {node.op_type} {node.label!r} handles, is unknown",
            "declare it in the file (value_info)",
        )
    for name, (dtype, shape) in zip(node.outputs, types):
        if (graph.types[name].dtype, graph.types[name].shape) != (dtype, shape):
            raise InputError(
                f"{node.op_type} {node.label!r} makes {name!r} {dtype}{list(shape or ())}, the file says "
                f"{graph.types[name]}",
                "correct the type in the file, or the attributes of the node",
            )
