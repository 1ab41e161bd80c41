"""Explains why neighbouring calls were not fused: one line for every pair of consecutive calls of the final order."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from gopt.ir.graph import COMM, Graph, Node
from gopt.passes.fuse_collectives.pack import BoundCalls, Key, PackedBucket
from gopt.records.pass_facts import NeighbourCalls

Place = tuple[int, PackedBucket]
"""A bucket and its number among the buckets of its key."""


def neighbours(graph: Graph, placed: Mapping[int, Place], bound: BoundCalls) -> tuple[NeighbourCalls, ...]:
    """Every pair of consecutive calls, and why they stay two; ``placed``: call -> bucket."""
    calls = [node for node in graph.nodes if node.domain == COMM]
    return tuple(
        NeighbourCalls(earlier.label, later.label, _why(graph, earlier, later, placed, bound))
        for earlier, later in pairwise(calls)
    )


def _why(graph: Graph, earlier: Node, later: Node, placed: Mapping[int, Place], bound: BoundCalls) -> str:
    for node in (earlier, later):
        if bound.why(node) == "pairwise call":
            return "pairwise call"
    a, b = Key.of(graph, earlier), Key.of(graph, later)
    for name in ("kind", "group", "root", "dtype", "reduce", "sharding"):
        ours, theirs = getattr(a, name), getattr(b, name)
        if ours != theirs:
            return f"different {name}: {ours}, {theirs}"
    for node in (earlier, later):
        if id(node) not in placed:
            return bound.why(node)
    placements = [placed[id(earlier)], placed[id(later)]]
    single = [bucket.why for _, bucket in placements if bucket.alone]
    return single[0] if single else min(placements, key=lambda item: item[0])[1].why
