"""Checks every node of a split step against the rules, from the placements of its states alone.

The check is independent of ``propagate``: choices are ignored, and each mapping is checked by its effect. The error
names the first node with an operand in a placement against its rule. So these are errors before writing: a missing
reduction, a reduction done twice or over another axis, a norm counting a replicated tensor once per member, a mean of
unequal parts, and a part cut by other sizes than in the join.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from gopt.analysis.training import TrainingGraph
from gopt.errors import InvariantError
from gopt.ir.constant_folding import Constants
from gopt.ir.graph import COMM, SPMD, Graph, Node
from gopt.ir.graph_index import GraphIndex
from gopt.operators.kinds import SIZES, SPREADS
from gopt.records.placements import PARTS, REPLICATED, Part, Partial, Placement, Replicated, Shard, Window
from gopt.spmd.halo import Halo
from gopt.spmd.links import Slot, strategies
from gopt.spmd.rules import Mismatch, Operand, Use, partial
from gopt.tensor_parallel.mappings import HALO, beside, described_as, is_mapping
from gopt.tensor_parallel.pool_gradients import scattered
from gopt.tensor_parallel.results import result_placements
from gopt.tensor_parallel.window_nodes import counted_as, placed, taken


def check(
    training: TrainingGraph, graph: Graph, axis: str, seeds: Mapping[str, Placement], axes: Collection[str] = ()
) -> MutableMapping[str, Placement]:
    """Return the placement of every value not replicated along ``axis``. ``graph``: with logical types; ``seeds``:
    placements of the sharded states and batch inputs; ``axes``: all axes splitting the computation.

    Raises InvariantError for the first node that breaks a rule, and for a result that is not placed like the state it
    replaces.
    """
    checker = Checker(graph, axis, frozenset(axes), dict(seeds))
    for node in graph.nodes:
        try:
            checker.visit(node)
        except Mismatch as wrong:
            raise InvariantError(
                f"{node.op_type} {node.label!r} reads {wrong.operand.name!r}, which is {wrong.operand.placement} along "
                f"{axis}",
                f"it takes {wrong.expected}",
            ) from None
    wanted = result_placements(training, seeds)
    for name, placement in wanted.items():
        actual = checker.of(name)
        if actual != placement:
            raise InvariantError(f"{name!r} is {actual} along {axis}", f"it must be {placement}")
    return checker.known


def check_together(placements: Mapping[str, Mapping[str, Placement]]) -> None:
    """Raise InvariantError for a value whose dimension two axes shard into parts that do not nest.

    ``placements``: by axis, then by value.
    """
    for (axis, one), (outer, two) in combinations(placements.items(), 2):
        for name in one.keys() & two.keys():
            a, b = one[name], two[name]
            if isinstance(a, PARTS) and isinstance(b, PARTS) and not together(a, b):
                raise InvariantError(f"{name!r} is {a} along {axis}, and {b} along {outer}", "such parts do not fit")


def together(one: Part, second: Part) -> bool:
    """Return whether two axes can hold a value in these placements: a dimension with windows is split by no other
    axis."""
    return one.fits(second) if isinstance(one, Shard) and isinstance(second, Shard) else one.dim != second.dim


@dataclass(slots=True)
class Checker:
    """Infers placements along an axis, node by node. ``axes``: all axes splitting the computation; ``known``:
    placements of values not replicated."""

    graph: Graph
    axis: str
    axes: frozenset[str]
    known: MutableMapping[str, Placement]
    constants: Constants = field(init=False)
    index: GraphIndex = field(init=False)
    made: dict[str, Node] = field(default_factory=dict)
    """Value -> the node that makes it."""

    def __post_init__(self) -> None:
        self.constants, self.index = Constants(self.graph), GraphIndex(self.graph)

    def of(self, name: str) -> Placement:
        return self.known.get(name, REPLICATED)

    def visit(self, node: Node) -> None:
        """Set the placements of a node's results; raises Mismatch."""
        results = self._results(node)
        self.made.update(dict.fromkeys(node.outputs, node))
        for name, placement in zip(node.outputs, results):
            if name and not isinstance(placement, Replicated):
                self.known[name] = placement

    def _operands(self, node: Node) -> list[Operand]:
        return [Operand(name, self.of(name), False, self.graph.type_of(name).dtype) for name in node.inputs if name]

    def _results(self, node: Node) -> Sequence[Placement]:
        operands = self._operands(node)
        count = len(node.outputs)
        group = str(node.attributes.get("group", "")) if node.domain in (COMM, SPMD) else ""
        if node.domain == COMM and group == self.axis:
            return [self._call(node, operand) for operand in operands][:count]
        if node.domain == SPMD and group == self.axis and node.op_type == "DimSlice":
            return [self._cut(node, operands[0])]
        if node.domain == SPMD and group == self.axis and node.op_type in HALO:
            return [self._halo(node, operands)]
        if node.domain == SPMD and group == self.axis and node.op_type == "WindowScatter":
            return [self._scattered(node, operands)]
        if is_mapping(node, self.axes):
            for operand in operands[1:]:
                if operand.placement != operands[0].placement:
                    raise Mismatch(operand, f"{operands[0].placement}, as the other")
            return [beside(node, operands[0])]
        if all(isinstance(operand.placement, Replicated) for operand in operands) and not self._captures(node):
            return [REPLICATED] * count
        if node.is_in(SIZES):
            return [REPLICATED] * count
        if any(isinstance(operand.placement, Partial) for operand in operands):
            return [self._terms(node, operands)] * count
        return self._split(node, operands)

    def _captures(self, node: Node) -> bool:
        return any(name in self.known for name in node.captures)

    def _call(self, node: Node, operand: Operand) -> Placement:
        placement, attributes = operand.placement, node.attributes
        if node.op_type == "AllReduce" and attributes.get("reduce") == "mean" and isinstance(placement, Replicated):
            return REPLICATED  # a marked gradient requires it: the mean of equal values
        if node.op_type in ("AllReduce", "ReduceScatter"):
            if placement != Partial(str(attributes.get("reduce", "sum"))):
                raise Mismatch(operand, f"terms of a {attributes.get('reduce', 'sum')}, to complete them")
            if node.op_type == "AllReduce":
                return REPLICATED
            return Shard(int(attributes["axis"]), tuple(attributes["sizes"]))
        if node.op_type == "AllGather":
            shard = Shard(int(attributes["axis"]), tuple(attributes["sizes"]))
            if placement != shard:
                raise Mismatch(operand, f"a value {shard}, as it is joined")
            return REPLICATED
        if node.op_type == "AllToAll":
            shard = Shard(int(attributes["concat_axis"]), tuple(attributes["concat_sizes"]))
            if placement != shard:
                raise Mismatch(operand, f"a value {shard}, as it is joined")
            return Shard(int(attributes["split_axis"]), tuple(attributes["split_sizes"]))
        raise Mismatch(operand, "another call: no mapping is made of it")

    def _cut(self, node: Node, operand: Operand) -> Placement:
        if not isinstance(operand.placement, Replicated):
            raise Mismatch(operand, "a value that is equal on all members, to cut it")
        return Shard(int(node.attributes["axis"]), tuple(node.attributes["sizes"]))

    def _halo(self, node: Node, operands: Sequence[Operand]) -> Placement:
        """Return the placement of strips, of a window or of a halo sum. Operands must be placed as the node says, and
        strips must belong to the same value."""
        for operand, wanted in zip(operands, taken(node), strict=True):
            if operand.placement != wanted:
                raise Mismatch(operand, f"a value {wanted}")
        expected = any(Halo.of(node.attributes).strip_sizes) and node.op_type != "HaloStrips"
        if expected and (len(operands) < 2 or self._strips(operands[1].name) != (node.inputs[0], _record(node))):
            raise Mismatch(operands[-1], f"the joined strips of {node.inputs[0]!r}")
        return placed(node)

    def _scattered(self, node: Node, operands: Sequence[Operand]) -> Placement:
        """Return partial sums for the windows a pool read: updates scattered into zeros at the pool's indices."""
        plain = Node("ScatterElements", node.inputs, node.outputs, attributes={"axis": 2, "reduction": "add"})
        pools = {name: node for name, node in self.made.items() if node.op_type == "MemberMaxPool"}
        expected = scattered(plain, self.graph, self.constants, self.made.get, pools, self.known)
        if not self.index.constants.zero(node.inputs[0]):
            raise Mismatch(operands[0], "zeros")
        output, shape = node.outputs[0], self.graph.types[node.outputs[0]].dims
        equal = expected is not None and expected.node(plain, self.axis, output).attributes == node.attributes
        if expected is None or not equal or expected.shape != shape:
            raise Mismatch(operands[1], "places that a pool took of the windows that it names")
        return expected.terms

    def _strips(self, name: str) -> tuple[str, Hashable] | None:
        """Return the source value of concatenated strips, and the halo record; None for other values."""
        call = self.made.get(name)
        strips = self.made.get(call.inputs[0]) if call is not None and call.op_type == "AllGather" else None
        return (strips.inputs[0], _record(strips)) if strips is not None and strips.op_type == "HaloStrips" else None

    def _terms(self, node: Node, operands: Sequence[Operand]) -> Placement:
        data = operands[:1] if node.is_in(SPREADS) else operands
        dtype = self.graph.type_of(node.outputs[0]).dtype
        return partial(Use(node.op_type, tuple(data), dtype=dtype, standard=node.domain in ("", "ai.onnx")))

    def _split(self, node: Node, operands: Sequence[Operand]) -> Sequence[Placement]:
        """Return the results' placements under the strategy matching the operands' placements."""
        placements = tuple(self.of(name) if name else REPLICATED for name in node.inputs)
        sharded = next((operand for operand in operands if isinstance(operand.placement, PARTS)), None)
        if sharded is None or self._captures(node):
            raise Mismatch(operands[0], "values that are equal on all members")
        described = described_as(node, self.graph, self.constants)
        masked = node.domain == SPMD and node.attributes.get("group") == self.axis
        if described is None:
            raise Mismatch(sharded, "values that are equal on all members")
        options = [
            strategy for index, placement in enumerate(placements) if isinstance(placement, (Shard, Window))
            for strategy in strategies(described, Slot(index), placement) if strategy.masked == masked
        ]  # fmt: skip
        for option in options:
            if option.operands == placements:
                if masked and node.op_type == "MemberMaxPool" and not counted_as(node, option.operands[0]):
                    raise Mismatch(sharded, "the window whose places it counts")
                return option.results
        expected = " or ".join(str(option.operands[node.inputs.index(sharded.name)]) for option in options[:2])
        wrong = sharded
        if options:
            for operand, wanted in zip(operands, options[0].operands):
                if operand.placement != wanted:
                    wrong, expected = operand, str(wanted)
                    break
        raise Mismatch(wrong, expected or "a whole value: no rule splits it so")


def _record(node: Node) -> Hashable:
    """Return the identity of a halo: dimension, direction, sizes, windows."""
    at = node.attributes
    return int(at["axis"]), str(at["kind"]), tuple(at["sizes"]), tuple(at["ranges"])
