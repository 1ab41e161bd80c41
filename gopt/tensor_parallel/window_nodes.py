"""Windows in a step: operators of ``gopt.spmd`` making or reading windows, and placements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gopt.ir.constant_folding import Constants
from gopt.ir.graph import SPMD, Graph, Node
from gopt.ir.graph_index import GraphIndex
from gopt.operators.kinds import SCATTERS
from gopt.records.placements import REPLICATED, Placement, Shard, Window, WindowTerms
from gopt.spmd.halo import Halo, shared_like, window
from gopt.spmd.links import Strategy
from gopt.tensor_parallel.pool_gradients import Scattered, scattered


@dataclass(slots=True)
class Windows:
    """Windows met by propagation so far."""

    graph: Graph
    constants: Constants
    index: GraphIndex = field(init=False)
    pools: dict[str, Node] = field(default_factory=dict)
    """Indices of a split pool -> the pool; each member indexes its own window."""
    shared: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    """(dimension, length) -> how the first such value was sharded; later values follow where they can."""

    def __post_init__(self) -> None:
        self.index = GraphIndex(self.graph)

    def note(self, placement: Placement) -> None:
        """Note a value's placement."""
        if isinstance(placement, Shard) and placement.runs == 1:
            self.shared.setdefault((placement.dim, placement.length), placement.sizes)

    def part(self, terms: WindowTerms) -> Shard:
        """Return the parts for reduced partial sums."""
        sizes = self.shared.get((terms.dim, terms.length))
        return Shard(terms.dim, sizes or shared_like(terms.sizes, terms.length))

    def pool(self, node: Node, strategy: Strategy, axis: str) -> None:
        """Let a MaxPool index the whole operand."""
        pool_member(node, strategy, axis, self.graph.types[node.inputs[0]].dims)
        self.pools[node.outputs[1]] = node

    def scattered(self, node: Node, placements: Mapping[str, Placement]) -> Scattered | None:
        """Return how members scatter into zeros of windows; None if impossible."""
        if not self.pools or not node.is_in(SCATTERS) or not self.index.constants.zero(node.inputs[0]):
            return None
        return scattered(node, self.graph, self.constants, self.index.producers.get, self.pools, placements)


def pool_member(node: Node, strategy: Strategy, axis: str, dims: Sequence[int]) -> None:
    """Let a MaxPool index the whole operand from a member's window."""
    read = strategy.operands[0]
    assert isinstance(read, (Shard, Window))
    reading = {"group": axis, "axis": read.dim, "ranges": _ends(read), "length": dims[read.dim]}
    attributes = {**node.attributes, **reading}
    node.op_type, node.domain, node.encoded, node._attributes = "MemberMaxPool", SPMD, None, attributes


def counted_as(node: Node, read: Placement) -> bool:
    """Return whether such a pool indexes through its window."""
    attrs = node.attributes
    if not isinstance(read, (Shard, Window)) or attrs["axis"] != read.dim or list(attrs["ranges"]) != _ends(read):
        return False
    return bool(attrs["length"] == read.length)


def _ends(read: Shard | Window) -> list[int]:
    parts = read.ranges if isinstance(read, Window) else tuple(map(read.part, range(len(read.sizes))))
    return [end for part in parts for end in part]


def taken(node: Node) -> tuple[Placement, ...]:
    """Return the placements the operands of a window node of ``gopt.spmd`` must have."""
    halo, dim = Halo.of(node.attributes), int(node.attributes["axis"])
    before: dict[str, Placement] = {
        "exchange": Shard(dim, halo.sizes), "cut": REPLICATED, "sum": WindowTerms(dim, halo.ranges, halo.length),
    }  # fmt: skip
    operand = before[halo.kind]
    return (operand, REPLICATED)[: len(node.inputs)]


def placed(node: Node) -> Placement:
    """Return the placement of such a node's result."""
    halo, dim = Halo.of(node.attributes), int(node.attributes["axis"])
    if node.op_type == "HaloStrips":
        return Shard(dim, halo.strip_sizes)
    if node.op_type == "HaloSum":
        return Shard(dim, halo.sizes)
    return window(dim, halo.ranges, halo.length, str(node.attributes.get("border", "zeros")))
