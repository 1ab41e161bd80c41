"""Collectives in rank files of other tools, as ``gopt.comm`` nodes.

A call of ONNX Runtime has all ranks as members. TensorRT's ``DistCollective`` in the files of Polygraphy's
``multi-device shard`` lists the ranks of the group (an empty list is all), and gathers and scatters along dimension 0.
Polygraphy writes nodes in any order, and results with the types before sharding."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, helper

from gopt.collectives import schemas
from gopt.collectives.layout import format_shape
from gopt.collectives.table import BROADCAST
from gopt.errors import InputError, UnsupportedError
from gopt.importers.collectives import DECLARED, MICROSOFT, TORCH, WORLD, declare, made, parse_groups, recognised
from gopt.ir.external_data import naming
from gopt.ir.graph import COMM, Graph, Node
from gopt.ir.inference import infer_types
from gopt.ir.load import checked_graph, read_file
from gopt.ir.model_file import ModelFile, refill
from gopt.ir.node_reader import read_nodes
from gopt.ir.symbol_table import SymbolTable
from gopt.ir.topological_order import topological_sort
from gopt.ir.types import TensorType
from gopt.ir.wire_format import encoded_nodes
from gopt.records.mesh import Mesh
from gopt.system.garbage import gc_paused

PLUGIN, TENSORRT = "DistCollective", "trt.plugins"
"""The operator of TensorRT, which files have in the standard domain, and the domain of plugins."""
_REDUCTIONS = {"sum": "sum", "avg": "mean", "max": "max", "min": "min"}
_Attributes = Mapping[str, Any]


def load_rank(path: str | os.PathLike[str], mesh: Mesh, rank: int) -> Graph:
    """The graph of a rank's file with all collectives as ``gopt.comm`` nodes.

    Raises the errors of ``gopt.ir.load.load``, and UnsupportedError for a collective without a counterpart, or of a
    group unlike all groups of the mesh."""
    schemas.register()  # types behind calls are inferred
    name = os.fsdecode(path)
    with naming(name), gc_paused():
        file = read_file(name)
        outputs = [output.name for output in file.model.graph.output]
        graph = checked_graph(_readable(file), name, own=True)
        read_calls(graph, mesh, rank)
        graph.outputs = {output: graph.outputs.get(output) or graph.type_of(output) for output in outputs}
    return graph


def _readable(file: ModelFile) -> ModelFile:
    """A file with DistCollective, made legal for onnx's checker: in the domain of plugins, with nodes in order, without
    stored types of results and without outputs of unknown shape."""
    if PLUGIN.encode() not in file.data:
        return file
    model = ModelProto()
    model.CopyFrom(file.model)
    for node in model.graph.node:
        if node.op_type == PLUGIN and not node.domain:
            node.domain = TENSORRT
    if not any(entry.domain == TENSORRT for entry in model.opset_import):
        model.opset_import.append(helper.make_opsetid(TENSORRT, 1))
    refill(model.graph.node, [model.graph.node[number] for number in _in_order(file)])
    del model.graph.value_info[:]
    refill(model.graph.output, [info for info in model.graph.output if info.type.tensor_type.HasField("shape")])
    return ModelFile(model.SerializeToString(deterministic=True))


def _in_order(file: ModelFile) -> list[int]:
    """The positions of a file's nodes in a runnable order; the order of the file for nodes on a cycle."""
    nodes = read_nodes(file.model.graph.node, encoded_nodes(file.data), SymbolTable(None), own=True)
    positions = {id(node): number for number, node in enumerate(nodes)}
    order = [positions[id(node)] for node in topological_sort(nodes, range(len(nodes)))]
    return order if len(order) == len(nodes) else list(range(len(nodes)))


def read_calls(graph: Graph, mesh: Mesh, rank: int) -> None:
    """Turn all collectives of a rank's graph into ``gopt.comm`` nodes; types behind a call are inferred."""
    everyone = "+".join(name for name, _ in mesh.axes)
    groups = {WORLD: everyone} | parse_groups(graph.metadata.get(DECLARED, ""))
    while any(node.domain in (MICROSOFT, TORCH, TENSORRT) for node in graph.nodes):
        refusal: UnsupportedError | None = None
        nodes, changed = list[Node](), False
        for node in graph.nodes:
            calls = [node]
            try:
                if (node.domain, node.op_type) == (TENSORRT, PLUGIN):
                    calls = [_of_tensorrt(graph, node, mesh, rank)]
                elif (node.domain, node.op_type) == (MICROSOFT, "AllToAll"):
                    calls = _exchanged(graph, node, groups[WORLD], mesh)
                else:
                    calls = [recognised(graph, node, groups)]
            except UnsupportedError as error:
                refusal = refusal or error
            nodes += calls
            changed |= calls[0] is not node
        graph.nodes = nodes
        if not changed:
            if refusal is not None:
                raise refusal
            return
        declare(graph, groups)
        infer_types(graph)


