"""The forward graph for the search for splits: producers, users, and which values can be computed in parts."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace

from gopt.analysis.training import TrainingGraph
from gopt.ir.constant_folding import Constants
from gopt.ir.graph import Node
from gopt.ir.operator_use import use_of
from gopt.ir.phase import Phase
from gopt.operators.kinds import PRODUCTS, SIZES
from gopt.operators.table import operator
from gopt.records.placements import Partial, Placement, Shard, WindowTerms
from gopt.spmd.links import OperatorUse, Slot, Strategy, strategies

COLUMN_PRODUCTS = PRODUCTS | {"Conv"}
LOSSES = ("LogSoftmax", "SoftmaxCrossEntropyLoss")


@dataclass(slots=True)
class Forward:
    """The nodes of the forward, with indexes."""

    training: TrainingGraph
    nodes: list[Node] = field(init=False)
    parameters: set[str] = field(init=False)
    producers: dict[str, Node] = field(init=False)
    users: dict[str, list[Node]] = field(init=False)
    of_weights: set[str] = field(init=False)
    """Parameters, and values computed from them alone."""
    _constants: Constants = field(init=False)
    _operators: dict[int, OperatorUse] = field(default_factory=dict)
    _free: dict[tuple[str, Shard], bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        graph = self.training.graph
        self.nodes = [node for node in graph.nodes if node.phase is Phase.FORWARD]
        self.parameters = {state.tensor for state in self.training.parameters}
        self._constants = Constants(graph)
        self.producers = {name: node for node in self.nodes for name in node.outputs}
        users: defaultdict[str, list[Node]] = defaultdict(list)
        self.of_weights = set(self.parameters)
        for node in self.nodes:
            for name in node.reads if not node.is_in(SIZES) else ():
                users[name].append(node)
            reads = [name for name in node.reads if name not in graph.initializers or name in self.parameters]
            if reads and all(name in self.of_weights for name in reads):
                self.of_weights.update(node.outputs)
        self.users = dict(users)

    def operator(self, node: Node) -> OperatorUse:
        """Return a node for rules."""
        if id(node) not in self._operators:
            self._operators[id(node)] = use_of(node, self.training.graph, self._constants)
        return self._operators[id(node)]

    def strategies(self, node: Node, slot: Slot, shard: Shard) -> list[Strategy]:
        """Return the ways to split a node; a bias is added after the sum of a product."""
        return bare_strategies(self.operator(node), slot, shard)

    def static(self, *names: str) -> bool:
        """Return whether the shapes of values are known."""
        return all(self.training.graph.type_of(name).static for name in names)

    def unflattened(self, name: str) -> tuple[int, ...]:
        """Return the shape of a value before flattening for a product of matrices; () if unknown."""
        types, node = self.training.graph.types, self.producers.get(name)
        while node is not None and node.is_a("Reshape") and self.static(name) and len(types[name].dims) < 3:
            name, node = node.inputs[0], self.producers.get(node.inputs[0])
        return types[name].dims if self.static(name) else ()

    def weighed(self, node: Node) -> list[tuple[int, int]]:
        """Return pairs (index of a weight, index of the other operand) of a product; empty if both or neither are
        weights."""
        pairs = ((0, 1), (1, 0)) if node.is_in(COLUMN_PRODUCTS) and len(node.inputs) > 1 else ()
        return [
            (weight, operand) for weight, operand in pairs
            if node.inputs[weight] in self.of_weights and node.inputs[operand] not in self.of_weights
        ]  # fmt: skip

    def weights(self, name: str, part: Placement) -> list[tuple[str, Shard]] | None:
        """Return the parameters, with placements, from which a value is computed; None if any cannot be split so."""
        if not isinstance(part, Shard):
            return []
        if name in self.parameters:
            return [(name, part)]
        node = self.producers.get(name)
        if node is None:
            return []
        for way in strategies(self.operator(node), Slot(node.outputs.index(name), True), part):
            parts = [self.weights(operand, part) for operand, part in zip(node.inputs, way.operands) if operand]
            if all(part is not None for part in parts):
                return [item for part in parts if part for item in part]
        return None

    # --- what follows from parts of a value ---------------------------------------------------------------------------

    def free(self, name: str, shard: Shard) -> bool:
        """Return whether a value can stay sharded: everything computed from it can use parts, up to products with
        weights summing over them. The residual stream cannot, because norms need it whole."""
        todo = [(name, shard)]
        while todo:
            key = todo[-1]
            ahead = self._ahead(*key) if key not in self._free else []
            verdicts = [self._free.get(pair) for pair in ahead or ()]
            if ahead is not None and None in verdicts and False not in verdicts:
                todo += [pair for pair in ahead if pair not in self._free]
                continue
            self._free.setdefault(key, ahead is not None and False not in verdicts)
            todo.pop()
        return self._free[name, shard]

    def _ahead(self, name: str, shard: Shard) -> list[tuple[str, Shard]] | None:
        """Return what readers compute from the parts of a value; None if one needs the whole value."""
        pairs: list[tuple[str, Shard]] = []
        for node in self.users.get(name, ()):
            options = self.strategies(node, Slot(node.inputs.index(name)), shard)
            if any(map(sums, options)) and self.weighed(node):
                continue
            option = next((option for option in options if not sums(option)), None)
            if option is None and node.is_in(LOSSES):
                continue  # it is written for classes in parts
            if option is None:
                return None
            pairs += _sharded(node, option)
        return pairs

    def summed(self, name: str, shard: Shard) -> list[tuple[str, Shard]] | None:
        """Return the weights used between a value and the sums over the sharded dimension; None where the value is
        needed whole or is not summed."""
        wanted, names, ahead = [], {name}, [(name, shard)]
        while ahead:
            value, part = ahead.pop()
            readers = self.users.get(value, ())
            for node in readers:
                option = next(iter(self.strategies(node, Slot(node.inputs.index(value)), part)), None)
                if option is None or option.masked:
                    return None
                for operand, placement in zip(node.inputs, option.operands):
                    items = self.weights(operand, placement) if operand in self.of_weights else []
                    if items is None:
                        return None
                    wanted += items
                reached = [pair for pair in _sharded(node, option) if pair[0] not in names]
                ahead += reached
                names.update(out for out, _ in reached)
            if not readers:
                return None
        return wanted


def bare_strategies(described: OperatorUse, slot: Slot, shard: Shard) -> list[Strategy]:
    """Return strategies as ``strategies`` does, and also those that sum a product with a bias: the bias is added after
    the sum."""
    bare = filter(sums, _bare(described, slot, shard)) if has_bias(described) else ()
    return [*bare] or strategies(described, slot, shard)


def has_bias(described: OperatorUse) -> bool:
    """Return whether an operand of a product is added."""
    return described.has(2) and 0 in operator(described.op_type).factors


def summing(described: OperatorUse, slot: Slot, shard: Shard) -> bool:
    """Return whether a product without bias makes terms of a sum, by every strategy."""
    results = [strategy.results for strategy in _bare(described, slot, shard)]
    return bool(results) and all(any(isinstance(row, Partial | WindowTerms) for row in rows) for rows in results)


def _bare(described: OperatorUse, slot: Slot, shard: Shard) -> list[Strategy]:
    """Return the strategies of a product without bias."""
    return strategies(replace(described, operands=described.operands[:2]), slot, shard)


def sums(strategy: Strategy) -> bool:
    """Return whether a result is a partial sum."""
    return any(isinstance(result, Partial) for result in strategy.results)


def _sharded(node: Node, strategy: Strategy) -> list[tuple[str, Shard]]:
    return [(name, result) for name, result in zip(node.outputs, strategy.results) if isinstance(result, Shard)]
