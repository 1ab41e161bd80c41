"""Placements of parameters found by structure: pairs of products, the first split by columns, the second by rows.

A product with a weight is a candidate for rows. The index over which it sums is followed back, by the links of the
operators on the way, until it ends in columns of other weights: through activations, gates, heads of an attention,
runs of a fused weight. Nothing on the way may be needed whole elsewhere, as the residual stream is by its norms. Before
that, experts: a product whose matrices are as many as its batches, if what it makes is summed over them later. The
classes of the loss, and tables with more rows than the step reads, are split by rows of their table.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
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
    known_free: dict[tuple[str, Shard], bool] = field(default_factory=dict)

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
            if node.is_a("MatMul", "Einsum"):
                self._experts(node)
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

    def _operator(self, node: Node) -> Operator:
        if id(node) not in self.operators:
            self.operators[id(node)] = operator(node, self.training.graph, self.constants)
        return self.operators[id(node)]

    # --- experts ----------------------------------------------------------------------------------------------------

    def _experts(self, node: Node) -> None:
        """Split the experts of a product, each of which has a matrix and rows of its own, if they are summed later."""
        for place in (0, 1):
            weight, other = node.inputs[place], node.inputs[1 - place]
            if weight not in self.of_weights or other in self.of_weights or not self._static(weight, other):
                continue
            for dim, length in enumerate(self.training.graph.types[weight].dims):
                shard = Shard(dim, part_sizes(length, self.members, self.sizes))
                each = next(iter(self._strategies(node, Slot(place), shard)), None)
                if length < self.members or each is None or not all(isinstance(p, Shard) for p in each.operands):
                    continue
                out, own = each.results[0], self._weight(weight, shard)
                rest = self._summed(node.outputs[0], out) if isinstance(out, Shard) else None
                if own is not None and rest is not None:
                    self._take(dict.fromkeys([*own, *rest], "expert"))
                    return

    def _summed(self, name: str, shard: Shard) -> list[tuple[str, Shard]] | None:
        """The weights that take part on the way from a value to sums over a dimension; None where it is needed whole."""
        found, seen, ahead = [], {name}, [(name, shard)]
        while ahead:
            value, part = ahead.pop()
            readers = [node for node in self.users.get(value, ()) if not node.is_a("Shape", "Size")]
            for node in readers:
                option = next(iter(self._strategies(node, Slot(node.inputs.index(value)), part)), None)
                if option is None or option.masked:
                    return None
                for operand, place in zip(node.inputs, option.operands):
                    items = self._weight(operand, place) if operand in self.of_weights else []
                    if items is None:
                        return None
                    found += items
                made = [(out, each) for out, each in zip(node.outputs, option.results) if isinstance(each, Shard)]
                ahead += [each for each in made if each[0] not in seen]
                seen.update(out for out, _ in made)
            if not readers:
                return None
        return found

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
            trace = _Trace(self, length)
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

    def free(self, name: str, shard: Shard) -> bool:
        """Whether a value can stay in parts: all that follows from it, up to products with weights, does with parts."""
        todo = [(name, shard)]
        while todo:
            key = todo[-1]
            ahead = self._ahead(*key) if key not in self.known_free else []
            missing = [each for each in ahead or () if each not in self.known_free]
            if ahead is not None and missing and all(self.known_free.get(each, True) for each in ahead):
                todo += missing
                continue
            if key not in self.known_free:
                self.known_free[key] = ahead is not None and all(self.known_free[each] for each in ahead)
            todo.pop()
        return self.known_free[name, shard]

    def _ahead(self, name: str, shard: Shard) -> list[tuple[str, Shard]] | None:
        """What readers make of the parts of a value; None where one needs the whole value."""
        found: list[tuple[str, Shard]] = []
        for node in self.users.get(name, ()):
            if node.is_a("Shape", "Size"):
                continue
            options = self._strategies(node, Slot(node.inputs.index(name)), shard)
            if node.is_a(*PRODUCTS) and any(map(_sums, options)) and self._weighed(node):
                continue
            option = next((each for each in options if not _sums(each)), None)
            if option is None and node.is_a(*_LOSSES):
                continue  # it is written for classes in parts
            if option is None:
                return None
            found += [(out, part) for out, part in zip(node.outputs, option.results) if isinstance(part, Shard)]
        return found

    def _weighed(self, node: Node) -> bool:
        return any(name in self.of_weights for name in node.inputs)

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
        trace = _Trace(self, dims[axis])
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
    length: int
    """Elements of the dimension at the end."""
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
            return []  # a constant, or a mask in the batch, is cut where it is met
        if not chooser.free(name, shard):
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

    def _note_unit(self, node: Node, shard: Shard) -> None:
        """Dimensions that are joined into one: its parts are whole numbers of the inner ones."""
        described = self.chooser._operator(node)
        before = described.operands[0]
        if not node.is_a("Reshape", "Flatten") or before is None or not before.static:
            return
        made = described.made()
        outer, length, inner = prod(made[: shard.dim]) * shard.runs, sum(shard.sizes), prod(made[shard.dim + 1 :])
        for dim, size in enumerate(before.dims):
            step = prod(before.dims[dim + 1 :])
            if size > 1 and prod(before.dims[:dim]) == outer and inner < step < length * inner and step % inner == 0:
                # steps of the first of them, in elements of the dimension at the end
                self.unit = max(self.unit, step // inner * (self.length // length))


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
