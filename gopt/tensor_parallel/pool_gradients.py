"""The gradient of a largest-value pool, as exporters write it: updates added to zeros at the places that the pool took.

Places are counted through one plane of the pool's operand: the pool's own count, less that of the plane's first place,
which a pool over single places gives. A member that has some places of the pool's result took them from its window.
So its updates fall into that window, and are terms of a halo sum: no member needs the others' updates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

from gopt.ir.graph import COMM, SPMD, Graph, Node
from gopt.sharding.links.windows import slices
from gopt.sharding.placements import Placement, Ranges, Shard, WindowTerms
from gopt.tensor_parallel.operators import Constants, operator

_MAPPINGS = frozenset({"AllGather", "AllToAll", "DimSlice", "HaloJoin"})
"""Operators that change only the placement of a value."""
Maker = Callable[[str], Node | None]


@dataclass(frozen=True, slots=True)
class Places:
    """Places in a plane of a pool's operand: the pool, and what of it makes them."""

    pool: Node
    made: str


@dataclass(frozen=True, slots=True)
class Scattered:
    """A scatter of which each member has terms, for the window of places that its indices are in."""

    terms: WindowTerms
    shape: tuple[int, ...]
    """Of the pool's operand: the scatter makes it, and not planes that are flat."""

    def node(self, node: Node, axis: str, output: str) -> Node:
        """The operator that a member runs: into zeros of its window."""
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
    """How members scatter what they have; None where it is not known in which window indices are.

    ``maker``: who makes a value; ``pools``: places that members of a split pool took -> that pool, whose window they
    are in; ``placements``: those known. Data that is not zeros is not looked at here.
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


def in_plane(name: str, graph: Graph, constants: Constants, maker: Maker) -> Places | None:
    """Return the places of a pool if the value is its indices, counted through each plane from 0; else None."""
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
    return Places(pool, took) if _single(single) and _firsts(first, graph, constants, len(shape)) else None


def _counts(node: Node, name: str) -> bool:
    """Return whether a value is the places that a pool took, row by row."""
    pool = node.is_a("MaxPool") or (node.domain == SPMD and node.op_type == "MemberMaxPool")
    plain = not node.attributes.get("storage_order", 0)
    return pool and plain and len(node.outputs) > 1 and node.outputs[1] == name


def _single(pool: Node) -> bool:
    """Return whether a pool takes every place by itself."""
    given = pool.attributes
    alone = all(size == 1 for key in ("kernel_shape", "strides") for size in given.get(key, ()))
    return alone and not any(given.get("pads", ()))


def _firsts(node: Node, graph: Graph, constants: Constants, rank: int) -> bool:
    """Return whether a Slice takes the first place of every plane."""
    rows = slices(operator(node, graph, constants))
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
