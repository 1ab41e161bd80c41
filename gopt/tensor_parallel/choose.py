"""Placements of parameters found by structure: pairs of products, the first split by columns, the second by rows.

A product with a weight is a candidate for rows. The index over which it sums is followed back, by the links of the
operators on the way, until it ends in columns of other weights: through activations, gates, heads of an attention,
runs of a fused weight. Nothing on the way may be needed whole elsewhere, as the residual stream is by its norms. The
classes of the loss, and tables with more rows than the step reads, are split by rows of their table.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import prod

from gopt.analysis.training import TrainingGraph
from gopt.ir.graph import Node
from gopt.ir.phase import Phase
from gopt.sharding.links import Operator, Slot, Strategy, strategies
from gopt.sharding.placements import Partial, Placement, Shard
from gopt.tensor_parallel.operators import Constants, operator
from gopt.tensor_parallel.sizes import Sizes, part_sizes

PRODUCTS = ("MatMul", "Gemm", "Einsum", "Conv")
_LOSSES = ("LogSoftmax", "SoftmaxCrossEntropyLoss")


@dataclass(frozen=True, slots=True)
class Choice:
    """The placement of a parameter along the axis, and why."""

    placement: Shard
    why: str


def choose(
    training: TrainingGraph, members: int, sizes: Sizes, note: Callable[[str], None] = lambda text: None
) -> dict[str, Choice]:
    """Parameter -> its placement, for those that are split; ``note`` is told of products that stay whole because they
    have fewer heads than there are members."""
    return _Chooser(training, members, sizes, note).run()


def experts(training: TrainingGraph, members: int, sizes: Sizes) -> dict[str, Choice]:
    """Parameter -> its placement, for weights of experts: those of a product that shares a dimension with its other
    operand and does not sum over it."""
    return _Chooser(training, members, sizes, lambda text: None).run_experts()


@dataclass(slots=True)
class _Chooser:
    training: TrainingGraph
    members: int
    sizes: Sizes
    note: Callable[[str], None]
    found: dict[str, Choice] = field(default_factory=dict)
    parameters: set[str] = field(init=False)
    constants: Constants = field(init=False)
    producers: dict[str, Node] = field(init=False)
    users: dict[str, list[Node]] = field(init=False)
    of_weights: set[str] = field(init=False)
    """Parameters, and values that follow from them alone."""
    operators: dict[int, Operator] = field(default_factory=dict)

    def __post_init__(self) -> None:
        graph = self.training.graph
        forward = [node for node in graph.nodes if node.phase is Phase.FORWARD]
        self.parameters = {state.tensor for state in self.training.parameters}
        self.constants = Constants(graph)
        self.producers = {name: node for node in forward for name in node.outputs}
        users: defaultdict[str, list[Node]] = defaultdict(list)
        self.of_weights = set(self.parameters)
        for node in forward:
            for name in node.reads:
                users[name].append(node)
            reads = [name for name in node.reads if name not in graph.initializers or name in self.parameters]
            if reads and all(name in self.of_weights for name in reads):
                self.of_weights.update(node.outputs)
        self.users = dict(users)

    def run(self) -> dict[str, Choice]:
        forward = [node for node in self.training.graph.nodes if node.phase is Phase.FORWARD]
        for node in forward:
            if node.is_a(*PRODUCTS):
                self._pair(node)
        for node in forward:
            if node.is_a(*_LOSSES):
                self._classes(node)
        for node in forward:
            if node.is_a("Gather"):
                self._table(node)
        return self.found

    def run_experts(self) -> dict[str, Choice]:
        for node in self.training.graph.nodes:
            if node.phase is Phase.FORWARD and node.is_a(*PRODUCTS) and len(node.inputs) > 1:
                for place in (0, 1):
                    self._expert(node, place)
        return self.found

    def _expert(self, node: Node, place: int) -> None:
        """Split the weight of a product along a dimension that both operands have, and so has the result."""
        weight, other = node.inputs[place], node.inputs[1 - place]
        if weight not in self.of_weights or other in self.of_weights or not self._static(weight):
            return
        for dim, length in enumerate(self.training.graph.types[weight].dims):
            shard = Shard(dim, part_sizes(length, self.members, self.sizes))
            for each in self._strategies(node, Slot(place), shard) if length >= self.members else ():
                if isinstance(each.operands[1 - place], Shard) and isinstance(each.results[0], Shard):
                    items = self._weight(weight, shard)
                    self._take(dict.fromkeys(items or [], "expert"))
                    return

    def _operator(self, node: Node) -> Operator:
        if id(node) not in self.operators:
            self.operators[id(node)] = operator(node, self.training.graph, self.constants)
        return self.operators[id(node)]

    # --- pairs ------------------------------------------------------------------------------------------------------

    def _pair(self, node: Node) -> None:
        """Take a product as the row-parallel end of a pair, if its sum leads back to columns."""
        for place in (0, 1):
            weight, other = node.inputs[place], node.inputs[1 - place]
            if weight not in self.of_weights or other in self.of_weights:
                continue
            for dim, length in enumerate(self.training.graph.types[other].dims if self._static(other) else ()):
                self._row(node, 1 - place, dim, length)

    def _row(self, node: Node, place: int, dim: int, length: int) -> None:
        unit = 1
        for _ in range(3):
            shard = Shard(dim, part_sizes(length, self.members, self.sizes, unit))
            sums = [each for each in self._strategies(node, Slot(place), shard) if _sums(each)]
            if length // unit < self.members or not sums:
                if sums and unit > 1 and length // unit > 1:
                    heads = f"{length // unit} heads of {unit}"
                    self.note(f"a product over {heads} stays whole: they are fewer than {self.members} members")
                return
            trace = _Trace(self, node)
            if trace.through(node.inputs[place], shard) and trace.columns:
                rows = self._weight(node.inputs[1 - place], sums[0].operands[1 - place])
                if rows is not None:
                    self._take({**dict.fromkeys(rows, "row"), **dict.fromkeys(trace.found.items(), "column")})
                return
            if trace.unit <= unit:
                return
            unit = trace.unit

    def _strategies(self, node: Node, slot: Slot, shard: Shard) -> list[Strategy]:
        """As ``strategies``; a bias is added behind the sum of a product."""
        return bare_strategies(self._operator(node), slot, shard)

    def _weight(self, name: str, placement: Placement) -> list[tuple[str, Shard]] | None:
        """The parameters behind a value that follows from weights alone; None where one cannot be split so."""
        if not isinstance(placement, Shard):
            return []
        if name in self.parameters:
            return [(name, placement)]
        node = self.producers.get(name)
        if node is None:
            return []
        for each in strategies(self._operator(node), Slot(node.outputs.index(name), True), placement):
            parts = [self._weight(operand, place) for operand, place in zip(node.inputs, each.operands) if operand]
            if all(part is not None for part in parts):
                return [item for part in parts if part for item in part]
        return None

    def _take(self, wanted: dict[tuple[str, Shard], str]) -> None:
        """Note placements, unless one of the parameters has another already."""
        placements: dict[str, set[Shard]] = {}
        for name, shard in wanted:
            placements.setdefault(name, set()).add(shard)
            if name in self.found:
                placements[name].add(self.found[name].placement)
        if all(len(each) == 1 for each in placements.values()):
            self.found.update({name: Choice(shard, why) for (name, shard), why in wanted.items()})

    # --- classes and tables -----------------------------------------------------------------------------------------

    def _classes(self, node: Node) -> None:
        """Split the classes over which a loss normalises."""
        if not self._static(node.inputs[0]):
            return
        dims = self.training.graph.types[node.inputs[0]].dims
        axis = 1 if node.is_a("SoftmaxCrossEntropyLoss") else node.attributes.get("axis", -1) % len(dims)
        if dims[axis] < self.members:
            return
        trace = _Trace(self, node)
        shard = Shard(axis, part_sizes(dims[axis], self.members, self.sizes))
        if trace.through(node.inputs[0], shard) and trace.columns:
            self._take(dict.fromkeys(trace.found.items(), "vocab"))

    def _table(self, node: Node) -> None:
        """Split the rows of a table that has more of them than a step reads."""
        table = node.inputs[0]
        graph = self.training.graph
        if table not in self.parameters or table in self.found or not self._static(table, node.inputs[1]):
            return
        dims = graph.types[table].dims
        if node.attributes.get("axis", 0) or len(dims) != 2:
            return
        if dims[0] > prod(graph.types[node.inputs[1]].dims) and dims[0] >= self.members:
            self._take({(table, Shard(0, part_sizes(dims[0], self.members, self.sizes))): "vocab"})

    def _static(self, *names: str) -> bool:
        return all(self.training.graph.type_of(name).static for name in names)


@dataclass(slots=True)
class _Trace:
    """One dimension followed back from a node to the weights whose columns make it."""

    chooser: _Chooser
    end: Node
    found: dict[str, Shard] = field(default_factory=dict)
    columns: int = 0
    unit: int = 1
    """Elements that stay together, where the dimension did not split otherwise: those of a head."""
    seen: dict[str, Shard] = field(default_factory=dict)

    def through(self, name: str, shard: Shard) -> bool:
        """Whether a value can be had in parts without another value in whole; notes the weights."""
        stack = [(name, shard)]
        while stack:
            value, part = stack.pop()
            if value in self.seen:
                if self.seen[value] != part:
                    return False
                continue
            self.seen[value] = part
            behind = self._behind(value, part)
            if behind is None:
                return False
            stack += behind
        return True

    def _behind(self, name: str, shard: Shard) -> list[tuple[str, Shard]] | None:
        """What a value is made of, in parts; None where it cannot be had so."""
        chooser = self.chooser
        if name in chooser.of_weights:
            items = chooser._weight(name, shard)
            if items is None or any(self.found.get(each, part) != part for each, part in items):
                return None
            self.found.update(items)
            return []
        node = chooser.producers.get(name)
        if node is None:
            return None if name in chooser.training.batch else []  # a constant is cut where it is met
        if not self._free(name, shard):
            return None
        options = chooser._strategies(node, Slot(node.outputs.index(name), True), shard)
        options = [each for each in options if not each.masked and not _sums(each)]
        if not options:
            self._note_unit(node, shard)
            return None
        if node.is_a(*PRODUCTS) and self._column(node, options[0]):
            self.columns += 1
        return [
            (operand, place) for operand, place in zip(node.inputs, options[0].operands)
            if operand and isinstance(place, Shard)
        ]  # fmt: skip

    def _column(self, node: Node, strategy: Strategy) -> bool:
        """Whether a product takes its parts from a weight alone."""
        parts = [name for name, place in zip(node.inputs[:2], strategy.operands) if isinstance(place, Shard)]
        return bool(parts) and all(name in self.chooser.of_weights for name in parts)

    def _free(self, name: str, shard: Shard) -> bool:
        """Whether all readers of a value can do with parts of it."""
        for node in self._readers(name):
            if node is self.end:
                continue
            options = self.chooser._strategies(node, Slot(node.inputs.index(name)), shard)
            weighed = node.is_a(*PRODUCTS) and any(each in self.chooser.of_weights for each in node.inputs)
            if not any(not _sums(each) or weighed for each in options):
                return False
        return True

    def _readers(self, name: str) -> Iterator[Node]:
        return (node for node in self.chooser.users.get(name, ()) if not node.is_a("Shape", "Size"))

    def _note_unit(self, node: Node, shard: Shard) -> None:
        """A dimension that is split into several: its parts are whole numbers of the inner ones."""
        before = self.chooser._operator(node).operands[0]
        if node.is_a("Reshape", "Flatten") and before is not None and before.static and len(before.dims) > 1:
            self.unit = max(self.unit, before.dims[-1])


def bare_strategies(described: Operator, slot: Slot, shard: Shard) -> list[Strategy]:
    """As ``strategies``; the sum of a product that has a bias is one as well: the bias is added behind it."""
    if described.op_type in ("Gemm", "Conv") and len(described.operands) > 2:
        bare = replace(described, operands=described.operands[:2])
        sums = [each for each in strategies(bare, slot, shard) if _sums(each)]
        if sums:
            return sums
    return strategies(described, slot, shard)


def _sums(strategy: Strategy) -> bool:
    return any(isinstance(each, Partial) for each in strategy.results)
