"""The gradient of a max pool, as exporters write it: updates scattered into zeros at the pool's indices.

Indices count through one plane of the pool's operand: the pool's own index minus that of the plane's first element,
which a pool of size one gives. A member that holds part of the pool's result took those elements from its window. So
its updates fall into that window and are terms of a halo sum: no member needs another's updates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

from gopt.ir.constant_folding import Constants
from gopt.ir.graph import COMM, SPMD, Graph, Node
from gopt.ir.operator_use import use_of
from gopt.records.placements import Placement, Ranges, Shard, WindowTerms
from gopt.spmd.links.windows import slices

_MAPPINGS = frozenset({"AllGather", "AllToAll", "DimSlice", "HaloJoin"})
"""Operators that change nothing but the placement of a value."""
Maker = Callable[[str], Node | None]


@dataclass(frozen=True, slots=True)
class PoolPlaces:
    """Indices into a plane of a pool's operand, and the pool that makes them."""

    pool: Node
    made: str


@dataclass(frozen=True, slots=True)
class Scattered:
    """A scatter whose result is a partial sum on each member, for the window that its indices point into."""

    terms: WindowTerms
    shape: tuple[int, ...]
    """Shape of the pool's operand, which the scatter makes in place of flat planes."""

    def node(self, node: Node, axis: str, output: str) -> Node:
        """Return the operator that a member runs: it scatters into zeros of its window."""
        attributes = {
            "group": axis, "axis": self.terms.dim, "ranges": [end for each in self.terms.ranges for end in each],
            "length": self.terms.length,
        }  # fmt: skip
        made = Node("WindowScatter", node.inputs, [output], domain=SPMD, attributes=attributes)
        made.made_by, made.phase, made.source, made.name = node.made_by, node.phase, node.source, node.name
        return made


def scattered(
    node: Node, graph: Graph, constants: Constants, maker: Maker, pools: Mapping[str, Node],
    placements: Mapping[str, Placement],
) -> Scattered | None:  # fmt: skip
    """Return how members scatter their updates; None where the window of the indices is unknown.

    ``maker``: returns the node that makes a value; ``pools``: indices that the members of a split pool made -> that
    pool; ``placements``: the known ones. Whether the data are zeros is not checked here.
    """
    if not node.is_a("ScatterElements") or node.attributes.get("reduction", "none") != "add":
        return None
    places = in_plane(node.inputs[1], graph, constants, maker)
    pool = pools.get(places.made) if places is not None else None
    if places is None or pool is None:
        return None
    read, made = (graph.types[name].dims for name in (pool.inputs[0], places.made))
    data, at = (graph.types[name].dims for name in node.inputs[:2])
    known = [placements.get(name) for name in (places.made, *node.inputs[1:3])]
    took = known[0]
    axis = int(node.attributes.get("axis", 0)) % len(data)
    flat = (*read[:2], prod(read[2:])), (*made[:2], prod(made[2:]))
    if axis != 2 or (data, at) != flat or not isinstance(took, Shard) or took.dim < 2 or took.runs > 1:
        return None
    dim = took.dim
    wanted = Shard(2, tuple(size * prod(made[dim + 1 :]) for size in took.sizes), prod(made[2:dim]))
    if known[1:] != [wanted, wanted] or pool.attributes["axis"] != dim:
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
    while node is not None and node.is_a("Reshape", "Identity"):
        node = _maker(node.inputs[0], maker)
    if node is None or not node.is_a("Sub"):
        return None
    took, base = (_logical(each, maker) for each in node.inputs)
    pool, first = maker(took), maker(base)
    if pool is None or not _counts(pool, took) or first is None or not first.is_a("Slice"):
        return None
    counted = _logical(first.inputs[0], maker)
    single = maker(counted)
    shape = graph.types[pool.inputs[0]].dims
    if single is None or not _counts(single, counted) or graph.types[single.inputs[0]].dims != shape:
        return None
    return PoolPlaces(pool, took) if _single(single) and _firsts(first, graph, constants, len(shape)) else None


def _counts(node: Node, name: str) -> bool:
    """Return whether a value is a pool's indices, row by row."""
    pool = node.is_a("MaxPool") or (node.domain == SPMD and node.op_type == "MemberMaxPool")
    plain = not node.attributes.get("storage_order", 0)
    return pool and plain and len(node.outputs) > 1 and node.outputs[1] == name


def _single(pool: Node) -> bool:
    """Return whether a pool has windows of one element."""
    given = pool.attributes
    alone = all(size == 1 for key in ("kernel_shape", "strides") for size in given.get(key, ()))
    return alone and not any(given.get("pads", ()))


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
