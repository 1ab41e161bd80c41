"""Chooses placements of parameters by structure: pairs of products, the first split by columns, the second by rows.

A product with a weight is a candidate for rows. The search follows the contracted dimension backwards through
activations, gates, attention heads and fused weights, down to columns of other weights. No value on the way may be
needed whole elsewhere. The residual stream fails this test, because norms read whole values. Experts come first:
batched products with one matrix for each expert, if their results are summed over the experts later. The classes of the
loss, and tables with more rows than the step reads, are split by rows of the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod

from gopt.analysis.training import TrainingGraph
from gopt.ir.graph import Node
from gopt.operators.kinds import CLASS_LOSSES, PRODUCTS, RESHAPES
from gopt.records.placements import Shard
from gopt.spmd.links import Slot, Strategy
from gopt.tensor_parallel.forward import COLUMN_PRODUCTS, LOSSES, Forward, sums
from gopt.tensor_parallel.sizes import Sizes, part_sizes


@dataclass(frozen=True, slots=True)
class Choice:
    """The placement of a parameter along the axis, and the reason."""

    placement: Shard
    why: str


def choose(
    training: TrainingGraph,
    members: int,
    sizes: Sizes,
    note: Callable[[str], None] = lambda text: None,
    *,
    apart: bool = True,
) -> dict[str, Choice]:
    """Return the placements of split parameters. ``note`` gets a line for each product left whole for having fewer
    heads than the axis has members. ``apart``: whether each expert goes to a single member, or each expert is split."""
    chooser = _Chooser(Forward(training), members, sizes, note)
    if apart:
        chooser.run_experts(summed=True)
    return chooser.run()


def experts(training: TrainingGraph, members: int, sizes: Sizes) -> dict[str, Choice]:
    """Return the placements of weights of experts: products share a dimension with these weights without summing over
    it."""
    return _Chooser(Forward(training), members, sizes, lambda text: None).run_experts(summed=False)


@dataclass(slots=True)
class _Chooser:
    forward: Forward
    members: int
    sizes: Sizes
    note: Callable[[str], None]
    found: dict[str, Choice] = field(default_factory=dict)

    def run(self) -> dict[str, Choice]:
        for node in self.forward.nodes:
            self._pair(node)
        for node in self.forward.nodes:
            if node.is_in(LOSSES):
                self._classes(node)
        for node in self.forward.nodes:
            if node.is_a("Gather"):
                self._table(node)
        return self.found

    def _dims(self, name: str) -> tuple[int, ...]:
        """Return the shape of a value; () if unknown."""
        return self.forward.training.graph.types[name].dims if self.forward.static(name) else ()

    # --- experts ------------------------------------------------------------------------------------------------------

    def run_experts(self, *, summed: bool) -> dict[str, Choice]:
        """Split experts; ``summed``: only those with results summed over the experts later."""
        for node in self.forward.nodes:
            for weight, operand in self.forward.weighed(node) if node.is_in(PRODUCTS) else ():
                self._expert(node, weight, operand, summed=summed)
        return self.found

    def _expert(self, node: Node, weight: int, operand: int, *, summed: bool) -> None:
        """Split a weight along a dimension common to both operands and the result of a product."""
        forward = self.forward
        for dim, length in enumerate(self._dims(node.inputs[weight])):
            shard = Shard(dim, part_sizes(length, self.members, self.sizes))
            way = next(iter(forward.strategies(node, Slot(weight), shard)), None)
            if length < self.members or way is None or not isinstance(way.operands[operand], Shard):
                continue
            weights, result = forward.weights(node.inputs[weight], shard), way.results[0]
            if not isinstance(result, Shard):
                continue
            rest = forward.summed(node.outputs[0], result) if summed else []
            if weights is not None and rest is not None:
                self._take(dict.fromkeys([*weights, *rest], "expert"))
                return

    # --- pairs --------------------------------------------------------------------------------------------------------

    def _pair(self, node: Node) -> None:
        """Split a pair if the sum of this product, its row-parallel end, leads back to columns."""
        for _, operand in self.forward.weighed(node):
            for dim, length in enumerate(self._dims(node.inputs[operand])):
                self._row(node, operand, dim, length)

    def _row(self, node: Node, index: int, dim: int, length: int) -> None:
        """Try ever larger units: single elements, heads, groups of heads."""
        unit, before = 1, 0
        while length // unit >= self.members:
            wider = self._paired(node, index, dim, length, unit)
            if wider <= unit:
                return
            unit, before = wider, unit
        if before and not self._paired(node, index, dim, length, before, repeated=True):
            return  # groups are fewer than members: their keys stay whole
        if before and length // unit > 1:
            heads = f"{length // unit} heads of {unit}"
            self.note(f"a product over {heads} stays whole: they are fewer than {self.members} members")

    def _paired(self, node: Node, index: int, dim: int, length: int, unit: int, *, repeated: bool = False) -> int:
        """Split a pair into parts that are multiples of ``unit``. Return 0 if it was split or cannot be, else the unit
        it needs instead. ``repeated``: values repeated for several heads may stay whole."""
        shard = Shard(dim, part_sizes(length, self.members, self.sizes, unit))
        way = next((strategy for strategy in self.forward.strategies(node, Slot(index), shard) if sums(strategy)), None)
        if way is None:
            return 0
        trace = _Trace(self.forward, length, repeated)
        if not trace.through(node.inputs[index], shard) or not trace.columns:
            return trace.unit
        rows = self.forward.weights(node.inputs[1 - index], way.operands[1 - index])
        if rows is not None:
            self._take({**dict.fromkeys(rows, "row"), **dict.fromkeys(trace.found.items(), "column")})
        return 0

    def _take(self, wanted: dict[tuple[str, Shard], str]) -> None:
        """Record placements, unless a parameter has another already."""
        placements: dict[str, set[Shard]] = {}
        for name, shard in wanted:
            placements.setdefault(name, set()).add(shard)
            if name in self.found:
                placements[name].add(self.found[name].placement)
        if all(len(shards) == 1 for shards in placements.values()):
            self.found.update({name: Choice(shard, why) for (name, shard), why in wanted.items()})

    # --- classes and tables -----------------------------------------------------------------------------------------

    def _classes(self, node: Node) -> None:
        """Split the classes over which a loss normalises."""
        dims = self._dims(node.inputs[0])
        if not dims:
            return
        axis = 1 if node.is_in(CLASS_LOSSES) else node.attributes.get("axis", -1) % len(dims)
        if dims[axis] < self.members:
            return
        trace = _Trace(self.forward, dims[axis])
        shard = Shard(axis, part_sizes(dims[axis], self.members, self.sizes))
        if trace.through(node.inputs[0], shard) and trace.columns:
            self._take(dict.fromkeys(trace.found.items(), "vocab"))

    def _table(self, node: Node) -> None:
        """Split the rows of a table that has more rows than a step reads."""
        table = node.inputs[0]
        if table not in self.forward.parameters or table in self.found or not self.forward.static(*node.inputs):
            return
        dims = self._dims(table)
        if node.attributes.get("axis", 0) or len(dims) != 2:
            return
        if dims[0] > prod(self._dims(node.inputs[1])) and dims[0] >= self.members:
            self._take({(table, Shard(0, part_sizes(dims[0], self.members, self.sizes))): "vocab"})


@dataclass(slots=True)
class _Trace:
    """Follows a dimension from a node back to weights with columns for it."""

    forward: Forward
    length: int
    """Elements of the dimension where the search starts."""
    repeated: bool = False
    """Whether a repeated value may stay whole: each member then reads the repeats that it needs."""
    found: dict[str, Shard] = field(default_factory=dict)
    columns: int = 0
    unit: int = 1
    """Elements that must stay together: an attention head's."""
    seen: dict[str, Shard] = field(default_factory=dict)

    def through(self, name: str, shard: Shard) -> bool:
        """Return whether a value can be computed in parts while no other value is needed whole; records the weights."""
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
        """Return the parts needed for a value's parts; None if not computable in parts."""
        forward = self.forward
        if name in forward.of_weights:
            items = forward.weights(name, shard)
            if items is None or any(self.found.get(operand_name, part) != part for operand_name, part in items):
                return None
            self.found.update(items)
            return []
        node = forward.producers.get(name)
        if node is None:
            return []  # a constant, or a mask in the batch, is cut where it is met
        if not forward.free(name, shard):
            return None
        options = forward.strategies(node, Slot(node.outputs.index(name), True), shard)
        options = [option for option in options if not option.masked and not sums(option)]
        if not options:
            if self.repeated and self._repeats(node):
                return []
            self._note_unit(node, shard)
            return None
        if node.is_in(COLUMN_PRODUCTS) and self._column(node, options[0]):
            self.columns += 1
        return [
            (operand, placement) for operand, placement in zip(node.inputs, options[0].operands)
            if operand and isinstance(placement, Shard)
        ]  # fmt: skip

    def _column(self, node: Node, strategy: Strategy) -> bool:
        """Return whether only weights bring the split into a product."""
        parts = [name for name, placement in zip(node.inputs[:2], strategy.operands) if isinstance(placement, Shard)]
        return bool(parts) and all(name in self.forward.of_weights for name in parts)

    def _repeats(self, node: Node) -> bool:
        """Return whether a node merges a dimension with repeated elements: keys shared by several queries."""
        producer = self.forward.producers.get(node.inputs[0])
        return node.is_in(RESHAPES) and producer is not None and producer.is_a("Expand")

    def _note_unit(self, node: Node, shard: Shard) -> None:
        """Note the unit of a reshape that merges dimensions: parts must be multiples of the inner ones."""
        described = self.forward.operator(node)
        before = described.operands[0] if node.is_in(RESHAPES) else None
        if before is None or not before.static:
            return
        shape = described.made()
        outer, length, inner = prod(shape[: shard.dim]) * shard.runs, sum(shard.sizes), prod(shape[shard.dim + 1 :])
        for dim, size in enumerate(before.dims):
            step = prod(before.dims[dim + 1 :])
            if size > 1 and prod(before.dims[:dim]) == outer and inner < step < length * inner and step % inner == 0:
                # steps of the first of them, in elements of the dimension at the end
                self.unit = max(self.unit, step // inner * (self.length // length))
