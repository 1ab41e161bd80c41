"""Pairs of calls that equal one call: reduce + broadcast = all-reduce, all-reduce + slice = reduce-scatter, a sum over
one axis and then over another = a sum over both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from gopt.ir.graph import COMM, SPMD, Graph, Node
from gopt.ir.rewriter import GraphRewriter
from gopt.ir.types import TensorType
from gopt.records.placements import FlatShard, Sharding
from gopt.spmd.program import SpmdProgram


def combine(program: SpmdProgram, rewriter: GraphRewriter) -> dict[str, int]:
    """Apply the rules; how often each did. Linear in the graph."""
    if not any(_is(node, "Reduce") or _is(node, "AllReduce") for node in program.graph.nodes):
        return {"reduce_broadcast": 0, "reduce_slice": 0}
    users = program.graph.users()
    reduces = {name: node for node in program.graph.nodes if _is(node, "Reduce") for name in node.outputs}
    sent = [node for node in program.graph.nodes if _is(node, "Broadcast") and node.inputs]
    pairs = [(reduces[node.inputs[0]], node) for node in sent if node.inputs[0] in reduces]
    pairs = [(above, below) for above, below in pairs if _one(program.graph, users, above, below)]
    for reduce, broadcast in pairs:
        _all_reduce(rewriter, reduce, broadcast)
    used = {id(node) for pair in pairs for node in pair}
    joined = _join_groups(program, rewriter, users)
    used |= joined
    tiles = _tiles(program, users, used)
    for number, tile in enumerate(tiles):
        _reduce_scatter(rewriter, tile, f"gopt.{rewriter.pass_name}.s{number}.shard")
    result = {"reduce_broadcast": len(pairs), "reduce_slice": sum(len(tile.calls) for tile in tiles)}
    return result | ({"reduce_reduce": len(joined) // 2} if joined else {})


def _is(node: Node, op_type: str) -> bool:
    return node.domain == COMM and node.op_type == op_type


def _drop(rewriter: GraphRewriter, node: Node, why: str) -> None:
    if node.encoded is not None:
        rewriter.remove(node, why)
    else:
        rewriter.discard(node.outputs[0])


# --- reduce + broadcast ---------------------------------------------------------------------------------------------


def _one(graph: Graph, users: dict[str, list[Node]], reduce: Node, broadcast: Node) -> bool:
    """Return whether a Broadcast sends the result of a Reduce of the same group, with no other reader."""
    alike = all(reduce.attributes[key] == broadcast.attributes[key] for key in ("group", "root"))
    shown = any(name in graph.outputs for name in reduce.outputs)
    unread = all(users.get(name) == [broadcast] for name in reduce.outputs)
    return alike and unread and not shown and set(reduce.outputs) == set(broadcast.inputs)


def _all_reduce(rewriter: GraphRewriter, reduce: Node, broadcast: Node) -> None:
    for node in (reduce, broadcast):
        _drop(rewriter, node, "reduce and broadcast are one all-reduce")
    source = dict(zip(reduce.outputs, reduce.inputs))
    attributes = {"group": reduce.attributes["group"], "reduce": reduce.attributes.get("reduce", "sum")}
    outputs = {name: rewriter.graph.types[name] for name in broadcast.outputs}
    inputs = [source[name] for name in broadcast.inputs]
    rewriter.add("AllReduce", inputs, outputs, domain=COMM, attributes=attributes, after=broadcast)


# --- a sum over one axis, then over another --------------------------------------------------------------------------


def _join_groups(program: SpmdProgram, rewriter: GraphRewriter, users: dict[str, list[Node]]) -> set[int]:
    """Replace two sums inserted by gopt, where only the second reads the first, by one call over both groups.

    Returns the ids of the replaced calls. Of three in a row, two are joined.
    """
    graph = program.graph
    replaced: set[int] = set()
    sums = {node.outputs[0]: node for node in graph.nodes if _own_sum(node)}
    for below in list(sums.values()):
        above = sums.get(below.inputs[0])
        if above is None or {id(above), id(below)} & replaced or above.sharding != below.sharding:
            continue
        axes = [str(item.attributes["group"]).split("+") for item in (above, below)]
        name = above.outputs[0]
        if set(axes[0]) & set(axes[1]) or users.get(name) != [below] or name in graph.outputs:
            continue
        replaced |= {id(above), id(below)}
        group = "+".join(axis for axis, _ in program.mesh.axes if axis in axes[0] + axes[1])
        output = below.outputs[0]
        for node in (above, below):
            _drop(rewriter, node, "a sum over one axis and then over another is one over both")
        call = rewriter.add(
            "AllReduce", above.inputs, {output: graph.types[output]}, domain=COMM, sharding=below.sharding,
            attributes={"group": group, "reduce": "sum"}, after=below,
        )  # fmt: skip
        call.phase = below.phase
    return replaced


def _own_sum(node: Node) -> bool:
    lone = len(node.inputs) == 1
    return lone and bool(node.made_by) and _is(node, "AllReduce") and node.attributes.get("reduce", "sum") == "sum"


# --- all-reduce + slice ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _View:
    """The rank's part of some adjacent tensors of a bucket, under one or more names."""

    sharding: Sharding
    sources: tuple[str, ...]
    nodes: tuple[Node, ...]

    @property
    def axis(self) -> str:
        assert self.sharding.flat is not None
        return self.sharding.flat[0]

    @property
    def span(self) -> FlatShard:
        assert self.sharding.flat is not None
        return self.sharding.flat[1]


