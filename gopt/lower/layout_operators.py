"""The layout operators of ``gopt.spmd`` on one rank: as standard nodes, which ranks alike share, and constants.

Each function looks at one node and one rank. What the nodes depend on is their *variant*: ranks of one variant get the
same nodes; offsets are constants, which are the rank's own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np

from gopt.ir.graph import Node
from gopt.ir.types import TensorType, numpy_dtype
from gopt.sharding.layouts import identity

FLAT = "gopt.shard.scalars.flat"
"""The shape [-1], which all slices of a rank share."""


@dataclass(frozen=True, slots=True)
class Here:
    """What a layout operator asks of a rank: its coordinates, the values it has, the types of values."""

    coordinates: Mapping[str, int]
    present: Set[str]
    types: Mapping[str, TensorType]


@dataclass(slots=True)
class Lowered:
    """An operator on one rank. ``nodes`` builds the nodes of the ``variant``; ``alias`` is the operand whose name the
    result has where nothing needs to be done; ``types`` are the local types of results without nodes."""

    variant: Hashable
    nodes: Callable[[], Sequence[Node]]
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    types: dict[str, TensorType] = field(default_factory=dict)
    alias: str = ""


def local_slice(node: Node, here: Here) -> Lowered:
    """The rank's elements of a run, cut out of whole tensors."""
    start, stop = node.sharding.part(here.coordinates)
    starts, sizes = node.attributes["starts"], node.attributes["sizes"]
    first, last = bisect_right(starts, start) - 1, bisect_right(starts, stop - 1)
    bounds = [(max(start - starts[at], 0), min(stop - starts[at], sizes[at])) for at in range(first, last)]
    cut = tuple(bound != (0, sizes[at]) for at, bound in zip(range(first, last), bounds))
    output = node.outputs[0]
    names = [output] if len(cut) == 1 else [f"{output}.{number}" for number in range(len(cut))]
    constants = {FLAT: np.array([-1], np.int64)}
    for name, (low, high), is_cut in zip(names, bounds, cut):
        constants |= _bounds(name, low, high) if is_cut else {}

    def nodes() -> list[Node]:
        made = []
        for at, name, is_cut in zip(range(first, last), names, cut):
            made.append(_make(node, "Reshape", [node.inputs[at], FLAT], f"{name}.whole" if is_cut else name))
            if is_cut:
                made.append(_make(node, "Slice", [f"{name}.whole", f"{name}.start", f"{name}.stop"], name))
        return made if len(names) == 1 else [*made, _make(node, "Concat", names, output, axis=0)]

    return Lowered((first, cut), nodes, constants)


def shard_slice(node: Node, here: Here) -> Lowered:
    """The rank's elements of a run, cut out of its part of the bucket; the part itself where that is all of it."""
    assert node.sharding.flat is not None
    axis, span = node.sharding.flat
    member = here.coordinates[axis]
    base, end = span.cuts[member], span.cuts[member + 1]
    start, stop = span.part(member)
    source, output = node.inputs[0], node.outputs[0]
    if (start, stop) == (base, end):
        return Lowered("all", list, alias=source)
    constants = _bounds(output, start - base, stop - base)
    return Lowered("part", lambda: [_make(node, "Slice", [source, *constants], output)], constants)


def local_concat(node: Node, here: Here) -> Lowered:
    """Those of the operands that the rank has, one after the other; an empty tensor where it has none."""
    names, output = [name for name in node.inputs if name in here.present], node.outputs[0]
    if not names:
        type = TensorType(here.types[output].dtype, (0,))
        return Lowered("none", list, {output: np.zeros(0, numpy_dtype(type.dtype))}, {output: type})
    if len(names) == 1:
        return Lowered(tuple(names), lambda: [_make(node, "Identity", names, output)])
    return Lowered(tuple(names), lambda: [_make(node, "Concat", names, output, axis=0)])


def select(node: Node, here: Here) -> Lowered:
    """The operand where the rank has it, else the neutral element of the reduction."""
    source, output = node.inputs[0], node.outputs[0]
    if source in here.present:
        return Lowered("present", lambda: [_make(node, "Identity", [source], output)])
    dtype = here.types[source].dtype
    neutral = identity(node.attributes["reduce"], dtype)
    return Lowered("absent", list, {output: np.array(neutral, numpy_dtype(dtype))})


