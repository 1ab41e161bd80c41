"""Every node of a split step held against the rules, from the placements of its states alone.

Independent of ``propagate``: it knows neither what that chose nor why, and takes mappings at their word. The first node
that takes an operand as it may not is named. So a missing reduction, one done twice or over another axis, a norm that
counts a replicated tensor once for each member, a mean of unequal parts, and a part that is cut by other sizes than it
is joined by are errors before anything is written.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from gopt.analysis.training import TrainingGraph
from gopt.errors import InvariantError
from gopt.ir.graph import COMM, SPMD, Graph, Node
from gopt.sharding.links import Slot, strategies
from gopt.sharding.placements import REPLICATED, Partial, Placement, Replicated, Shard
from gopt.sharding.rules import Mismatch, Operand, Use, partial
from gopt.tensor_parallel.mappings import beside, described_as, is_mapping
from gopt.tensor_parallel.operators import Constants
from gopt.tensor_parallel.results import result_placements


def check(
    training: TrainingGraph, graph: Graph, axis: str, seeds: Mapping[str, Placement], axes: Collection[str] = ()
) -> MutableMapping[str, Placement]:
    """The placement of every value that is not replicated along ``axis``; raises InvariantError for the first node that
    breaks a rule, and for a result that is placed otherwise than the state it replaces.

    ``graph``: with logical types; ``seeds``: placements of the states and batch inputs that are sharded; ``axes``: all
    that split the computation.
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
        found = checker.of(name)
        if found != placement:
            raise InvariantError(f"{name!r} is {found} along {axis}", f"it must be {placement}")
    return checker.known


def check_together(placements: Mapping[str, Mapping[str, Placement]]) -> None:
    """Raise InvariantError for a value of which two axes shard one dimension so that parts do not fit each other.

    ``placements``: by axis, then by value.
    """
    for (axis, one), (other, two) in combinations(placements.items(), 2):
        for name in one.keys() & two.keys():
            a, b = one[name], two[name]
            if isinstance(a, Shard) and isinstance(b, Shard) and not a.fits(b):
                raise InvariantError(f"{name!r} is {a} along {axis}, and {b} along {other}", "such parts do not fit")


@dataclass(slots=True)
class Checker:
    """The placements along one axis of what the nodes of a graph make, node by node. ``axes``: all that split the
    computation; ``known``: placements of values that are not replicated."""

    graph: Graph
    axis: str
    axes: frozenset[str]
    known: MutableMapping[str, Placement]
    constants: Constants = field(init=False)

    def __post_init__(self) -> None:
        self.constants = Constants(self.graph)

    def of(self, name: str) -> Placement:
        return self.known.get(name, REPLICATED)

    def visit(self, node: Node) -> None:
        """Give a node's results their placements; raises Mismatch."""
        for name, placement in zip(node.outputs, self._results(node)):
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
        if is_mapping(node, self.axes):
            return [beside(node, operands[0])]
        if all(isinstance(each.placement, Replicated) for each in operands) and not self._captures(node):
            return [REPLICATED] * count
        if node.is_a("Shape", "Size"):
            return [REPLICATED] * count
        if any(isinstance(each.placement, Partial) for each in operands):
            return [self._terms(node, operands)] * count
        return self._split(node, operands)

    def _captures(self, node: Node) -> bool:
        return any(name in self.known for name in node.captures)

    def _call(self, node: Node, operand: Operand) -> Placement:
        placement, attributes = operand.placement, node.attributes
        if node.op_type in ("AllReduce", "ReduceScatter"):
            if placement != Partial(str(attributes.get("reduce", "sum"))):
                raise Mismatch(operand, f"terms of a {attributes.get('reduce', 'sum')}, to complete them")
            if node.op_type == "AllReduce":
                return REPLICATED
            return Shard(int(attributes["axis"]), tuple(attributes["sizes"]))
        if node.op_type == "AllGather":
            here = Shard(int(attributes["axis"]), tuple(attributes["sizes"]))
            if placement != here:
                raise Mismatch(operand, f"a value {here}, as it is joined")
            return REPLICATED
        if node.op_type == "AllToAll":
            here = Shard(int(attributes["concat_axis"]), tuple(attributes["concat_sizes"]))
            if placement != here:
                raise Mismatch(operand, f"a value {here}, as it is joined")
            return Shard(int(attributes["split_axis"]), tuple(attributes["split_sizes"]))
        raise Mismatch(operand, "another call: no mapping is made of it")

    def _cut(self, node: Node, operand: Operand) -> Placement:
        if not isinstance(operand.placement, Replicated):
            raise Mismatch(operand, "a value that is equal on all members, to cut it")
        return Shard(int(node.attributes["axis"]), tuple(node.attributes["sizes"]))

    def _terms(self, node: Node, operands: Sequence[Operand]) -> Placement:
        data = operands[:1] if node.is_a("Reshape", "Squeeze", "Unsqueeze", "Expand") else operands
        dtype = self.graph.type_of(node.outputs[0]).dtype
        return partial(Use(node.op_type, tuple(data), dtype=dtype, standard=node.domain in ("", "ai.onnx")))

    def _split(self, node: Node, operands: Sequence[Operand]) -> Sequence[Placement]:
        """The strategy that operands are placed by."""
        placements = tuple(self.of(name) if name else REPLICATED for name in node.inputs)
        first = next((each for each in operands if isinstance(each.placement, Shard)), None)
        if first is None or self._captures(node):
            raise Mismatch(operands[0], "values that are equal on all members")
        described = described_as(node, self.graph, self.constants)
        masked = node.domain == SPMD and node.attributes.get("group") == self.axis
        if described is None:
            raise Mismatch(first, "values that are equal on all members")
        options = [
            each for place, placement in enumerate(placements) if isinstance(placement, Shard)
            for each in strategies(described, Slot(place), placement) if each.masked == masked
        ]  # fmt: skip
        for option in options:
            if option.operands == placements:
                return option.results
        expected = " or ".join(str(option.operands[node.inputs.index(first.name)]) for option in options[:2])
        wrong = first
        if options:
            for operand, wanted in zip(operands, options[0].operands):
                if operand.placement != wanted:
                    wrong, expected = operand, str(wanted)
                    break
        raise Mismatch(wrong, expected or "a whole value: no rule splits it so")