@dataclass(frozen=True, slots=True)
class _Tile:
    """Views that cover a bucket, in order, and the calls with results read by these views alone."""

    views: tuple[_View, ...]
    calls: tuple[Node, ...]


def _tiles(program: SpmdProgram, users: dict[str, list[Node]], used: set[int]) -> list[_Tile]:
    """Buckets of all-reduces over the sharing axis, where every rank reads the rank's part alone."""
    producer = {
        name: node for node in program.graph.nodes for name in node.outputs
        if _is(node, "AllReduce") and id(node) not in used
    }  # fmt: skip
    if not producer:
        return []
    waiting: dict[Hashable, dict[int, list[_View]]] = {}
    for view in _views(program.graph, users, producer):
        call = producer[view.sources[0]]
        dtype = program.graph.types[view.sources[0]].dtype
        key = (view.axis, view.span.cuts, dtype, call.attributes.get("reduce", "sum"))
        waiting.setdefault(key, {}).setdefault(view.span.start, []).append(view)
    result = []
    for by_start in waiting.values():
        while (views := _cover(by_start)) is not None:
            calls = {id(producer[name]): producer[name] for view in views for name in view.sources}
            sources = Counter(name for view in views for name in view.sources)
            if Counter(name for call in calls.values() for name in call.outputs) == sources:
                result.append(_Tile(tuple(views), tuple(calls.values())))
    return result


def _views(graph: Graph, users: dict[str, list[Node]], producer: dict[str, Node]) -> list[_View]:
    """Local parts of all-reduced tensors with equal local parts as the only readers."""
    alike: dict[Hashable, list[Node]] = {}
    for node in graph.nodes:
        if node.domain == SPMD and node.op_type == "LocalSlice" and all(name in producer for name in node.inputs):
            key = (node.sharding, tuple(node.inputs), tuple(node.attributes["starts"]))
            alike.setdefault(key, []).append(node)
    result = []
    for nodes in alike.values():
        sharding, ids = nodes[0].sharding, {id(node) for node in nodes}
        parts = [reader for node in nodes for name in node.outputs for reader in users.get(name, ())]
        lone = all(id(reader) in ids for name in nodes[0].inputs for reader in users[name])
        axis = sharding.flat[0] if sharding.flat is not None else ""
        over = {producer[name].attributes["group"] for name in nodes[0].inputs}
        shown = any(name in graph.outputs for name in nodes[0].inputs)
        reduces = {producer[name].attributes.get("reduce", "sum") for name in nodes[0].inputs}
        # A part that another layout operator reads is known there by name: it must stay a value of its own.
        if over == {axis} and lone and not shown and len(reduces) == 1 and all(reader.domain == "" for reader in parts):
            result.append(_View(sharding, tuple(nodes[0].inputs), tuple(nodes)))
    return result


def _cover(by_start: dict[int, list[_View]]) -> list[_View] | None:
    """Remove from the table adjacent views that cover all elements, and return them, or None."""
    views: list[_View] = []
    position = 0
    while by_start.get(position):
        views.append(by_start[position].pop())
        position = views[-1].span.stop
        if position == views[-1].span.cuts[-1]:
            return views
    return None


def _reduce_scatter(rewriter: GraphRewriter, tile: _Tile, shard: str) -> None:
    source = {new: old for call in tile.calls for old, new in zip(call.inputs, call.outputs)}
    inputs: Sequence[str] = [source[name] for view in tile.views for name in view.sources]
    for call in tile.calls:
        _drop(rewriter, call, "all ranks read their own part alone: the call is a reduce-scatter")
    dtype = rewriter.graph.types[inputs[0]].dtype
    reduce = tile.calls[0].attributes.get("reduce", "sum")
    attributes = {"group": tile.views[0].axis, "reduce": reduce, "cuts": list(tile.views[0].span.cuts)}
    after = rewriter.between(tile.calls)[0]
    flat = {shard: TensorType(dtype, (tile.views[0].span.cuts[-1],))}
    rewriter.add("ReduceScatter", inputs, flat, domain=COMM, attributes=attributes, after=after)
    for view in tile.views:
        for node in view.nodes:
            output = node.outputs[0]
            rewriter.discard(output)
            outputs = {output: rewriter.graph.types[output]}
            rewriter.add("ShardSlice", [shard], outputs, domain=SPMD, sharding=view.sharding, before=node)