def dim_slice(node: Node, here: Here) -> Lowered:
    """The member's part of a dimension."""
    axis, start, stop = _member(node, here)
    output = node.outputs[0]
    constants = _bounds(output, start, stop) | {f"{output}.axis": np.array([axis], np.int64)}
    return Lowered("part", lambda: [_make(node, "Slice", [node.inputs[0], *constants], output)], constants)


def member_gather(node: Node, here: Here) -> Lowered:
    """Rows that the member has, zeros for others."""
    axis, start, stop = _member(node, here)
    data, indices = node.inputs
    output = node.outputs[0]
    types = here.types
    constants = _offsets(node, here, start, stop)
    elements = node.op_type == "MemberGatherElements"
    behind = 0 if elements else len(types[data].dims) - axis - 1
    constants |= {f"{output}.zero": np.zeros((), numpy_dtype(types[data].dtype))}
    if behind:
        count = len(types[indices].dims)
        constants |= {f"{output}.new": np.arange(count, count + behind, dtype=np.int64)}

    def nodes() -> list[Node]:
        made, inside, safe = _inside(node, indices)
        kind = "GatherElements" if elements else "Gather"
        made.append(_make(node, kind, [data, safe], f"{output}.rows", axis=axis))
        if behind:
            made.append(_make(node, "Unsqueeze", [inside, f"{output}.new"], f"{output}.rows_inside"))
            inside = f"{output}.rows_inside"
        return [*made, _make(node, "Where", [inside, f"{output}.rows", f"{output}.zero"], output)]

    if stop == start:  # nothing to choose from
        shape = f"{output}.shape"
        constants = {shape: np.array(types[output].dims, np.int64), f"{output}.zero": constants[f"{output}.zero"]}
        return Lowered("none", lambda: [_make(node, "Expand", [f"{output}.zero", shape], output)], constants)
    return Lowered("some", nodes, constants)


LOWERED: dict[str, Callable[[Node, Here], Lowered]] = {
    "LocalSlice": local_slice, "ShardSlice": shard_slice, "LocalConcat": local_concat, "Select": select,
    "DimSlice": dim_slice, "MemberGather": member_gather, "MemberGatherElements": member_gather,
}  # fmt: skip


def _member(node: Node, here: Here) -> tuple[int, int, int]:
    """The dimension that is sharded, and the member's range of it."""
    sizes, member = node.attributes["sizes"], here.coordinates[node.attributes["group"]]
    start = sum(sizes[:member])
    return int(node.attributes["axis"]), start, start + sizes[member]


def _offsets(node: Node, here: Here, start: int, stop: int) -> dict[str, np.ndarray]:
    """Constants by which indices of the whole dimension become those of a member's part."""
    output, dtype = node.outputs[0], numpy_dtype(here.types[node.inputs[1]].dtype)
    values = {"length": sum(node.attributes["sizes"]), "start": start, "count": stop - start, "none": 0}
    return {f"{output}.{role}": np.array(value, dtype) for role, value in values.items()}


def _inside(node: Node, indices: str) -> tuple[list[Node], str, str]:
    """Nodes that say which indices choose from the member's part, and the place there, 0 for others."""
    output = node.outputs[0]

    def name(role: str) -> str:
        return f"{output}.{role}"

    made = [
        _make(node, "Less", [indices, name("none")], name("negative")),  # counted from the end
        _make(node, "Add", [indices, name("length")], name("turned")),
        _make(node, "Where", [name("negative"), name("turned"), indices], name("place")),
        _make(node, "Sub", [name("place"), name("start")], name("own")),
        _make(node, "Less", [name("own"), name("count")], name("below")),
        _make(node, "GreaterOrEqual", [name("own"), name("none")], name("above")),
        _make(node, "And", [name("below"), name("above")], name("inside")),
        _make(node, "Where", [name("inside"), name("own"), name("none")], name("safe")),
    ]
    return made, name("inside"), name("safe")


def _bounds(name: str, start: int, stop: int) -> dict[str, np.ndarray]:
    return {f"{name}.{role}": np.array([at], np.int64) for role, at in (("start", start), ("stop", stop))}


def _make(like: Node, op_type: str, inputs: Sequence[str], output: str, **attributes: object) -> Node:
    return Node(op_type, inputs, [output], attributes=attributes, made_by=like.made_by)
