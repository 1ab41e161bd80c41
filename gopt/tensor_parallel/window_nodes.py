"""Windows in a step: operators of ``gopt.spmd`` that make or read them, and what they take and give."""

from __future__ import annotations

from collections.abc import Sequence

from gopt.ir.graph import SPMD, Node
from gopt.sharding.halo import Halo, window
from gopt.sharding.links import Strategy
from gopt.sharding.placements import REPLICATED, Placement, Shard, Window, WindowTerms


def pool_member(node: Node, strategy: Strategy, axis: str, dims: Sequence[int]) -> None:
    """Let a MaxPool count the places of what it takes through the whole operand, of which a member has a window."""
    read = strategy.operands[0]
    assert isinstance(read, (Shard, Window))
    own = {"group": axis, "axis": read.dim, "ranges": _ends(read), "length": dims[read.dim]}
    attributes = {**node.attributes, **own}
    node.op_type, node.domain, node.encoded, node._attributes = "MemberMaxPool", SPMD, None, attributes


def counted_as(node: Node, read: Placement) -> bool:
    """Whether such a pool counts through the window that it reads."""
    given = node.attributes
    if not isinstance(read, (Shard, Window)) or given["axis"] != read.dim or list(given["ranges"]) != _ends(read):
        return False
    return bool(given["length"] == read.length)


def _ends(read: Shard | Window) -> list[int]:
    parts = read.ranges if isinstance(read, Window) else tuple(map(read.part, range(len(read.sizes))))
    return [end for each in parts for end in each]


def taken(node: Node) -> tuple[Placement, ...]:
    """How the operands of a node of ``gopt.spmd`` that makes windows, or parts of them, must be placed."""
    halo, dim = Halo.of(node.attributes), int(node.attributes["axis"])
    before: dict[str, Placement] = {
        "exchange": Shard(dim, halo.sizes), "cut": REPLICATED, "sum": WindowTerms(dim, halo.ranges, halo.length),
    }  # fmt: skip
    first = before[halo.kind]
    return (first, REPLICATED)[: len(node.inputs)]


def placed(node: Node) -> Placement:
    """How the result of such a node is placed."""
    halo, dim = Halo.of(node.attributes), int(node.attributes["axis"])
    if node.op_type == "HaloStrips":
        return Shard(dim, halo.strip_sizes)
    if node.op_type == "HaloSum":
        return Shard(dim, halo.sizes)
    return window(dim, halo.ranges, halo.length, str(node.attributes.get("border", "zeros")))
