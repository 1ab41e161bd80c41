"""Propagates placements along an axis from the states through forward, backward and update, and adds mappings where
they do not agree.

A sweep in node order. Each node takes the cheapest of its strategies: the cost of bringing its operands there and of
completing partial sums (``cost``). Gradients need no rule of their own: the backward consists of operators like any
others, so each mapping's dual comes out of the sweep. Partial sums are completed where they are made, unless their only
reader passes them on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from gopt.analysis.training import TrainingGraph
from gopt.errors import UnsupportedError
from gopt.ir.constant_folding import Constants
from gopt.ir.graph import SPMD, Graph, Node, clone
from gopt.ir.operator_use import use_of
from gopt.ir.phase import advance_phases
from gopt.operators.kinds import MOVES, POOLS, RESHAPES, SIZES, SUMS
from gopt.records.placements import REPLICATED, Partial, Placement, Replicated, Shard, WindowTerms
from gopt.spmd.conversions import Conversion
from gopt.spmd.links import Strategy
from gopt.spmd.rules import Mismatch, Operand, Use, partial
from gopt.tensor_parallel.builder import PASS, ExpansionBuilder
from gopt.tensor_parallel.converted_values import ConvertedValues
from gopt.tensor_parallel.cost import Cost
from gopt.tensor_parallel.expansions import expansion
from gopt.tensor_parallel.explain import PlacementOrigin
from gopt.tensor_parallel.mappings import MASKED, is_mapping
from gopt.tensor_parallel.other_axes import OtherAxes
from gopt.tensor_parallel.propagated import Propagated
from gopt.tensor_parallel.results import result_placements
from gopt.tensor_parallel.strategy import StrategyChooser
from gopt.tensor_parallel.tokens import Tokens
from gopt.tensor_parallel.window_nodes import Windows

_PASSED = MOVES | SUMS | {"Neg"}
"""Operators that pass partial sums on to their only reader."""


def propagate(
    training: TrainingGraph, graph: Graph, axis: str, members: int, seeds: Mapping[str, Placement],
    tokens: Tokens | None = None, axes: OtherAxes | None = None, cut: Mapping[str, Shard] | None = None,
    cost: Cost | None = None, *, regather: bool = False,
) -> Propagated:  # fmt: skip
    """Split a step along an axis, from the placements of the states and batch inputs. ``graph``: with logical types,
    changed in place; ``others``: the axes along which it is split already.

    With ``tokens``, terms may be scattered over them in place of being summed on all members (sequence parallelism).
    ``cut``: batch inputs held whole by members, and read in part. ``cost``: what mappings cost; by default, bytes.
    ``regather``: each phase gathers what it reads, so that a gathered value does not live from forward to backward.
    Raises UnsupportedError where a new state cannot be brought to the placement of the old one.
    """
    weighed = cost or Cost(members)
    sweep = _Sweep(training, graph, axis, members, dict(seeds), tokens, axes or OtherAxes(graph), weighed, regather)
    return sweep.run(cut or {})


@dataclass(slots=True)
class _Sweep:
    training: TrainingGraph
    graph: Graph
    axis: str
    members: int
    placements: dict[str, Placement]
    tokens: Tokens | None
    others: OtherAxes
    cost: Cost
    regather: bool
    wanted: Mapping[str, Placement] = field(init=False)
    choose: StrategyChooser = field(init=False)
    values: ConvertedValues = field(init=False)
    build: ExpansionBuilder = field(init=False)
    constants: Constants = field(init=False)
    out: Propagated = field(init=False)
    readers: Counter[str] = field(default_factory=Counter)
    windows: Windows = field(init=False)
    weights: set[str] = field(default_factory=set)
    """States, and values computed from them alone."""

    def __post_init__(self) -> None:
        self.build = ExpansionBuilder(self.graph, self.axis, self.placements)
        self.constants = Constants(self.graph)
        self.windows = Windows(self.graph, self.constants)
        self.out = Propagated(self.graph, self.placements)
        for node in self.graph.nodes:
            self.readers.update(set(node.reads))
        self.weights.update(state.tensor for state in self.training.states)
        for placement in self.placements.values():
            self.windows.note(placement)
        self.wanted = result_placements(self.training, self.placements)
        self.choose = StrategyChooser(
            self.graph, self.constants, self.cost, self.tokens, self.others, self.windows, self.weights, self.wanted
        )
        self.values = ConvertedValues(
            self.build, self.out, self.choose, self.constants, self.windows, self.weights,
            frozenset(self.training.gradients.values()), regather=self.regather,
        )  # fmt: skip

    def run(self, cut: Mapping[str, Shard]) -> Propagated:
        parts = {name: self.values.converted(name, shard) for name, shard in cut.items()}
        self.others.follow(self.build.nodes)
        for node in list(self.graph.nodes):
            self.build.phase = node.phase
            start = len(self.build.nodes)
            copy = clone(node)
            copy.source = node.source or (None if node.made_by == PASS else node)
            copy.inputs = [parts.get(name, name) for name in copy.inputs]
            self._visit(copy)
            for name in node.outputs:
                if name in self.wanted:
                    self._settle(name, self.wanted[name], self.build.nodes[start:])
            self.others.follow(self.build.nodes[start:])
        advance_phases(self.build.nodes)
        self.graph.nodes = self.build.nodes
        return self.out

    # --- one node ---------------------------------------------------------------------------------------------------

    def _settle(self, name: str, placement: Placement, nodes: Sequence[Node]) -> None:
        """Bring a result of the last nodes to its required placement, under its own name."""
        before = self.placements.get(name, REPLICATED)
        if before == placement:
            return
        if Conversion(before, placement).mapping is None:
            raise UnsupportedError(
                f"{name!r} is {before} along {self.axis}, and must be {placement}",
                "keep the value whole: give its parameters the placement replicate",
            )
        local = self.values.named(name, "own")
        self.graph.types[local] = self.graph.types[name]
        for node in nodes:
            node.outputs = [local if output == name else output for output in node.outputs]
        self.placements[local] = before
        self.values.count(before, placement)
        self.build.convert(local, before, placement, name)
        self.placements.pop(name, None)
        self.values.note(name, placement)

    def _visit(self, node: Node) -> None:
        """Place one node, or the nodes of the rewrite."""
        before = [self.placements.get(name, REPLICATED) if name else REPLICATED for name in node.inputs]
        captured = next((name for name in node.captures if name in self.placements), None)
        if captured is not None:
            raise UnsupportedError(
                f"the body of {node.op_type} {node.label!r} reads {captured!r}, which is sharded along {self.axis}",
                "keep it whole: give its parameters the placement replicate",
            )
        equal = all(isinstance(part, Replicated) for part in before)
        if (equal and not self.choose.aimed(node)) or node.is_in(SIZES):
            self._append(node, [REPLICATED] * len(node.outputs))
            return
        if self._expand(node, before):
            return
        if self._scattered(node):
            return
        if self._passes_terms(node, before):
            self._append(node, [next(part for part in before if isinstance(part, Partial))] * len(node.outputs))
            return
        best = self.choose.cheapest(node, before)
        sharded = any(isinstance(part, Shard) for part in before)
        if sharded and all(isinstance(operand, Replicated) for operand in best.operands):
            self.out.whole[node.label] = sum(self.choose.nbytes(name) for name in node.outputs if name)
        node.inputs = [
            self.values.converted(name, operand) if name else "" for name, operand in zip(node.inputs, best.operands)
        ]
        if best.masked:
            self._mask(node, best)
        self._append(node, best.results)
        for name, part in zip(node.outputs, best.results):
            if isinstance(part, WindowTerms):
                self._settle(name, self.windows.part(part), [node])

    def _scattered(self, node: Node) -> bool:
        """Place a scatter of pool gradients, if the node is one: members scatter into their windows and sum those."""
        expected = self.windows.scattered(node, self.placements)
        if expected is None:
            return False
        flat, positions = node.outputs[0], self.values.named(node.outputs[0], "places")
        self.graph.types[positions] = replace(self.graph.types[flat], shape=expected.shape)
        scatter = expected.node(node, self.axis, positions)
        self._append(scatter, [expected.terms])
        self._settle(positions, self.windows.part(expected.terms), [scatter])
        back = Node("Reshape", [positions, self.build.ints(self.graph.types[flat].dims)], [flat], made_by=PASS)
        back.phase = node.phase
        self._visit(back)
        return True

    def _expand(self, node: Node, before: Sequence[Placement]) -> bool:
        """Place the nodes of a node's rewrite; return False without a rewrite, or where other axes cannot split it."""
        described = use_of(node, self.graph, self.constants)
        expand = expansion(node, described, before)
        if expand is None:
            return False
        inner = ExpansionBuilder(self.graph, self.axis, {}, phase=node.phase)
        inner._shapes = self.build._shapes
        expand(inner, node, described)
        if not self.others.allow(inner.nodes):
            return False
        for added in inner.nodes:
            self.readers.update(set(added.reads))
        for added in inner.nodes:
            start = len(self.build.nodes)
            self._visit(added)
            self.others.follow(self.build.nodes[start:])  # the next one is placed beside these axes
        return True

    def _passes_terms(self, node: Node, before: Sequence[Placement]) -> bool:
        """Return whether a node passes partial sums on: all its operands are partial sums no other node reads."""
        if is_mapping(node, self.others.axes):
            sole = isinstance(before[0], Partial) and self.readers[node.inputs[0]] == 1
            return sole and self.others.adds(node, before[0])
        if not node.is_in(_PASSED):
            return False
        data = list(zip(node.inputs, before))[: 1 if node.is_in(RESHAPES) else None]
        if not all(isinstance(placement, Partial) and self.readers[name] == 1 for name, placement in data):
            return False
        operands = tuple(Operand(name, placement, False, self.graph.types[name].dtype) for name, placement in data)
        try:
            return partial(Use(node.op_type, operands, dtype=self.graph.type_of(node.outputs[0]).dtype)) == before[0]
        except Mismatch:
            return False

    def _mask(self, node: Node, strategy: Strategy) -> None:
        """Let a member index into its own part."""
        if node.is_in(POOLS):
            self.windows.pool(node, strategy, self.axis)
            return
        shard = next(operand for operand in strategy.operands if isinstance(operand, Shard))
        attributes = {key: value for key, value in node.attributes.items() if key in ("axis", "reduction")}
        masked = Node(
            MASKED[node.op_type], node.inputs, node.outputs, domain=SPMD, made_by=node.made_by,
            attributes={"axis": 0} | attributes | {"group": self.axis, "sizes": list(shard.sizes)},
        )  # fmt: skip
        masked.phase, masked.source = node.phase, node.source
        node.op_type, node.domain, node.encoded, node._attributes = masked.op_type, SPMD, None, masked.attributes

    def _append(self, node: Node, results: Sequence[Placement]) -> None:
        self.build.nodes.append(node)
        if node.is_in(MOVES):
            self.values.moves[node.outputs[0]] = node
        if node.inputs and all(name in self.weights or self._constant(name) for name in node.reads):
            self.weights.update(node.outputs)
        source = next((name for name in node.inputs if name in self.placements), "")
        for name, placement in zip(node.outputs, results):
            self.values.note(name, placement)
            if source and name:
                self.out.origins[name] = PlacementOrigin(f"{node.op_type} {node.label}", source)

    def _constant(self, name: str) -> bool:
        return name in self.graph.initializers
