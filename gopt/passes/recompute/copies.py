"""Writes copies of forward nodes, right before the first reader in the backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from gopt.analysis.flops import flops_of
from gopt.analysis.isomorphism import signature
from gopt.analysis.training import Phase
from gopt.ir.graph import COMM, RECOMPUTE, Node
from gopt.ir.rewriter import GraphRewriter
from gopt.operators.kinds import MOVES
from gopt.passes.recompute.forward import ForwardValues, member_of

SUFFIX = ".again"


@dataclass(slots=True)
class Copies:
    """The copies of a graph. ``chosen``: the values to compute again for the backward."""

    forward: ForwardValues
    chosen: Collection[str]
    rewriter: GraphRewriter = field(init=False)
    nodes: list[Node] = field(default_factory=list)
    suffix: str = SUFFIX
    """No value of the graph has a name with this end."""
    operations: Counter[int] = field(default_factory=Counter)
    """Member of the axis of stages, or 0 -> operations of its copies: of products alone, as in the
    count of a step."""
    _states: frozenset[str] = field(init=False)
    _count: Counter[str] = field(default_factory=Counter)
    """Moved parameter -> its copies for a single reader."""
    _names: dict[str, str] = field(default_factory=dict)
    """Value -> its name in the backward."""
    _calls: dict[str, tuple[Node, int]] = field(default_factory=dict)
    """Result of a gather that is sent once more -> the later call, and its place."""

    def __post_init__(self) -> None:
        self._states = frozenset(state.input for state in self.forward.program.states)
        self.rewriter = GraphRewriter(self.forward.graph, RECOMPUTE)
        while any(name.endswith(self.suffix) for name in self.forward.graph.types):
            self.suffix += SUFFIX

    def write(self) -> Copies:
        """Let the backward read copies of the chosen values."""
        self._find_gathers()
        for position, node in enumerate(self.forward.graph.nodes):
            if node.phase is not Phase.BACKWARD or node.source is None:
                continue
            for name in dict.fromkeys(node.inputs):
                if name in self.chosen and self._moves_parameter(name):
                    self._count[name] += 1
                    self._copy(self.forward.makers[name], position, self.suffix * (1 + self._count[name]))
                    self.rewriter.rewire(node, name, f"{name}{self.suffix * (1 + self._count[name])}")
                elif name in self.chosen:
                    self.rewriter.rewire(node, name, self._again(name, position))
        self.rewriter.finish()
        return self

    def _moves_parameter(self, name: str) -> bool:
        """Return whether a value is a moved parameter at hand. Then every reader of the backward has a copy, alive
        up to the reader: a copy for all readers would live through the backward of a block."""
        node = self.forward.makers[name]
        return node.is_in(MOVES) and name not in self.forward.root and node.inputs[0] in self._states

    def _find_gathers(self) -> None:
        """Let copies read parameters from the second gather, if the backward has a gather."""
        calls: dict[object, Node] = {}
        for position, node in enumerate(self.forward.graph.nodes):
            if node.domain == COMM and node.added:
                earlier = calls.setdefault((signature(node), *node.inputs), node)
                if earlier is not node:
                    for old, new in zip(earlier.outputs, node.outputs):
                        self._names[old] = new
                        self._calls[old] = node, position

    def _again(self, name: str, position: int) -> str:
        """The name of a value for a node of the backward at a place; writes the nodes that make it there."""
        rewriter, makers = self.rewriter, self.forward.makers
        stack = [name]
        while stack:
            value = stack[-1]
            if value in self._calls:
                call, due = self._calls[value]
                if due > position:
                    rewriter.move(call, position - 0.75)
                    self._calls.update((name, (call, position)) for name in self._calls if self._calls[name][0] is call)
            if value in self._names or value not in self.chosen:
                stack.pop()
                continue
            node = makers[value]
            waits = [
                operand for operand in node.inputs
                if (operand in self.chosen and operand not in self._names)
                or self._calls.get(operand, (node, -1))[1] > position
            ]  # fmt: skip
            if waits:
                stack.extend(waits)
                continue
            stack.pop()
            self._names.update(self._copy(node, position, self.suffix))
        return self._names[name]

    def _copy(self, node: Node, position: int, suffix: str) -> dict[str, str]:
        """Write a copy of a node in front of a place; returns result -> name of the copied result."""
        graph = self.forward.graph
        names = {result: f"{result}{suffix}" for result in node.outputs}
        inputs = [self._names.get(operand, operand) for operand in node.inputs]
        outputs = {names[result]: graph.types[result] for result in node.outputs}
        copy = self.rewriter.repeat(node, inputs, outputs, node.sharding)
        copy.source, copy.phase, copy.name = node.source, Phase.BACKWARD, node.name and node.name + suffix
        self.rewriter.move(copy, position - 0.5)
        self.nodes.append(copy)
        self.operations[member_of(node)] += flops_of(graph, copy)
        stages = self.forward.program.value_stages
        stages.update((new, stages[old]) for old, new in names.items() if old in stages)
        return names