def _exchanged(graph: Graph, node: Node, group: str, mesh: Mesh) -> list[Node]:
    """ONNX Runtime's AllToAll, a range of rows for each member, as an exchange of a dimension of members."""
    type, members = graph.type_of(node.inputs[0]), mesh.size(group)
    _check_members(node, members, mesh, "group_size")
    if not (type.static and type.dims) or type.dims[0] % members:
        raise UnsupportedError(
            f"AllToAll {node.label!r} needs rows of {node.inputs[0]!r} for {members} ranks, which is {type}",
            "fix the shapes of the model's inputs",
        )
    rows, (name, output) = type.dims[0] // members, (node.inputs[0], node.outputs[0])
    nodes: list[Node] = []

    def reshape(source: str, target: str, shape: Sequence[int]) -> None:
        value = onnx.numpy_helper.from_array(np.array(shape, np.int64))
        nodes.append(Node("Constant", [], [f"{target}.shape"], attributes={"value": value}))
        nodes.append(Node("Reshape", [source, f"{target}.shape"], [target]))

    reshape(name, f"{output}.sent", (members, rows, *type.dims[1:]))
    sizes = {"split_sizes": [1] * members, "concat_sizes": [rows] * members}
    attributes = {"group": group, "split_axis": 0, "concat_axis": 1, **sizes}
    sent, received = [f"{output}.sent"], [f"{output}.received"]
    nodes.append(Node("AllToAll", sent, received, domain=COMM, name=node.name, attributes=attributes))
    reshape(received[0], output, type.dims)
    return nodes


def _check_members(node: Node, members: int, mesh: Mesh, *names: str) -> None:
    """Raise InputError for a call of another number of ranks than in the group; 0 is any number."""
    counts = {int(node.attributes.get(name) or members) for name in names}
    if counts != {members}:
        raise InputError(
            f"{node.op_type} {node.label!r} is for {max(counts - {members})} ranks, its group in the mesh {mesh} has "
            f"{members}",
            "give the mesh that the files were made for",
        )


def _of_tensorrt(graph: Graph, node: Node, mesh: Mesh, rank: int) -> Node:
    attributes = {
        name: value.decode() if isinstance(value, bytes) else value for name, value in node.attributes.items()
    }
    kind, type = str(attributes.get("collective_operation", "")), graph.type_of(node.inputs[0])
    maker = _KINDS.get(kind)
    if maker is None:
        raise UnsupportedError(
            f"{PLUGIN} {node.label!r} is of kind {kind!r}, which gopt cannot take",
            f"gopt takes {', '.join(_KINDS)}; write others in {COMM} operators",
        )
    group = _group(node, tuple(map(int, attributes.get("groups") or ())), mesh, rank)
    members = mesh.size(group)
    _check_members(node, members, mesh, "nb_rank", "group_size")
    if kind != "all_reduce" and not (type.static and type.dims):
        raise UnsupportedError(
            f"{PLUGIN} {node.label!r} needs the shape of {node.inputs[0]!r}, which is unknown",
            "fix the shapes of the model's inputs",
        )
    operator, rule = maker
    given = rule(node, attributes, type, members)
    if operator == BROADCAST.name and mesh.index(group, rank) != given["root"]:
        node = Node(node.op_type, [], node.outputs, domain=node.domain, name=node.name)  # the root alone has an input
    return made(node, operator, group=group, **given)


def _group(node: Node, ranks: tuple[int, ...], mesh: Mesh, rank: int) -> str:
    """The mesh axes of a group with a list of ranks."""
    names = [name for name, _ in mesh.axes]
    for count in range(1, len(names) + 1):
        for axes in combinations(names, count):
            group = "+".join(axes)
            if ranks and mesh.members(group, rank) == ranks:
                return group
    if ranks:
        raise UnsupportedError(
            f"{PLUGIN} {node.label!r} is of ranks {', '.join(map(str, ranks))}: no axes of the mesh {mesh} have just "
            f"these beside rank {rank}",
            "give a mesh in which they are a group",
        )
    return "+".join(names)


def _how(node: Node, attributes: _Attributes) -> str:
    how = _REDUCTIONS.get(str(attributes.get("reduce_op")))
    if how is None:
        raise UnsupportedError(
            f"{PLUGIN} {node.label!r} reduces by {attributes.get('reduce_op')!r}, which gopt cannot take",
            f"gopt takes {', '.join(_REDUCTIONS)}",
        )
    return how


def _reduced(node: Node, attributes: _Attributes, type: TensorType, members: int) -> dict[str, Any]:
    return {"reduce": _how(node, attributes)}


def _rooted(node: Node, attributes: _Attributes, type: TensorType, members: int) -> dict[str, Any]:
    return {"reduce": _how(node, attributes), "root": int(attributes.get("root", -1))}


def _sent(node: Node, attributes: _Attributes, type: TensorType, members: int) -> dict[str, Any]:
    root = int(attributes.get("root", -1))
    if not 0 <= root < members:
        raise InputError(f"{PLUGIN} {node.label!r} is from rank {root} of {members}", "give the index in the group")
    return {"root": root, "dtype": type.dtype, "shapes": [format_shape(type.dims)]}


def _gathered(node: Node, attributes: _Attributes, type: TensorType, members: int) -> dict[str, Any]:
    return {"axis": 0, "sizes": [type.dims[0]] * members}


def _scattered(node: Node, attributes: _Attributes, type: TensorType, members: int) -> dict[str, Any]:
    if type.dims[0] % members:
        raise InputError(
            f"{PLUGIN} {node.label!r} scatters {type.dims[0]} rows among {members} ranks, which does not come out even",
            "pad the tensor",
        )
    return {"reduce": _how(node, attributes), "axis": 0, "sizes": [type.dims[0] // members] * members}


_KINDS: Mapping[str, tuple[str, Callable[[Node, _Attributes, TensorType, int], dict[str, Any]]]] = {
    "all_reduce": ("AllReduce", _reduced),
    "reduce": ("Reduce", _rooted),
    "broadcast": (BROADCAST.name, _sent),
    "all_gather": ("AllGather", _gathered),
    "reduce_scatter": ("ReduceScatter", _scattered),
}
"""Kind of a DistCollective -> the operator of ``gopt.comm``, and its attributes beside the group."""
