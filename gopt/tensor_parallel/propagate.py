"""Propagates placements along one axis from the states through forward, backward and update, and adds mappings where
they do not agree.

One sweep in node order. Each node takes the cheapest of its strategies: the cost of bringing its operands there and of
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
from gopt.ir.graph import SPMD, Graph, Node, clone
from gopt.ir.phase import Phase
from gopt.sharding.conversions import Conversion
from gopt.sharding.links import Slot, Strategy, strategies
from gopt.sharding.placements import REPLICATED, Partial, Placement, Replicated, Shard, Window, WindowTerms
from gopt.sharding.rules import Mismatch, Operand, Use, partial
from gopt.tensor_parallel.builder import PASS, Builder
from gopt.tensor_parallel.cost import Cost
from gopt.tensor_parallel.expansions import expansion
from gopt.tensor_parallel.explain import Origin
from gopt.tensor_parallel.mappings import MASKED, is_mapping
from gopt.tensor_parallel.operators import Constants, operator
from gopt.tensor_parallel.other_axes import OtherAxes
from gopt.tensor_parallel.results import result_placements
from gopt.tensor_parallel.strategy import StrategyChooser
from gopt.tensor_parallel.tokens import Tokens
from gopt.tensor_parallel.window_nodes import Windows

_PASSED = frozenset({"Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose", "Add", "Sub", "Sum", "Neg"})
"""Operators that pass partial sums on to their only reader."""
_MOVES = ("Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose")


@dataclass(slots=True)
class Propagated:
    """A graph with a placement for every value along one axis. Types are logical; mappings are nodes."""

    graph: Graph
    placements: dict[str, Placement]
    conversions: Counter[str] = field(default_factory=Counter)
    origins: dict[str, Origin] = field(default_factory=dict)
    """Sharded or partial value -> the node that placed it."""
    converted: dict[str, list[str]] = field(default_factory=dict)
    whole: dict[str, int] = field(default_factory=dict)
    """Label of a node that all members compute whole although an operand was sharded -> bytes of its results."""


def propagate(
    training: TrainingGraph, graph: Graph, axis: str, members: int, seeds: Mapping[str, Placement],
    tokens: Tokens | None = None, others: OtherAxes | None = None, cut: Mapping[str, Shard] | None = None,
    cost: Cost | None = None, *, regather: bool = False,
) -> Propagated:  # fmt: skip
    """Split a step along an axis, from the placements of its states and batch inputs. ``graph``: with logical types,
    changed in place; ``others``: the axes along which it is split already.

    With ``tokens``, terms may be scattered over them in place of being summed on all members (sequence parallelism).
    ``cut``: batch inputs that members have whole and read a part of. ``cost``: what mappings cost; by default, bytes.
    ``regather``: each phase gathers what it reads, so that a gathered value does not live from forward to backward.
    Raises UnsupportedError where a new state cannot be brought to the placement of the old one.
    """
    weighed = cost or Cost(members)
    sweep = _Sweep(training, graph, axis, members, dict(seeds), tokens, others or OtherAxes(graph), weighed, regather)
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
    build: Builder = field(init=False)
    constants: Constants = field(init=False)
    out: Propagated = field(init=False)
    converted: dict[tuple[str, Placement, Phase | None], str] = field(default_factory=dict)
    """(value, placement, phase) -> the name of the converted value. The phase is None unless each phase gathers anew,
    or the update reads a gradient: it gets the reduced one, and the backward keeps the rank's own."""
    moves: dict[str, Node] = field(default_factory=dict)
    """Result of a node that only moves elements -> the node."""
    readers: Counter[str] = field(default_factory=Counter)
    windows: Windows = field(init=False)
    gradients: frozenset[str] = field(init=False)
    weights: set[str] = field(default_factory=set)
    """States, and values computed from them alone."""

    def __post_init__(self) -> None:
        self.build = Builder(self.graph, self.axis, self.placements)
        self.constants = Constants(self.graph)
        self.windows = Windows(self.graph, self.constants)
        self.out = Propagated(self.graph, self.placements)
        for node in self.graph.nodes:
            self.readers.update(set(node.reads))
        self.gradients = frozenset(self.training.gradients.values())
        self.weights.update(state.tensor for state in self.training.states)
        for placement in self.placements.values():
            self.windows.note(placement)
        self.wanted = result_placements(self.training, self.placements)
        self.choose = StrategyChooser(
            self.graph, self.constants, self.cost, self.tokens, self.others, self.windows, self.weights, self.wanted
        )

    def run(self, cut: Mapping[str, Shard]) -> Propagated:
        parts = {name: self._as(name, shard) for name, shard in cut.items()}
        self.others.follow(self.build.nodes)
        for node in list(self.graph.nodes):
            self.build.phase = node.phase
            first = len(self.build.nodes)
            made = clone(node)
            made.source = node.source or (None if node.made_by == PASS else node)
            made.inputs = [parts.get(name, name) for name in made.inputs]
            self._visit(made)
            for name in node.outputs:
                if name in self.wanted:
                    self._settle(name, self.wanted[name], self.build.nodes[first:])
            self.others.follow(self.build.nodes[first:])
        self.graph.nodes = self.build.nodes
        _set_earliest(self.build.nodes)
        return self.out

    # --- one node ---------------------------------------------------------------------------------------------------

    def _settle(self, name: str, placement: Placement, nodes: Sequence[Node]) -> None:
        """Bring a result of the last nodes to its required placement, under its own name."""
        before = self.placements.get(name, REPLICATED)
        if before == placement:
            return
        if Conversion(before, placement).mapping is None:
            raise UnsupportedError(f"{name!r} is {before} along {self.axis}, and must be {placement}")
        own = self._named(name, "own")
        self.graph.types[own] = self.graph.types[name]
        for node in nodes:
            node.outputs = [own if each == name else each for each in node.outputs]
        self.placements[own] = before
        self._count(before, placement)
        self.build.convert(own, before, placement, name)
        self.placements.pop(name, None)
        self._note(name, placement)

    def _visit(self, node: Node) -> None:
        """Place one node, or the nodes of its rewrite."""
        known = [self.placements.get(name, REPLICATED) if name else REPLICATED for name in node.inputs]
        captured = next((name for name in node.captures if name in self.placements), None)
        if captured is not None:
            raise UnsupportedError(
                f"the body of {node.op_type} {node.label!r} reads {captured!r}, which is sharded along {self.axis}",
                "keep it whole: give its parameters the placement replicate",
            )
        equal = all(isinstance(each, Replicated) for each in known)
        if (equal and not self.choose.aimed(node)) or node.is_a("Shape", "Size"):
            self._append(node, [REPLICATED] * len(node.outputs))
            return
        if self._expand(node, known):
            return
        if self._scattered(node):
            return
        if self._passes_terms(node, known):
            self._append(node, [next(each for each in known if isinstance(each, Partial))] * len(node.outputs))
            return
        best = self.choose.cheapest(node, known)
        sharded = any(isinstance(each, Shard) for each in known)
        if sharded and all(isinstance(each, Replicated) for each in best.operands):
            self.out.whole[node.label] = sum(self.choose.nbytes(name) for name in node.outputs if name)
        node.inputs = [self._as(name, place) if name else "" for name, place in zip(node.inputs, best.operands)]
        if best.masked:
            self._mask(node, best)
        self._append(node, best.results)
        for name, placement in zip(node.outputs, best.results):
            if isinstance(placement, WindowTerms):
                self._settle(name, self.windows.part(placement), [node])

    def _scattered(self, node: Node) -> bool:
        """Place a scatter of pool gradients, if the node is one: members scatter into their windows and sum those."""
        found = self.windows.scattered(node, self.placements)
        if found is None:
            return False
        flat, places = node.outputs[0], self._named(node.outputs[0], "places")
        self.graph.types[places] = replace(self.graph.types[flat], shape=found.shape)
        made = found.node(node, self.axis, places)
        self._append(made, [found.terms])
        self._settle(places, self.windows.part(found.terms), [made])
        back = Node("Reshape", [places, self.build.ints(self.graph.types[flat].dims)], [flat], made_by=PASS)
        back.phase = node.phase
        self._visit(back)
        return True

    def _expand(self, node: Node, known: Sequence[Placement]) -> bool:
        """Place the nodes of a node's rewrite; return False where there is none or other axes cannot split it."""
        described = operator(node, self.graph, self.constants)
        expand = expansion(node, described, known)
        if expand is None:
            return False
        inner = Builder(self.graph, self.axis, {}, phase=node.phase)
        inner._shapes = self.build._shapes
        expand(inner, node, described)
        if not self.others.allow(inner.nodes):
            return False
        for each in inner.nodes:
            self.readers.update(set(each.reads))
        for each in inner.nodes:
            self._visit(each)
        return True

    def _passes_terms(self, node: Node, known: Sequence[Placement]) -> bool:
        """Return whether a node passes partial sums on: all its operands are partial sums that no other node reads."""
        if is_mapping(node, self.others.axes):
            sole = isinstance(known[0], Partial) and self.readers[node.inputs[0]] == 1
            return sole and self.others.adds(node, known[0])
        if not node.is_a(*_PASSED):
            return False
        data = list(zip(node.inputs, known))[: 1 if node.op_type in ("Reshape", "Squeeze", "Unsqueeze") else None]
        if not all(isinstance(each, Partial) and self.readers[name] == 1 for name, each in data):
            return False
        operands = tuple(Operand(name, each, False, self.graph.types[name].dtype) for name, each in data)
        try:
            return partial(Use(node.op_type, operands, dtype=self.graph.type_of(node.outputs[0]).dtype)) == known[0]
        except Mismatch:
            return False

    # --- values -----------------------------------------------------------------------------------------------------

    def _as(self, name: str, placement: Placement) -> str:
        """Return a value in another placement; it is converted once for all readers."""
        before = self.placements.get(name, REPLICATED)
        if before == placement:
            return name
        key = self._key(name, placement)
        if key not in self.converted:
            move = None if self._reads_reduced(name) else self.moves.get(name)
            behind = self._behind(move, placement) if isinstance(before, Shard) and move is not None else None
            if move is not None and behind is not None:
                self.converted[key] = self._moved(name, move, behind, placement)
                return self.converted[key]
            role = {Replicated: "whole", Shard: "part", Window: "window"}[type(placement)]
            count = len(self.out.converted.get(name, ()))
            made = self._named(name, f"{role}{count or ''}")
            self._count(before, placement)
            self.build.convert(name, before, placement, made)
            self._note(made, placement)
            self.out.origins[made] = Origin("the mapping", name)
            self.out.converted.setdefault(name, []).append(made)
            if name in self.weights:
                self.weights.add(made)
            self.converted[key] = made
        return self.converted[key]

    def _key(self, name: str, placement: Placement) -> tuple[str, Placement, Phase | None]:
        return name, placement, self.build.phase if self.regather or self._reads_reduced(name) else None

    def _reads_reduced(self, name: str) -> bool:
        """Return whether a value is a gradient that the update reads: later passes reduce it for these readers."""
        return self.build.phase is Phase.UPDATE and name in self.gradients

    def _behind(self, move: Node, placement: Placement) -> Placement | None:
        """Return the placement of a move's operand that gives this placement of its result, if the operand is available
        so or is whole."""
        if isinstance(placement, Replicated):
            return REPLICATED
        if isinstance(placement, Window):
            perm = list(move.attributes.get("perm") or reversed(range(len(self.graph.types[move.outputs[0]].dims))))
            return replace(placement, dim=perm[placement.dim]) if move.is_a("Transpose") else None
        assert isinstance(placement, Shard)
        value, further = move.inputs[0], self.moves.get(move.inputs[0])
        for each in strategies(operator(move, self.graph, self.constants), Slot(0, True), placement):
            known = self._key(value, each.operands[0]) in self.converted
            if not self.choose.fit(move, each):
                continue
            if known or (further is not None and self._behind(further, each.operands[0]) is not None):
                return each.operands[0]
        return None

    def _moved(self, name: str, move: Node, operand: Placement, placement: Placement) -> str:
        """Return a value in another placement by moving its converted operand: the operand is converted once for all
        views."""
        node = clone(move)
        others = self.out.converted.setdefault(name, [])
        made = self._named(name, "whole" if isinstance(placement, Replicated) else "moved")
        made = f"{made}{len(others) or ''}" if made in self.graph.types else made
        others.append(made)
        node.source, node.made_by, node.encoded, node._attributes = None, PASS, None, dict(move.attributes)
        node.inputs = [self._as(move.inputs[0], operand), *move.inputs[1:]]
        node.outputs, node.name, node.phase = [made], "", self.build.phase
        self.graph.types[made] = self.graph.types[name]
        self.build.nodes.append(node)
        self._note(made, placement)
        if name in self.weights:
            self.weights.add(made)
        return made

    def _count(self, before: Placement, after: Placement) -> None:
        mapping = Conversion(before, after).mapping
        if mapping is None:
            raise UnsupportedError(f"no mapping brings a value that is {before} along {self.axis} to {after}")
        self.out.conversions[mapping.value] += 1

    def _mask(self, node: Node, strategy: Strategy) -> None:
        """Let a member index into its own part."""
        if node.is_a("MaxPool"):
            self.windows.pool(node, strategy, self.axis)
            return
        shard = next(each for each in strategy.operands if isinstance(each, Shard))
        attributes = {key: value for key, value in node.attributes.items() if key in ("axis", "reduction")}
        masked = Node(
            MASKED[node.op_type], node.inputs, node.outputs, domain=SPMD, made_by=node.made_by,
            attributes={"axis": 0} | attributes | {"group": self.axis, "sizes": list(shard.sizes)},
        )  # fmt: skip
        masked.phase, masked.source = node.phase, node.source
        node.op_type, node.domain, node.encoded, node._attributes = masked.op_type, SPMD, None, masked.attributes

    def _append(self, node: Node, results: Sequence[Placement]) -> None:
        self.build.nodes.append(node)
        if node.is_a(*_MOVES):
            self.moves[node.outputs[0]] = node
        if node.inputs and all(name in self.weights or self._constant(name) for name in node.reads):
            self.weights.update(node.outputs)
        source = next((name for name in node.inputs if name in self.placements), "")
        for name, placement in zip(node.outputs, results):
            self._note(name, placement)
            if source and name:
                self.out.origins[name] = Origin(f"{node.op_type} {node.label}", source)

    def _constant(self, name: str) -> bool:
        return name in self.graph.initializers

    def _note(self, name: str, placement: Placement) -> None:
        if name and not isinstance(placement, Replicated):
            self.placements[name] = placement
        self.windows.note(placement)

    def _named(self, value: str, role: str) -> str:
        """Return the name of a mapping's result."""
        return f"{self.build.root}{value.removeprefix(f'gopt.{PASS}.')}.{role}"


def _set_earliest(nodes: Sequence[Node]) -> None:
    """Give what was added the phase of its earliest reader: a value is converted once, and the update may stand before
    a node of the forward in the file."""
    order = {phase: place for place, phase in enumerate(Phase)}
    first: dict[str, Phase] = {}
    for node in reversed(nodes):
        if node.phase is None:
            continue
        if node.made_by == PASS and node.source is None:
            node.phase = min(
                (node.phase, *(first[name] for name in node.outputs if name in first)), key=order.__getitem__
            )
        for name in node.reads:
            if name not in first or order[node.phase] < order[first[name]]:
                first[name] = node.phase
