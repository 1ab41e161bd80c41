"""Sharding specs of ONNX IR 11 for the ranks' layout, written into a source."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import product
from math import prod

import onnx

from gopt.ir.device_specs import OWN, ShardedDim, TensorSpec, add_configuration, with_specs
from gopt.ir.graph import Graph, Node, clone
from gopt.ir.model_file import refill
from gopt.records.mesh import Mesh
from gopt.records.placements import FlatShard, OnMember, Shard, Sharding
from gopt.spmd.program import BucketSlice, SpmdProgram
from gopt.text.sanitize import show


def annotated(graph: Graph, nodes: Sequence[Node], program: SpmdProgram) -> tuple[onnx.ModelProto, list[Node]]:
    """Add a device configuration for the mesh to a source's header, and sharding specs of states to the nodes.

    The configuration has a device for each rank. A spec covers each state held in parts, at each reader. A sharding
    beyond ONNX specs is left out: slices of a bucket other than equal runs of rows. Earlier configurations of gopt are
    replaced.
    """
    mesh = program.mesh
    name = f"{OWN}{mesh}"
    header = deepcopy(graph.header)
    old = [config.name for config in header.configuration if config.name.startswith(OWN)]
    refill(header.configuration, [config for config in header.configuration if config.name not in old])
    add_configuration(header, name, [f"rank {rank}" for rank in range(mesh.ranks)])
    specs = {tensor: spec for tensor, spec in layout_specs(program).items() if spec is not None}
    return header, [_noted(node, name, specs, old) for node in nodes]


def layout_specs(program: SpmdProgram) -> dict[str, TensorSpec | None]:
    """State of the source held in parts -> spec; None for shardings beyond ONNX specs.

    If axes split the computation, specs express this split alone, for tensor parallelism to read again.
    """
    if program.split:
        return {tensor: tensor_spec(tensor, sharding, program.mesh) for tensor, sharding in program.parts.items()}
    shapes = program.source.graph.types
    specs: dict[str, TensorSpec | None] = {}
    for state in program.states:
        if state.sharded and not state.copy:
            for part in state.slices:
                specs[part.tensor] = slice_spec(part, shapes[part.tensor].dims, state.sharding, program.mesh)
    return specs


def untold(program: SpmdProgram) -> str:
    """A note on the states without a spec, or ''."""
    specs = layout_specs(program)
    missing = [tensor for tensor, spec in specs.items() if spec is None]
    if not missing:
        return ""
    return (
        f"--annotate: {len(missing)} of {len(specs)} sharded states have no sharding spec, {show(missing[0])} first: "
        "ONNX has none for slices of a bucket (--partition whole has a spec for each state)"
    )


def slice_spec(part: BucketSlice, dims: Sequence[int], sharding: Sharding, mesh: Mesh) -> TensorSpec | None:
    """The spec of a tensor in a bucket, or on a single member; None unless members have equal runs of rows."""
    (axis, placement), *more_axes = sharding.by_axis
    if more_axes or part.start or part.elements != prod(dims):
        return None
    members: list[list[int]] = [[] for _ in range(mesh.size(axis))]
    for rank in range(mesh.ranks):
        members[mesh.coordinates(rank)[axis]].append(rank)
    if isinstance(placement, OnMember):
        return TensorSpec(part.tensor, "", (tuple(members[placement.member]),), ())
    if not isinstance(placement, FlatShard):
        return None
    inside = FlatShard(placement.cuts, part.offset, part.offset + part.elements)
    if inside.holder is not None:
        return TensorSpec(part.tensor, "", (tuple(members[inside.holder]),), ())
    rows, row = dims[0] if dims else 1, prod(dims[1:])
    lengths = {inside.length(member) for member in range(len(members))}
    if len(lengths) > 1 or lengths.pop() % row:
        return None
    return TensorSpec(part.tensor, "", tuple(map(tuple, members)), (ShardedDim(0, ((rows, len(members)),)),))


def _noted(node: Node, name: str, specs: dict[str, TensorSpec], old: Sequence[str]) -> Node:
    node_specs = [replace(specs[name], node=node.label) for name in dict.fromkeys(node.inputs) if name in specs]
    if not node_specs and not old:
        return node
    copy = clone(node)
    copy.encoded = with_specs(node, {name: node_specs} if node_specs else {}, old)
    return copy


def tensor_spec(tensor: str, sharding: Sharding, mesh: Mesh) -> TensorSpec | None:
    """Return the spec of a tensor; None if replicated, or beyond ONNX specs.

    Shards are listed by dimension, the last varies fastest; ranks along axes not splitting the tensor are a group.
    """
    shards = {axis: placement for axis, placement in sharding.by_axis if isinstance(placement, Shard)}
    by_dim = sorted(shards, key=lambda axis: shards[axis].dim)
    if not shards or len(shards) < len(sharding.by_axis) or len({shards[axis].dim for axis in by_dim}) < len(by_dim):
        return None
    dims = []
    for axis in by_dim:
        shard = shards[axis]
        part = (sum(shard.sizes), mesh.size(axis))
        dims.append(ShardedDim(shard.dim, (part,) if shard.runs == 1 else ((shard.runs, 1), part)))
    groups: dict[tuple[int, ...], list[int]] = {
        position: [] for position in product(*(range(mesh.size(axis)) for axis in by_dim))
    }
    for rank in range(mesh.ranks):
        at = mesh.coordinates(rank)
        groups[tuple(at[axis] for axis in by_dim)].append(rank)
    assert prod(shards for dim in dims for _, shards in dim.factors) == len(groups)
    return TensorSpec(tensor, "", tuple(map(tuple, groups.values())), tuple(dims))
