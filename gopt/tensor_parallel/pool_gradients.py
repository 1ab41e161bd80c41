"""The gradient of a max pool, as exporters write it: updates scattered into zeros at the pool's indices.

Indices count through one plane of the pool's operand: the pool's own index minus the plane's first index,
which a pool of size one gives. A member holding part of the pool's result took those elements from its window. So its
updates fall into that window and are terms of a halo sum: no member needs another's updates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

from gopt.ir.constant_folding import Constants
from gopt.ir.graph import COMM, SPMD, Graph, Node
from gopt.ir.node_kinds import record_of
from gopt.ir.operator_use import use_of
from gopt.operators.dims.windows import slices
from gopt.operators.kinds import POOLS, VIEWS
from gopt.operators.operator import Indices
from gopt.records.placements import Placement, Ranges, Shard, WindowTerms

_MAPPINGS = frozenset({"AllGather", "AllToAll", "DimSlice", "HaloJoin"})
"""Operators that change nothing but the placement of a value."""
Maker = Callable[[str], Node | None]


@dataclass(frozen=True, slots=True)
class PoolPlaces:
    """Indices into a plane of a pool's operand, and the pool making them."""

    pool: Node
    made: str


@dataclass(frozen=True, slots=True)
class Scattered:
    """A scatter whose result is a partial sum on each member, for the window its indices point into."""

    terms: WindowTerms
    shape: tuple[int, ...]
    """Shape of the pool's operand, which the scatter makes in place of flat planes."""

    def node(self, node: Node, axis: str, output: str) -> Node:
        """Return the operator a member runs: it scatters into zeros of the window."""
        attributes = {
            "group": axis, "axis": self.terms.dim, "ranges": [end for span in self.terms.ranges for end in span],
            "length": self.terms.length,
        }  # fmt: skip
        scatter = Node("WindowScatter", node.inputs, [output], domain=SPMD, attributes=attributes)
        scatter.made_by, scatter.phase, scatter.source, scatter.name = node.made_by, node.phase, node.source, node.name
        return scatter


def scattered(
    node: Node, graph: Graph, constants: Constants, maker: Maker, pools: Mapping[str, Node],
    placements: Mapping[str, Placement],
) -> Scattered | None:  # fmt: skip
    """Return how members scatter their updates; None where the window of the indices is unknown.

    ``maker``: returns the node making a value; ``pools``: indices that the members of a split pool made -> that pool;
    ``placements``: the known ones. Whether the data are zeros is not checked here.
    """
    if record_of(node).indices is not Indices.ELEMENT or node.attributes.get("reduction", "none") != "add":
        return None
    planes = in_plane(node.inputs[1], graph, constants, maker)
    pool = pools.get(planes.made) if planes is not None else None
    if planes is None or pool is None:
        return None
    read, pooled = (graph.types[name].dims for name in (pool.inputs[0], planes.made))
    data, at = (graph.types[name].dims for name in node.inputs[:2])
    operand_rows = [placements.get(name) for name in (planes.made, *node.inputs[1:3])]
    took = operand_rows[0]
    axis = int(node.attributes.get("axis", 0)) % len(data)
    flat = (*read[:2], prod(read[2:])), (*pooled[:2], prod(pooled[2:]))
    if axis != 2 or (data, at) != flat or not isinstance(took, Shard) or took.dim < 2 or took.runs > 1:
        return None
    dim = took.dim
    wanted = Shard(2, tuple(size * prod(pooled[dim + 1 :]) for size in took.sizes), prod(pooled[2:dim]))
    if operand_rows[1:] != [wanted, wanted] or pool.attributes["axis"] != dim:
        return None
    ends, length = pool.attributes["ranges"], read[dim]
    ranges: Ranges = tuple(
        (min(max(start, 0), length), min(max(stop, 0), length)) for start, stop in zip(ends[::2], ends[1::2])
    )
    return Scattered(WindowTerms(dim, ranges, length), read)


def in_plane(name: str, graph: Graph, constants: Constants, maker: Maker) -> PoolPlaces | None:
    """Return whether a value is a pool's indices, counted through each plane from 0, in any shape of as many
    elements."""
    node = _maker(name, maker)
    while node is not None and node.is_in(VIEWS):
        node = _maker(node.inputs[0], maker)
    if node is None or record_of(node).signs != (1, -1):
        return None
    took, base = (_logical(operand, maker) for operand in node.inputs)
    pool, cut = maker(took), maker(base)
    if pool is None or not _counts(pool, took) or cut is None or not cut.is_a("Slice"):
        return None
    counted = _logical(cut.inputs[0], maker)
    single = maker(counted)
    shape = graph.types[pool.inputs[0]].dims
    if single is None or not _counts(single, counted) or graph.types[single.inputs[0]].dims != shape:
        return None
    return PoolPlaces(pool, took) if _single(single) and _firsts(cut, graph, constants, len(shape)) else None


def _counts(node: Node, name: str) -> bool:
    """Return whether a value is a pool's indices, row by row."""
    pool = node.is_in(POOLS) or (node.domain == SPMD and node.op_type == "MemberMaxPool")
    plain = not node.attributes.get("storage_order", 0)
    return pool and plain and len(node.outputs) > 1 and node.outputs[1] == name


def _single(pool: Node) -> bool:
    """Return whether a pool has windows of size 1."""
    attributes = pool.attributes
    unit = all(size == 1 for key in ("kernel_shape", "strides") for size in attributes.get(key, ()))
    return unit and not any(attributes.get("pads", ()))


def _firsts(node: Node, graph: Graph, constants: Constants, rank: int) -> bool:
    """Return whether a Slice takes the first element of every plane."""
    rows = slices(use_of(node, graph, constants))
    if rows is None or any(rows.get(dim, (-1, 0))[0] for dim in range(2, rank)):
        return False
    before, after = (graph.types[name].dims for name in (node.inputs[0], node.outputs[0]))
    return after == (*before[:2], *[1] * (rank - 2))


def _logical(name: str, maker: Maker) -> str:
    """Return the value before mappings were applied."""
    node = maker(name)
    while node is not None and node.domain in (COMM, SPMD) and node.op_type in _MAPPINGS:
        name = node.inputs[0]
        node = maker(name)
    return name


def _maker(name: str, maker: Maker) -> Node | None:
    return maker(_logical(name, maker))
